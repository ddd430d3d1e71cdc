#include "hash.h"

namespace stoker {
namespace {

inline uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

struct Sip {
  uint64_t v0, v1, v2, v3;
  void round() {
    v0 += v1; v1 = rotate(v1, 13); v1 ^= v0; v0 = rotate(v0, 32);
    v2 += v3; v3 = rotate(v3, 16); v3 ^= v2;
    v0 += v3; v3 = rotate(v3, 21); v3 ^= v0;
    v2 += v1; v1 = rotate(v1, 17); v1 ^= v2; v2 = rotate(v2, 32);
  }
  void take(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
  void finish() {
    for (int i = 0; i < 4; ++i) round();
  }
  uint64_t sum() const { return v0 ^ v1 ^ v2 ^ v3; }
};

constexpr uint32_t POLYNOMIAL = 0x82F63B78;

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? POLYNOMIAL : 0);
    tables[0][i] = crc;
  }
  for (size_t table = 1; table < 8; ++table)
    for (size_t i = 0; i < 256; ++i)
      tables[table][i] = (tables[table - 1][i] >> 8) ^ tables[0][tables[table - 1][i] & 0xFF];
  return tables;
}

constexpr auto TABLES = make_tables();

uint32_t crc_of_tables(const uint8_t* at, size_t size, uint32_t crc) {
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= TABLES[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; size; ++at, --size) crc = (crc >> 8) ^ TABLES[0][(crc ^ *at) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc_of_processor(const uint8_t* at, size_t size, uint32_t crc) {
  uint64_t wide = crc;
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; size; ++at, --size) crc = __builtin_ia32_crc32qi(crc, *at);
  return crc;
}
#endif

}  // namespace

Hash128 siphash(const HashKey& key, std::string_view head, std::string_view tail) {
  Sip sip{0x736f6d6570736575 ^ key.first, 0x646f72616e646f6d ^ key.second ^ 0xee,
          0x6c7967656e657261 ^ key.first, 0x7465646279746573 ^ key.second};
  uint64_t word = 0;
  int held = 0;
  auto take = [&](std::string_view text) {
    const char* at = text.data();
    size_t left = text.size();
    while (held == 0 && left >= 8) {
      uint64_t whole;
      std::memcpy(&whole, at, 8);
      sip.take(whole);
      at += 8;
      left -= 8;
    }
    for (; left; ++at, --left) {
      word |= static_cast<uint64_t>(static_cast<uint8_t>(*at)) << (8 * held);
      if (++held == 8) {
        sip.take(word);
        word = 0;
        held = 0;
      }
    }
  };
  take(head);
  take(tail);
  sip.take(word | (static_cast<uint64_t>((head.size() + tail.size()) & 0xFF) << 56));
  sip.v2 ^= 0xee;
  sip.finish();
  Hash128 out;
  out.high = sip.sum();
  sip.v1 ^= 0xdd;
  sip.finish();
  out.low = sip.sum();
  return out;
}

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
  const auto* at = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~crc_of_processor(at, size, ~crc);
#endif
  return ~crc_of_tables(at, size, ~crc);
}

}  // namespace stoker
