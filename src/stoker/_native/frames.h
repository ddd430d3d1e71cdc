// The frames of a batch, as `wire/cache_batch.py` has them.
#pragma once

#include <cstdint>
#include <string>

namespace stoker {

constexpr char FRAME_LAST = 1, FRAME_DESCRIPTORS = 5, FRAME_PLACE = 6;

// Files of larger objects are not handed out: they leave as a whole then, and who has one keeps all of its room.
constexpr uint64_t PLACE_OBJECT_BYTES_MAX = uint64_t{1} << 30;

inline void append_number(std::string& into, uint64_t number, int bytes) {
  for (int shift = (bytes - 1) * 8; shift >= 0; shift -= 8) into.push_back(static_cast<char>(number >> shift));
}

inline void append_frame(std::string& into, char kind, uint64_t size) {
  into.push_back(kind);
  append_number(into, size, 4);
}

}  // namespace stoker
