#include "sha256.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace stoker {
namespace {

constexpr size_t BLOCK = 64;

alignas(16) constexpr uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t rotate(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

void compress_plain(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks; --blocks, data += BLOCK) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(data[4 * i] << 24 | data[4 * i + 1] << 16 | data[4 * i + 2] << 8 | data[4 * i + 3]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
      const uint32_t first = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + K[i] + w[i];
      const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
      const uint32_t second = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      std::memmove(v + 1, v, 7 * sizeof v[0]);
      v[4] += first;
      v[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1"))) void compress_of_processor(uint32_t* state, const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bULL, 0x0405060700010203ULL);
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  low = _mm_shuffle_epi32(low, 0xB1);
  high = _mm_shuffle_epi32(high, 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8);
  __m128i cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; blocks; --blocks, data += BLOCK) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
    for (int i = 0; i < 16; ++i) {
      const __m128i now = w[i % 4];
      __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(K + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      sum = _mm_shuffle_epi32(sum, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, sum);
      if (i >= 12) continue;
      const __m128i& last = w[(i + 3) % 4];
      __m128i next = _mm_sha256msg1_epu32(now, w[(i + 1) % 4]);
      next = _mm_add_epi32(next, _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
      w[i % 4] = _mm_sha256msg2_epu32(next, last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1B);
  high = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(low, high, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

using Compress = void (*)(uint32_t*, const uint8_t*, size_t);

Compress compress_of_here() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool is_known = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0;
  if (is_known && (b & bit_SHA) && __builtin_cpu_supports("sse4.1")) return compress_of_processor;
#endif
  return compress_plain;
}

const Compress compress = compress_of_here();

}  // namespace

void Sha256::take(const void* data, size_t size) {
  auto at = static_cast<const uint8_t*>(data);
  size_t filled = size_ % BLOCK;
  size_ += size;
  if (filled) {
    const size_t part = std::min(size, BLOCK - filled);
    std::memcpy(block_.data() + filled, at, part);
    at += part;
    size -= part;
    if (filled + part < BLOCK) return;
    compress(state_.data(), block_.data(), 1);
  }
  compress(state_.data(), at, size / BLOCK);
  at += size - size % BLOCK;
  if (size % BLOCK) std::memcpy(block_.data(), at, size % BLOCK);
}

Digest Sha256::finish() {
  const uint64_t bits = size_ * 8;
  size_t filled = size_ % BLOCK;
  block_[filled++] = 0x80;
  if (filled > BLOCK - 8) {
    std::fill(block_.begin() + static_cast<long>(filled), block_.end(), 0);
    compress(state_.data(), block_.data(), 1);
    filled = 0;
  }
  std::fill(block_.begin() + static_cast<long>(filled), block_.end(), 0);
  for (size_t i = 0; i < 8; ++i) block_[BLOCK - 1 - i] = static_cast<uint8_t>(bits >> (8 * i));
  compress(state_.data(), block_.data(), 1);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest sha256(std::string_view data) {
  Sha256 hash;
  hash.take(data);
  return hash.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
  std::array<uint8_t, BLOCK> inner{};
  if (key.size() > BLOCK) {
    const Digest short_key = sha256(key);
    std::copy(short_key.begin(), short_key.end(), inner.begin());
  } else {
    std::copy(key.begin(), key.end(), inner.begin());
  }
  std::array<uint8_t, BLOCK> outer = inner;
  for (uint8_t& byte : inner) byte ^= 0x36;
  for (uint8_t& byte : outer) byte ^= 0x5c;
  Sha256 hash;
  hash.take(inner.data(), inner.size());
  hash.take(data);
  const Digest first = hash.finish();
  Sha256 again;
  again.take(outer.data(), outer.size());
  again.take(first.data(), first.size());
  return again.finish();
}

}  // namespace stoker
