// How fast bytes may go out.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace stoker {

// A token bucket that holds what may go out in `BURST_S`; a rate of 0 is no limit.
class TokenBucket {
 public:
  static constexpr double BURST_S = 0.05;
  static constexpr double BURST_MIN = 1;  // less would never be a byte
  explicit TokenBucket(double bytes_per_s) : rate_(bytes_per_s), level_(burst_of(bytes_per_s)) {}
  static double burst_of(double bytes_per_s) { return std::max(bytes_per_s * BURST_S, BURST_MIN); }

  bool is_limited() const { return rate_ > 0; }
  // From now on, also for who waits.
  void set_rate(double bytes_per_s) { rate_ = bytes_per_s; }
  // How many of `wanted` bytes may go out now.
  uint64_t take(uint64_t wanted, double now_s) {
    if (!is_limited()) return wanted;
    const std::lock_guard<std::mutex> lock(mutex_);
    level_ = std::min(burst_of(rate_), level_ + (now_s - at_s_) * rate_);
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
  std::atomic<double> rate_;
  std::mutex mutex_;
  double level_;
  double at_s_ = 0;
};

// Somebody whose connections go out within one limit together.
struct Tenant {
  explicit Tenant(double bytes_per_s) : rate(bytes_per_s) {}
  TokenBucket rate;  // its own
  // What was answered here, all that was sent, and how long its connections have waited for what they may send.
  std::atomic<uint64_t> hits{0}, sent_bytes{0}, throttled_ns{0};
  std::atomic<uint64_t> handing_bytes{0};  // of memory, that answers of peers take for it

 private:
  friend class FairShare;
  double level_ = 0;     // of what all may send, what is its own
  double asked_s_ = -1;  // when it last wanted to send
  bool is_active_ = false;
};

// A token bucket of all: what comes in is divided evenly among the tenants that want to send, and what one of them leaves is
// for the others (max-min fairness), however many connections each has. A rate of 0 is no limit.
class FairShare {
 public:
  static constexpr double ACTIVE_S = 0.1;  // who has not asked for so long does not count
  static constexpr double STEP_S = 0.0005;
  static constexpr double SHARE_MIN = 1024;  // of bytes at once: a share that never is a byte is none
  static constexpr int PASSES = 4;  // what some have no room for is divided among the others, so often
  explicit FairShare(double bytes_per_s) : rate_(bytes_per_s), pool_(TokenBucket::burst_of(bytes_per_s)) {}

  bool is_limited() const { return rate_ > 0; }
  uint64_t take(const std::shared_ptr<Tenant>& who, uint64_t wanted, double now_s) {
    if (!is_limited()) return wanted;
    const std::lock_guard<std::mutex> lock(mutex_);
    who->asked_s_ = now_s;
    if (!who->is_active_) {
      who->is_active_ = true;
      active_.push_back(who);
    }
    divide(now_s);
    const auto granted = static_cast<uint64_t>(std::clamp(who->level_ + pool_, 0.0, static_cast<double>(wanted)));
    const double own = std::min(static_cast<double>(granted), std::max(who->level_, 0.0));
    who->level_ -= own;
    pool_ -= static_cast<double>(granted) - own;
    return granted;
  }
  // What was taken and not used.
  void give(const std::shared_ptr<Tenant>& who, uint64_t bytes) {
    if (!is_limited()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    who->level_ += static_cast<double>(bytes);
  }

 private:
  void divide(double now_s) {
    const double passed_s = now_s - at_s_;
    if (passed_s < STEP_S) return;
    at_s_ = now_s;
    for (size_t i = 0; i < active_.size();) {
      Tenant& tenant = *active_[i];
      if (now_s - tenant.asked_s_ <= ACTIVE_S) {
        ++i;
        continue;
      }
      pool_ += tenant.level_;
      tenant.level_ = 0;
      tenant.is_active_ = false;
      active_[i] = active_.back();
      active_.pop_back();
    }
    const double burst = TokenBucket::burst_of(rate_);
    const double most = std::max(burst / static_cast<double>(active_.size()), SHARE_MIN);
    double left = rate_ * std::min(passed_s, TokenBucket::BURST_S), held = 0;
    for (int pass = 0; pass < PASSES && left > 1; ++pass) {
      const auto open = std::count_if(active_.begin(), active_.end(), [&](const auto& one) { return one->level_ < most; });
      if (!open) break;
      const double each = left / static_cast<double>(open);
      for (const auto& tenant : active_) {
        const double part = std::clamp(most - tenant->level_, 0.0, each);
        tenant->level_ += part;
        left -= part;
      }
    }
    for (const auto& tenant : active_) held += tenant->level_;
    pool_ = std::min(pool_ + left, std::max(0.0, burst - held));
  }

  const double rate_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Tenant>> active_;
  double pool_;  // for whoever comes first
  double at_s_ = 0;
};

}  // namespace stoker
