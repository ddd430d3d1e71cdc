#include "index.h"

#include <algorithm>
#include <cstring>

#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

// -- a shard's table ---------------------------------------------------------------------------------------------

uint32_t Index::Shard::find(const Hash128& id) const {
  if (table.empty()) return NONE;
  const size_t mask = table.size() - 1;
  for (size_t slot = id.low & mask;; slot = (slot + 1) & mask) {
    if (table[slot] == 0) return NONE;
    if (at(table[slot] - 1).id == id) return table[slot] - 1;
  }
}

void Index::Shard::grow(size_t size) {
  std::vector<uint32_t> larger(size);
  const size_t mask = size - 1;
  for (const uint32_t entry : table) {
    if (entry == 0) continue;
    size_t slot = at(entry - 1).id.low & mask;
    while (larger[slot]) slot = (slot + 1) & mask;
    larger[slot] = entry;
  }
  table.swap(larger);
}

uint32_t Index::Shard::add(const Hash128& id) {
  if (size_t{count} * 4 >= table.size() * 3) grow(std::max<size_t>(64, table.size() * 2));
  uint32_t number;
  if (spare.empty()) {
    number = used;
    if (number % CHUNK == 0) chunks.emplace_back(new Object[CHUNK]);
    ++used;
  } else {
    number = spare.back();
    spare.pop_back();
  }
  Object& object = at(number);
  object = Object{};
  object.id = id;
  const size_t mask = table.size() - 1;
  size_t slot = id.low & mask;
  while (table[slot]) slot = (slot + 1) & mask;
  table[slot] = number + 1;
  ++count;
  return number;
}

void Index::Shard::remove(uint32_t number) {
  const size_t mask = table.size() - 1;
  size_t hole = at(number).id.low & mask;
  while (table[hole] != number + 1) hole = (hole + 1) & mask;
  // What follows moves up, so that no search ends before it finds what it looks for (Knuth, 6.4, algorithm R).
  for (size_t slot = (hole + 1) & mask; table[slot]; slot = (slot + 1) & mask) {
    const size_t home = at(table[slot] - 1).id.low & mask;
    if (((slot - home) & mask) >= ((slot - hole) & mask)) {
      table[hole] = table[slot];
      hole = slot;
    }
  }
  table[hole] = 0;
  at(number) = Object{};
  large.erase(number);
  spare.push_back(number);
  --count;
}

// -- what is kept of an object -----------------------------------------------------------------------------------

Hash128 Index::identity(uint16_t bucket, std::string_view key) const {
  const uint64_t number = bucket;
  return siphash(key_, bytes_of(number), key);
}

uint32_t Index::tag_of(std::string_view version, uint64_t size_bytes) const {
  return static_cast<uint32_t>(siphash(key_, bytes_of(size_bytes), version).low);
}

uint64_t Index::piece_bytes(const Object& object, uint32_t block) const {
  if (block == WHOLE) return object.size_bytes;
  const uint64_t start = uint64_t{block} * block_size_bytes_;
  return std::min<uint64_t>(block_size_bytes_, object.size_bytes - start);
}

BucketFigures& Index::Shard::figures_of(uint16_t bucket) {
  if (figures.size() <= bucket) figures.resize(bucket + 1);
  return figures[bucket];
}

void Index::count(Shard& shard, const Object& object, int pieces, int64_t size_bytes, uint32_t used_s) {
  BucketFigures& figures = shard.figures_of(object.bucket);
  figures.pieces += static_cast<uint64_t>(int64_t{pieces});
  figures.size_bytes += static_cast<uint64_t>(size_bytes);
  const Lock lock(counts_mutex_);
  Container& container = containers_[object.container];
  container.bucket = object.bucket;
  container.is_large = object.flags & Object::LARGE;
  container.pieces += static_cast<uint32_t>(pieces);
  container.size_bytes += static_cast<uint64_t>(size_bytes);
  container.used_s = std::max(container.used_s, used_s);
  container_max_ = std::max(container_max_, object.container);
  if (container.pieces == 0) containers_.erase(object.container);
}

void Index::count_object(Shard& shard, const Object& object, int objects) {
  const auto record = static_cast<int64_t>(sizeof(ObjectRecord) + 8 + object.key_size + object.version_size);
  live_bytes_.fetch_add(static_cast<uint64_t>(objects * record), std::memory_order_relaxed);
  objects_.fetch_add(static_cast<uint64_t>(int64_t{objects}), std::memory_order_relaxed);
  shard.figures_of(object.bucket).objects += static_cast<uint64_t>(int64_t{objects});
}

void Index::set_piece(Shard& shard, uint32_t number, uint32_t block, uint32_t container, uint32_t offset, uint32_t crc,
                      uint32_t now_s, bool is_verified) {
  Object& object = shard.at(number);
  if (block == WHOLE) {
    drop_pieces(shard, number);
    object.offset = offset;
    object.crc = crc;
    object.flags = is_verified ? Object::VERIFIED : 0;
  } else {
    if (!(object.flags & Object::LARGE) || object.container != container) drop_pieces(shard, number);
    drop_piece(shard, number, block);
    object.flags = Object::LARGE;
    std::vector<Block>& blocks = shard.large[number];
    if (blocks.size() <= block) blocks.resize(block + 1);
    blocks[block] = Block{crc, now_s, static_cast<uint8_t>(Block::HELD | (is_verified ? Block::VERIFIED : 0))};
    live_bytes_ += sizeof(HeldRecord) + 8;
  }
  object.container = container;
  object.used_s = now_s;
  count(shard, object, 1, static_cast<int64_t>(piece_bytes(object, block)), now_s);
}

Piece Index::piece_of(const Shard& shard, uint32_t number, uint32_t block) const {
  const Object& object = shard.at(number);
  Piece piece{object.bucket, object.id, block, object.container, object.used_s, piece_bytes(object, block),
              object.offset, object.crc, (object.flags & Object::VERIFIED) != 0};
  if (block == WHOLE) return piece;
  const Block& held = shard.large.at(number)[block];
  piece.used_s = held.used_s;
  piece.offset = uint64_t{block} * block_size_bytes_;
  piece.crc = held.crc;
  piece.is_verified = (held.flags & Block::VERIFIED) != 0;
  return piece;
}

bool Index::drop_piece(Shard& shard, uint32_t number, uint32_t block) {
  Object& object = shard.at(number);
  if (object.container == 0 || (block == WHOLE) == ((object.flags & Object::LARGE) != 0)) return false;
  if (block == WHOLE) return drop_pieces(shard, number);
  const auto found = shard.large.find(number);
  if (found == shard.large.end() || block >= found->second.size()) return false;
  std::vector<Block>& blocks = found->second;
  if (!(blocks[block].flags & Block::HELD)) return false;
  blocks[block] = Block{};
  live_bytes_ -= sizeof(HeldRecord) + 8;
  count(shard, object, -1, -static_cast<int64_t>(piece_bytes(object, block)), 0);
  if (std::none_of(blocks.begin(), blocks.end(), [](const Block& b) { return b.flags & Block::HELD; })) {
    shard.large.erase(found);
    object.container = 0;
    object.flags = 0;
  }
  return true;
}

bool Index::drop_pieces(Shard& shard, uint32_t number) {
  Object& object = shard.at(number);
  if (object.container == 0) return false;
  int pieces = 1;
  auto size_bytes = static_cast<int64_t>(object.size_bytes);
  if (object.flags & Object::LARGE) {
    pieces = 0;
    size_bytes = 0;
    const std::vector<Block>& blocks = shard.large.at(number);
    for (uint32_t block = 0; block < blocks.size(); ++block) {
      if (!(blocks[block].flags & Block::HELD)) continue;
      ++pieces;
      size_bytes += static_cast<int64_t>(piece_bytes(object, block));
    }
    live_bytes_ -= static_cast<uint64_t>(pieces) * (sizeof(HeldRecord) + 8);
    shard.large.erase(number);
  }
  count(shard, object, -pieces, -size_bytes, 0);
  object.container = 0;
  object.flags = 0;
  return true;
}

void Index::drop_object(Shard& shard, uint32_t number) {
  drop_pieces(shard, number);
  count_object(shard, shard.at(number), -1);
  shard.remove(number);
}

// -- the file ----------------------------------------------------------------------------------------------------

std::string Index::text(const Shard& shard, uint64_t at, size_t size) const {
  std::string found(size, '\0');
  const std::shared_lock lock(file_mutex_);
  files_[shard.file]->read(at + sizeof(ObjectRecord), found.data(), size);
  return found;
}

bool Index::has_version(const Shard& shard, const Object& object, std::string_view version) const {
  return object.version_size == version.size() && object.tag == tag_of(version, object.size_bytes) &&
         text(shard, object.text_at + object.key_size, object.version_size) == version;
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

// -- what others ask ---------------------------------------------------------------------------------------------

std::optional<Found> Index::find(uint16_t bucket, std::string_view key, bool with_blocks) const {
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(id);
  if (number == NONE) return std::nullopt;
  const Object& object = shard.at(number);
  Found found{object, text(shard, object.text_at + object.key_size, object.version_size), {}};
  if (with_blocks && (object.flags & Object::LARGE)) found.blocks = shard.large.at(number);
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
  const auto found = shard.large.find(number);
  if (found == shard.large.end()) return false;
  std::vector<Block>& blocks = found->second;
  const uint64_t last = (stop - 1) / block_size_bytes_;
  for (uint64_t block = start / block_size_bytes_; block <= last; ++block) {
    if (block >= blocks.size() || !(blocks[block].flags & Block::VERIFIED)) return false;
    blocks[block].used_s = now_s;
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
  std::vector<Block>& blocks = shard.large.at(number);
  if (block >= blocks.size() || !(blocks[block].flags & Block::HELD)) return std::nullopt;
  object.used_s = blocks[block].used_s = now_s;
  return piece_of(shard, number, block);
}

bool Index::learn(uint16_t bucket, std::string_view key, std::string_view version, uint64_t size_bytes, bool absent,
                  uint32_t now_s) {
  if (key.empty() || key.size() > UINT16_MAX || version.size() > UINT16_MAX)
    throw FileProblem("a name is too long, or empty", 0);
  const Hash128 id = identity(bucket, key);
  Shard& shard = shard_of(id);
  const Lock lock(shard.mutex);
  uint32_t number = shard.find(id);
  if (number != NONE) {
    Object& object = shard.at(number);
    const bool was_absent = object.flags & Object::ABSENT;
    if (absent == was_absent && object.size_bytes == size_bytes && has_version(shard, object, version)) {
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
  record.version_size = static_cast<uint16_t>(version.size());
  record.flags = absent ? Object::ABSENT : 0;
  std::string body(bytes_of(record));
  body.append(key).append(version);
  Places places;
  try {
    places = append(Kind::object, body);
  } catch (const FileProblem&) {
    if (number != NONE) {  // what it was is not true any more
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
  const auto found = shard.large.find(number);
  if (found == shard.large.end() || block >= found->second.size()) return false;
  if (!(found->second[block].flags & Block::HELD)) return false;
  found->second[block].flags |= Block::VERIFIED;
  return true;
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
  const auto found = shard.large.find(number);
  if (found != shard.large.end() && block < found->second.size()) found->second[block].used_s = now_s;
}

}  // namespace stoker
