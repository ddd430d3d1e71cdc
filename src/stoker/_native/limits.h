// How fast bytes may go out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace stoker {

// A token bucket that holds what may go out in `BURST_S`; a rate of 0 is no limit.
class TokenBucket {
 public:
  static constexpr double BURST_S = 0.05;
  explicit TokenBucket(double bytes_per_s) : rate_(bytes_per_s), level_(bytes_per_s * BURST_S) {}

  bool is_limited() const { return rate_ > 0; }
  // How many of `wanted` bytes may go out now.
  uint64_t take(uint64_t wanted, double now_s) {
    if (!is_limited()) return wanted;
    const std::lock_guard<std::mutex> lock(mutex_);
    level_ = std::min(rate_ * BURST_S, level_ + (now_s - at_s_) * rate_);
    at_s_ = now_s;
    const auto granted = static_cast<uint64_t>(std::clamp(level_, 0.0, static_cast<double>(wanted)));
    level_ -= static_cast<double>(granted);
    return granted;
  }
  // What was taken and not used.
  void give(uint64_t bytes) {
    if (!is_limited()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    level_ += static_cast<double>(bytes);
  }

 private:
  const double rate_;
  std::mutex mutex_;
  double level_;
  double at_s_ = 0;
};

}  // namespace stoker
