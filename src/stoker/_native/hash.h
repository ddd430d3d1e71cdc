// Keyed hash of names and checksum of records.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace stoker {

struct Hash128 {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const Hash128& other) const { return high == other.high && low == other.low; }
};

struct HashKey {
  uint64_t first = 0;
  uint64_t second = 0;
};

// SipHash-2-4 with 128 bits of output (Aumasson, Bernstein 2012). Its key is secret and each index has its own, so that
// nobody can choose two names that collide, and names need not be compared.
Hash128 siphash(const HashKey& key, std::string_view head, std::string_view tail);

// XXH64 (Collet), with the seed 0: public, and the same on all machines. Members of a fleet own names by it.
uint64_t xxhash64(std::string_view text);

// CRC-32C (Castagnoli), of the processor where it has one.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

}  // namespace stoker
