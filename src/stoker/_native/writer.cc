#include "writer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "hash.h"

namespace stoker {

namespace {

int write_all(const Writer::Work& work) {
  uint64_t at = 0;
  while (at < work.size) {
    const ssize_t written =
        ::pwrite(work.fd, work.bytes + at, work.size - at, static_cast<off_t>(work.offset + at));
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) at += static_cast<uint64_t>(written);
  }
  return 0;
}

}  // namespace

Writer::Writer() : event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    ::close(event_fd_);
    throw;
  }
}

Writer::~Writer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
  ::close(event_fd_);
}

void Writer::write(const Work& work) {
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_first = works_.empty();
    works_.push_back(work);
  }
  if (is_first) wake_.notify_one();
}

std::vector<Writer::Done> Writer::take() {
  uint64_t count = 0;
  while (::read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) continue;
  std::vector<Done> done;
  const std::lock_guard<std::mutex> lock(mutex_);
  done.swap(done_);
  return done;
}

void Writer::run() {
  std::vector<Work> works;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return is_ending_ || !works_.empty(); });
      if (works_.empty()) return;
      works.swap(works_);
    }
    for (const Work& work : works) {
      Done done{work.number, 0, write_all(work)};
      if (!done.error) done.crc = crc32c(work.bytes, work.size);
      ::close(work.fd);
      bool is_first = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_first = done_.empty();
        done_.push_back(done);
      }
      const uint64_t one = 1;
      // Told at the first: by the time somebody looks, there are often more.
      while (is_first && ::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) continue;
    }
    works.clear();
  }
}

}  // namespace stoker
