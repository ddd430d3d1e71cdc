// What one thread of the front counts of its answers. That thread writes, any other reads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace stoker {

class Tally {
 public:
  // The upper bounds, in seconds, of how soon a hit was answered; one more count is for all above.
  static constexpr std::array<double, 13> BOUNDS_S = {25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3,
                                                      5e-3,  10e-3, 25e-3,  100e-3, 1.0,    10.0};
  // The same of what other servers were asked for: as the back has them of what is not here (`LATENCY_BOUNDS_S`).
  static constexpr std::array<double, 14> BACK_BOUNDS_S = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                           0.1,    0.25,  0.5,    1.0,   2.5,  10.0,  60.0};
  static constexpr std::array<int, 5> REFUSALS = {400, 401, 408, 413, 431};

  struct Sums {
    uint64_t hits[2][2][2]{};  // by whether it was signed, was a HEAD, and told a part only
    std::array<uint64_t, REFUSALS.size()> refused{};
    std::array<uint64_t, BOUNDS_S.size() + 1> within{};
    double seconds = 0;
    std::array<uint64_t, BACK_BOUNDS_S.size() + 1> handed_on_within{};
    double handed_on_seconds = 0;
    uint64_t failed_handshakes = 0;
  };

  void hit(bool is_signed, bool is_head, bool is_part) { add(hits_[is_signed][is_head][is_part], 1); }

  void handed_on(bool is_signed, bool is_part, double seconds) {
    hit(is_signed, false, is_part);
    size_t i = 0;
    while (i < BACK_BOUNDS_S.size() && seconds > BACK_BOUNDS_S[i]) ++i;
    add(handed_on_within_[i], 1);
    if (seconds > 0) add(handed_on_nanoseconds_, static_cast<uint64_t>(seconds * 1e9));
  }

  void refused(int status) {
    for (size_t i = 0; i < REFUSALS.size(); ++i)
      if (REFUSALS[i] == status) add(refused_[i], 1);
  }

  void handshake_failed() { add(failed_handshakes_, 1); }

  void answered(uint64_t hits, double seconds) {
    size_t i = 0;
    while (i < BOUNDS_S.size() && seconds > BOUNDS_S[i]) ++i;
    add(within_[i], hits);
    if (seconds > 0) add(nanoseconds_, static_cast<uint64_t>(seconds * 1e9) * hits);
  }

  void add_to(Sums& sums) const {
    for (int i = 0; i < 8; ++i)
      sums.hits[i >> 2][i >> 1 & 1][i & 1] += hits_[i >> 2][i >> 1 & 1][i & 1].load(std::memory_order_relaxed);
    for (size_t i = 0; i < refused_.size(); ++i) sums.refused[i] += refused_[i].load(std::memory_order_relaxed);
    for (size_t i = 0; i < within_.size(); ++i) sums.within[i] += within_[i].load(std::memory_order_relaxed);
    sums.seconds += static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) / 1e9;
    for (size_t i = 0; i < handed_on_within_.size(); ++i)
      sums.handed_on_within[i] += handed_on_within_[i].load(std::memory_order_relaxed);
    sums.handed_on_seconds += static_cast<double>(handed_on_nanoseconds_.load(std::memory_order_relaxed)) / 1e9;
    sums.failed_handshakes += failed_handshakes_.load(std::memory_order_relaxed);
  }

 private:
  using Count = std::atomic<uint64_t>;
  // Cheaper than an atomic addition, as nobody else writes.
  static void add(Count& count, uint64_t more) {
    count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  Count hits_[2][2][2]{};
  std::array<Count, REFUSALS.size()> refused_{};
  std::array<Count, BOUNDS_S.size() + 1> within_{};
  Count nanoseconds_{0};
  std::array<Count, BACK_BOUNDS_S.size() + 1> handed_on_within_{};
  Count handed_on_nanoseconds_{0};
  Count failed_handshakes_{0};
};

}  // namespace stoker
