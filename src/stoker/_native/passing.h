// Descriptors of containers on their way to a reader at a Unix socket.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "files.h"
#include "index.h"

namespace stoker {

// What a reader takes in place of bytes. `held`: the instance of the front that passed it descriptors, and the numbers of
// their containers (u32, big endian), ascending.
struct Wanted {
  uint64_t from_bytes = UINT64_MAX;  // objects of this size and more
  uint64_t count_max = 0;            // more descriptors
  std::string held;

  bool has(uint32_t container, const std::string& instance) const;
};

// Some that go together, with the first byte of an answer or of a part of one. Each is of an open file description of its
// own, for reading: what a reader does to it (flags, locks, advice) is nothing to whom the server sends from the same file.
class Passing {
 public:
  static constexpr size_t COUNT_MAX = 253;  // SCM_MAX_FD: more do not go with one message
  static constexpr mode_t HANDED_OUT = 01000;  // of a large object's file: S_ISVTX, see `ContainerFiles.punch`

  // `open`: how many there are of them all, at most `open_max`.
  Passing(std::shared_ptr<Counter> open, int64_t open_max) : open_(std::move(open)), open_max_(open_max) {}
  ~Passing();
  Passing(const Passing&) = delete;

  // False if it cannot be opened (see errno), or too many are on their way. Who gets it may read all that is in there: it
  // must not be of another bucket.
  bool add(const Index& index, const Files& files, uint16_t bucket, uint32_t container);
  size_t size() const { return entries_.size(); }
  // Says what they are.
  std::string frame(const std::string& instance) const;
  // As `send`; whatever goes out, they go with it.
  ssize_t send(int socket, const char* bytes, size_t size, int flags) const;

 private:
  struct Entry {
    int fd;
    uint32_t container;
    uint64_t device, inode;
  };
  std::shared_ptr<Counter> open_;
  const int64_t open_max_;
  std::vector<Entry> entries_;
};

}  // namespace stoker
