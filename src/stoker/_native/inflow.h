// The bytes of a block while they come in: written once, from the start, and sent to many connections meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "files.h"

namespace stoker {

class Front;

class Inflow {
 public:
  explicit Inflow(uint64_t size);
  Inflow(const Inflow&) = delete;

  // What of it can be sent now: memory, or once it is kept, a place in a file. Lives on while it is being sent.
  struct View {
    std::shared_ptr<char[]> bytes;
    std::shared_ptr<File> file;
    uint64_t offset = 0;  // of its first byte in the file
    uint64_t filled = 0;
  };

  uint64_t size() const { return size_; }
  uint64_t filled() const;
  View view() const;
  // The next bytes; one writer at a time. False, and nothing is taken, if they are more than are missing.
  bool take(const char* bytes, uint64_t size);
  // All of it lies in a file by now: the memory is given back, and who is not done reads on there.
  void keep(std::shared_ptr<File> file, uint64_t offset);
  // Wakes a connection as soon as more than `beyond` is there. False: it is there already.
  bool wait(std::weak_ptr<Front> front, uint64_t connection, uint64_t beyond);

 private:
  const uint64_t size_;
  mutable std::mutex mutex_;
  View view_;
  std::vector<std::pair<std::weak_ptr<Front>, uint64_t>> waiting_;
};

}  // namespace stoker
