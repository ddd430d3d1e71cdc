// Bodies of the journal's records. Integers are little-endian, as on every processor that Stoker runs on.
#pragma once

#include <cstdint>
#include <string_view>

#include "hash.h"

namespace stoker {

struct LayoutRecord {
  uint32_t block_size_bytes;
};

struct BucketRecord {  // its name and its note follow
  uint16_t number;
  uint16_t name_size;
  uint32_t note_size;
};

struct ObjectRecord {  // its key and its version follow
  static constexpr uint8_t SAME_VERSION = 128;  // a flag: only what is told besides is new, and pieces stay
  Hash128 id;
  uint64_t size_bytes;
  uint32_t checked_s;
  uint32_t tag;
  uint16_t bucket;
  uint16_t key_size;
  uint16_t version_size;
  uint8_t flags;
  uint8_t has_piece;
  uint32_t container;
  uint32_t offset;
  uint32_t crc;
  uint32_t used_s;
};
static_assert(sizeof(ObjectRecord) == 56);

struct HeldRecord {
  Hash128 id;
  uint32_t tag;
  uint32_t block;
  uint32_t container;
  uint32_t offset;
  uint32_t crc;
  uint32_t used_s;
};
static_assert(sizeof(HeldRecord) == 40);
constexpr uint64_t BLOCK_RECORD_BYTES = sizeof(HeldRecord) + 8;

struct CheckedRecord {
  Hash128 id;
  uint32_t checked_s;
  uint32_t reserved;
};

struct GoneRecord {
  Hash128 id;
};

struct LostRecord {
  Hash128 id;
  uint32_t block;
  uint32_t container;
};

struct ContainerGoneRecord {
  uint32_t container;
};

template <typename Record>
std::string_view bytes_of(const Record& record) {
  return {reinterpret_cast<const char*>(&record), sizeof record};
}

}  // namespace stoker
