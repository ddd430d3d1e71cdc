// Requests of a mount, as the kernel's FUSE protocol has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>

namespace stoker {

// Numbers of files that can be opened to be read without a decision, under no number of their own.
class PlainFiles {
 public:
  void add(uint64_t node);
  void discard(uint64_t node);
  bool has(uint64_t node) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_set<uint64_t> nodes_;
};

// Reads the next request that needs a decision into `buffer`: how many bytes it has, or -1 and errno as read() has it.
// The others are answered on the way, by the thread that reads them: OPEN and RELEASE of `plain` files, and what every
// open() of Python and every `ls -l` asks, IOCTL and extended attributes whose names do not begin with `attributes`,
// which are refused. Where that is empty, all attributes are handed on.
ssize_t next_request(int device, char* buffer, size_t size, const std::string& attributes, const PlainFiles& plain);

}  // namespace stoker
