// Writes blocks and works out their checksums, on a thread of its own: whoever has many gets many answers at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace stoker {

class Writer {
 public:
  struct Work {
    uint64_t number = 0;
    int fd = -1;  // closed once it is done
    uint64_t offset = 0;
    const char* bytes = nullptr;  // which stay where they are until it is taken
    uint64_t size = 0;
  };
  struct Done {
    uint64_t number = 0;
    uint32_t crc = 0;
    int error = 0;  // errno; 0: all is written
  };

  Writer();
  Writer(const Writer&) = delete;
  ~Writer();  // after all is written

  void write(const Work& work);
  // What is done by now. The descriptor can be read from whenever there may be something.
  std::vector<Done> take();
  int event_fd() const { return event_fd_; }

 private:
  void run();

  const int event_fd_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Work> works_;
  std::vector<Done> done_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace stoker
