// The same for many numbers, in some threads of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>

namespace stoker {

class Turns {
 public:
  explicit Turns(int threads) : thread_count_(static_cast<size_t>(threads)) {}
  ~Turns() { wait(); }
  Turns(const Turns&) = delete;

  // One thread for each processor that this process may use, but not too many; none where there is one only.
  static int threads() {
    cpu_set_t processors;
    if (::sched_getaffinity(0, sizeof processors, &processors) != 0) return 0;
    const int count = CPU_COUNT(&processors);
    return count < 2 ? 0 : count < THREADS_MAX ? count : THREADS_MAX;
  }

  // Begins that for all numbers below `count`; without threads it is done when this returns. `then` throws nothing.
  void begin(size_t count, std::function<void(size_t)> then) {
    wait();
    next_ = 0;
    const auto work = [this, count, then = std::move(then)] {
      for (size_t i; (i = next_.fetch_add(1)) < count;) then(i);
    };
    try {
      while (threads_.size() < thread_count_) threads_.emplace_back(work);
    } catch (const std::system_error&) {
      // There may be no more threads: those that there are do it, or this one.
    }
    if (threads_.empty()) work();
  }

  void wait() noexcept {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  static constexpr int THREADS_MAX = 4;

  const size_t thread_count_;
  std::vector<std::thread> threads_;
  std::atomic<size_t> next_{0};
};

}  // namespace stoker
