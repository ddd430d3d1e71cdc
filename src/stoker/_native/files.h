// Open files of containers, which close with their last user: nobody is served from a descriptor that was reused.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace stoker {

using Counter = std::atomic<int64_t>;

struct File {
  File(int fd, uint32_t container, std::shared_ptr<Counter> leaving)
      : fd(fd), container(container), leaving_(std::move(leaving)) {}
  File(const File&) = delete;
  ~File();
  // It has no name any more: so many bytes are free again once it is closed.
  void leave(int64_t size_bytes);

  const int fd;
  const uint32_t container;

 private:
  std::shared_ptr<Counter> leaving_;
  Counter leaving_bytes_{0};
};

class Files {
 public:
  Files(std::string folder, size_t open_max) : folder_(std::move(folder)), open_max_(open_max) {}

  // Nothing if the file cannot be opened; `number` is then the errno.
  std::shared_ptr<File> open(uint32_t container, int& number);
  // Whether somebody sends from it. Asked after its blocks were taken out of the index: then nobody begins to.
  bool is_used(uint32_t container);
  // It is unlinked: what is being sent from it goes on.
  void forget(uint32_t container, int64_t size_bytes);
  // Of files that are unlinked and still sent from.
  int64_t leaving_bytes() const { return leaving_->load(); }
  std::string path(uint32_t container) const;

 private:
  struct Entry {
    std::shared_ptr<File> kept;
    std::weak_ptr<File> any;
    std::list<uint32_t>::iterator place;  // while it is kept
  };

  std::string folder_;
  size_t open_max_;
  std::mutex mutex_;
  std::list<uint32_t> order_;  // of those that are kept, the last used first
  std::unordered_map<uint32_t, Entry> entries_;
  std::shared_ptr<Counter> leaving_{std::make_shared<Counter>(0)};
};

}  // namespace stoker
