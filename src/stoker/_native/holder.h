// What one thread replaces as a whole, and others read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace stoker {

template <typename T>
class Holder {
 public:
  std::shared_ptr<const T> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }
  void set(std::shared_ptr<const T> held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = std::move(held);
    version_.fetch_add(1);
  }
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> held_{std::make_shared<T>()};
  std::atomic<uint64_t> version_{1};
};

}  // namespace stoker
