#include "files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace stoker {

File::~File() {
  ::close(fd);
  leaving_->fetch_sub(leaving_bytes_.load());
}

void File::leave(int64_t size_bytes) {
  leaving_->fetch_add(size_bytes);
  leaving_bytes_.fetch_add(size_bytes);
}

std::string Files::path(uint32_t container) const {
  char name[32];
  std::snprintf(name, sizeof name, "/%03x/%08x", container >> 12, container);
  return folder_ + name;
}

std::shared_ptr<File> Files::open(uint32_t container, int& number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[container];
  std::shared_ptr<File> file = entry.any.lock();
  if (!file) {
    const int fd = ::open(path(container).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
      number = errno;
      if (entry.kept) order_.erase(entry.place);
      entries_.erase(container);
      return nullptr;
    }
    file = std::make_shared<File>(fd, container, leaving_);
    entry.any = file;
  }
  if (entry.kept) {
    order_.splice(order_.begin(), order_, entry.place);
    return file;
  }
  order_.push_front(container);
  entry.kept = file;
  entry.place = order_.begin();
  while (order_.size() > open_max_) {
    const auto oldest = entries_.find(order_.back());
    order_.pop_back();
    oldest->second.kept.reset();
    if (oldest->second.any.expired()) entries_.erase(oldest);
  }
  return file;
}

bool Files::is_used(uint32_t container) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(container);
  return found != entries_.end() && found->second.any.use_count() > (found->second.kept ? 1 : 0);
}

void Files::forget(uint32_t container, int64_t size_bytes) {
  std::shared_ptr<File> file;  // closed, perhaps, after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(container);
  if (found == entries_.end()) return;
  file = found->second.any.lock();
  if (found->second.kept) order_.erase(found->second.place);
  entries_.erase(found);
  if (file) file->leave(size_bytes);
}

}  // namespace stoker
