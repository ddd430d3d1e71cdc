#include "index.h"

#include <algorithm>
#include <cstring>

#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr char BEFORE_ATTRIBUTES = '\0';

}  // namespace

// -- the file ----------------------------------------------------------------------------------------------------

std::string Index::text(const Shard& shard, uint64_t at, size_t size) const {
  std::string found(size, '\0');
  const std::shared_lock lock(file_mutex_);
  files_[shard.file]->read(at + sizeof(ObjectRecord), found.data(), size);
  return found;
}

bool Index::has_version(const Shard& shard, const Object& object, std::string_view version,
                        std::string* attributes) const {
  if (object.version_size < version.size() || object.tag != tag_of(version, object.size_bytes)) return false;
  std::string found = text(shard, object.text_at + object.key_size, object.version_size);
  std::string said = cut_attributes(found);
  if (attributes) *attributes = std::move(said);
  return found == version;
}

Index::Places Index::append(Kind kind, std::string_view body) {
  const std::unique_lock lock(file_mutex_);
  Places places;
  Journal* other = files_[1 - current_].get();
  // Of two files that both count, the one that the next start reads comes last: what throws is in none that is read.
  if (switches_) places.in[1 - current_] = other->append(kind, body);
  places.in[current_] = files_[current_]->append(kind, body);
  if (!other || switches_ || next_failed_) return places;
  try {
    places.in[1 - current_] = other->append(kind, body);
  } catch (const FileProblem&) {
    next_failed_ = true;
  }
  return places;
}

// For what is no more, which a full disk cannot hold up. What was only refreshed or forgotten would be there again after a
// restart, until the file has been written anew.
void Index::append_gone(Kind kind, std::string_view body) noexcept {
  try {
    append(kind, body);
  } catch (const FileProblem&) {
    owes_ = true;
  }
}

void Index::place(Shard& shard, uint32_t number, Places places) {
  shard.at(number).text_at = places.in[shard.file];
  if (places.in[1 - shard.file] == 0) return;
  if (shard.moved.size() <= number) shard.moved.resize(number + CHUNK);
  shard.moved[number] = places.in[1 - shard.file];
}

std::string Index::cut_attributes(std::string& said) {
  const size_t end = said.find(BEFORE_ATTRIBUTES);
  if (end == std::string::npos) return {};
  std::string attributes = said.substr(end + 1);
  said.resize(end);
  return attributes;
}

// -- what others ask ---------------------------------------------------------------------------------------------

std::optional<Found> Index::find(uint16_t bucket, std::string_view key, bool with_blocks) const {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return std::nullopt;
  Object& object = shard.at(number);
  Found found{object, text(shard, object.text_at + object.key_size, object.version_size), {}, {}};
  found.attributes = cut_attributes(found.version);
  if (with_blocks && (object.flags & Object::LARGE)) {
    found.blocks.resize(shard.blocks(object));
    for (uint32_t block = 0; block < found.blocks.size(); ++block)
      if (const auto held = shard.block(object, block)) found.blocks[block] = {held->crc, held->used_s, held->flags};
  }
  return found;
}

bool Index::look_up(uint16_t bucket, std::string_view key, uint32_t now_s, Object& object) const {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return false;
  shard.at(number).used_s = now_s;
  object = shard.at(number);
  return true;
}

bool Index::covers(const Object& object, uint64_t start, uint64_t stop, uint32_t now_s) const {
  if (start >= stop || stop > object.size_bytes) return false;
  Shard& shard = shard_of(object.id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(object.id);
  if (number == NONE || shard.at(number).container != object.container) return false;
  const uint64_t last = (stop - 1) / block_size_bytes_;
  if (last >= WHOLE) return false;
  for (uint64_t block = start / block_size_bytes_; block <= last; ++block) {
    const auto held = shard.block(shard.at(number), static_cast<uint32_t>(block));
    if (!held || !(held->flags & Block::VERIFIED)) return false;
    held->used_s = now_s;
  }
  return true;
}

std::optional<Piece> Index::held(uint16_t bucket, std::string_view key, uint32_t tag, uint32_t block,
                                 uint32_t now_s) const {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return std::nullopt;
  Object& object = shard.at(number);
  if (object.container == 0 || object.tag != tag) return std::nullopt;
  if (!(object.flags & Object::LARGE)) {
    if (block != 0) return std::nullopt;
    object.used_s = now_s;
    return piece_of(shard, number, WHOLE);
  }
  const auto at = shard.block(object, block);
  if (!at) return std::nullopt;
  object.used_s = at->used_s = now_s;
  return piece_of(shard, number, block);
}

bool Index::learn(uint16_t bucket, std::string_view key, std::string_view version, uint64_t size_bytes, bool absent,
                  uint32_t now_s, std::string_view attributes, bool stays_true) {
  std::string said(version);
  if (!attributes.empty()) (said += BEFORE_ATTRIBUTES) += attributes;
  if (key.empty() || key.size() > UINT16_MAX) throw FileProblem("a name is too long, or empty", 0);
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  uint32_t number = shard.find(id);
  if (said.size() > UINT16_MAX || version.find(BEFORE_ATTRIBUTES) != std::string_view::npos) {
    if (number != NONE) {  // what it was is not true any more
      drop_object(shard, number);
      append_gone(Kind::gone, bytes_of(GoneRecord{id}));
    }
    throw FileProblem("a version is too long, or has a NUL", 0);
  }
  if (number != NONE) {
    Object& object = shard.at(number);
    const bool was_absent = object.flags & Object::ABSENT;
    std::string before;
    if (absent == was_absent && object.size_bytes == size_bytes && has_version(shard, object, version, &before)) {
      const bool is_told_anew = !attributes.empty() && attributes != before;
      if (is_told_anew && tell_anew(shard, number, key, said, now_s)) return false;
      object.checked_s = now_s;
      const CheckedRecord record{id, now_s, 0};
      append_gone(Kind::checked, bytes_of(record));
      return false;
    }
  }
  ObjectRecord record{};
  record.id = id;
  record.size_bytes = size_bytes;
  record.checked_s = now_s;
  record.tag = tag_of(version, size_bytes);
  record.bucket = bucket;
  record.key_size = static_cast<uint16_t>(key.size());
  record.version_size = static_cast<uint16_t>(said.size());
  record.flags = absent ? Object::ABSENT : 0;
  std::string body(bytes_of(record));
  body.append(key).append(said);
  Places places;
  try {
    places = append(Kind::object, body);
  } catch (const FileProblem&) {
    if (number != NONE && !stays_true) {
      drop_object(shard, number);
      owes_ = true;
    }
    throw;
  }
  if (number != NONE) {
    drop_pieces(shard, number);
    count_object(shard, shard.at(number), -1);
  } else {
    number = shard.add(id);
  }
  Object& object = shard.at(number);
  object.size_bytes = size_bytes;
  object.checked_s = now_s;
  object.used_s = now_s;
  object.tag = record.tag;
  object.bucket = bucket;
  object.key_size = record.key_size;
  object.version_size = record.version_size;
  object.flags = record.flags;
  place(shard, number, places);
  count_object(shard, object, 1);
  return true;
}

// Other attributes of the very version that is known. False, and all is as it was, where they cannot be written down.
bool Index::tell_anew(Shard& shard, uint32_t number, std::string_view key, std::string_view said, uint32_t now_s) {
  Object& object = shard.at(number);
  ObjectRecord record{};
  record.id = object.id;
  record.size_bytes = object.size_bytes;
  record.checked_s = now_s;
  record.used_s = object.used_s;
  record.tag = object.tag;
  record.bucket = object.bucket;
  record.key_size = object.key_size;
  record.version_size = static_cast<uint16_t>(said.size());
  record.flags = static_cast<uint8_t>((object.flags & Object::ABSENT) | ObjectRecord::SAME_VERSION);
  std::string body(bytes_of(record));
  body.append(key).append(said);
  Places places;
  try {
    places = append(Kind::object, body);
  } catch (const FileProblem&) {
    return false;
  }
  count_object(shard, object, -1);
  object.checked_s = now_s;
  object.version_size = record.version_size;
  place(shard, number, places);
  count_object(shard, object, 1);
  return true;
}

bool Index::forget(uint16_t bucket, std::string_view key) {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return false;
  drop_object(shard, number);
  append_gone(Kind::gone, bytes_of(GoneRecord{id}));
  return true;
}

bool Index::hold(uint16_t bucket, std::string_view key, std::string_view version, uint32_t block, uint32_t container,
                 uint32_t offset, uint32_t crc, uint32_t now_s) {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE || container == 0) return false;
  const Object& object = shard.at(number);
  const bool is_inside = block == WHOLE || uint64_t{block} * block_size_bytes_ < object.size_bytes;
  if ((object.flags & Object::ABSENT) || !is_inside || !has_version(shard, object, version)) return false;
  const HeldRecord record{id, object.tag, block, container, offset, crc, now_s};
  append(Kind::held, bytes_of(record));
  set_piece(shard, number, block, container, offset, crc, now_s, true);
  return true;
}

bool Index::verified(uint16_t bucket, std::string_view key, uint32_t block, uint32_t container) {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE || shard.at(number).container != container) return false;
  Object& object = shard.at(number);
  if (block == WHOLE) {
    if (object.flags & Object::LARGE) return false;
    object.flags |= Object::VERIFIED;
    return true;
  }
  const auto held = shard.block(object, block);
  if (held) held->flags |= Block::VERIFIED;
  return held.has_value();
}

bool Index::lose(const Piece& piece) {
  Shard& shard = shard_of(piece.id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(piece.id);
  if (number == NONE || shard.at(number).container != piece.container) return false;
  if (!drop_piece(shard, number, piece.block)) return false;
  append_gone(Kind::lost, bytes_of(LostRecord{piece.id, piece.block, piece.container}));
  return true;
}

bool Index::move(const Piece& piece, uint32_t container, uint32_t offset) {
  Shard& shard = shard_of(piece.id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(piece.id);
  if (number == NONE || container == 0) return false;
  const Object& object = shard.at(number);
  if ((object.flags & Object::LARGE) || object.container != piece.container || object.offset != piece.offset) return false;
  const uint32_t used_s = object.used_s;
  const HeldRecord record{piece.id, object.tag, WHOLE, container, offset, object.crc, used_s};
  append(Kind::held, bytes_of(record));
  set_piece(shard, number, WHOLE, container, offset, object.crc, used_s, object.flags & Object::VERIFIED);
  return true;
}

void Index::use(uint16_t bucket, std::string_view key, uint32_t block, uint32_t now_s) {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return;
  shard.at(number).used_s = now_s;
  if (block == WHOLE) return;
  if (const auto held = shard.block(shard.at(number), block)) held->used_s = now_s;
}

}  // namespace stoker
