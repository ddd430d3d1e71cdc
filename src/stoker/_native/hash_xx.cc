#include "hash.h"

namespace stoker {
namespace {

constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9, P4 = 0x85EBCA77C2B2AE63,
                   P5 = 0x27D4EB2F165667C5;

uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

uint64_t round(uint64_t sum, uint64_t word) { return rotate(sum + word * P2, 31) * P1; }

uint64_t merge(uint64_t hash, uint64_t sum) { return (hash ^ round(0, sum)) * P1 + P4; }

// Of a machine with its lowest byte first, as all are for which this is built.
template <typename Word>
Word word_at(const char* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

}  // namespace

uint64_t xxhash64(std::string_view text) {
  const char* at = text.data();
  const char* const end = at + text.size();
  uint64_t hash = P5;
  if (text.size() >= 32) {
    uint64_t sums[4] = {P1 + P2, P2, 0, 0 - P1};
    for (; end - at >= 32; at += 32)
      for (int i = 0; i < 4; ++i) sums[i] = round(sums[i], word_at<uint64_t>(at + 8 * i));
    hash = rotate(sums[0], 1) + rotate(sums[1], 7) + rotate(sums[2], 12) + rotate(sums[3], 18);
    for (const uint64_t sum : sums) hash = merge(hash, sum);
  }
  hash += text.size();
  for (; end - at >= 8; at += 8) hash = rotate(hash ^ round(0, word_at<uint64_t>(at)), 27) * P1 + P4;
  for (; end - at >= 4; at += 4) hash = rotate(hash ^ (word_at<uint32_t>(at) * P1), 23) * P2 + P3;
  for (; at < end; ++at) hash = rotate(hash ^ (static_cast<uint8_t>(*at) * P5), 11) * P1;
  hash = (hash ^ (hash >> 33)) * P2;
  hash = (hash ^ (hash >> 29)) * P3;
  return hash ^ (hash >> 32);
}

}  // namespace stoker
