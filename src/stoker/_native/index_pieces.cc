// What is kept of an object, and what that counts as.
#include <algorithm>

#include "index.h"
#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Hash128 Index::identity(uint16_t bucket, std::string_view key) const {
  const uint64_t number = bucket;
  return siphash(key_, bytes_of(number), key);
}

std::string Index::ids(uint16_t bucket, const std::vector<std::string>& keys) const {
  std::string ids;
  ids.reserve(8 * keys.size());
  for (const std::string& key : keys) {
    const uint64_t low = identity(bucket, key).low;
    ids.append(reinterpret_cast<const char*>(&low), sizeof low);
  }
  return ids;
}

std::vector<uint32_t> Index::lacking(uint16_t bucket, const std::vector<std::string>& keys,
                                     uint32_t checked_from_s) const {
  std::vector<uint32_t> lacking;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const Hash128 id = identity(bucket, keys[i]);
    Shard& shard = shard_of(id);
    const Lock lock(shard.mutex);
    const uint32_t number = shard.find(id);
    bool is_here = false;
    if (number != NONE && shard.at(number).checked_s >= checked_from_s) {
      Object& object = shard.at(number);
      is_here = (object.flags & Object::ABSENT) || object.size_bytes == 0 || object.container != 0;
      if (is_here && (object.flags & Object::LARGE))
        for (uint32_t block = 0; is_here && block < shard.blocks(object); ++block)
          is_here = shard.block(object, block).has_value();
    }
    if (!is_here) lacking.push_back(i);
  }
  return lacking;
}

uint32_t Index::tag_of(std::string_view version, uint64_t size_bytes) const {
  return static_cast<uint32_t>(siphash(key_, bytes_of(size_bytes), version).low);
}

uint64_t Index::piece_bytes(const Object& object, uint32_t block) const {
  if (block == WHOLE) return object.size_bytes;
  const uint64_t start = uint64_t{block} * block_size_bytes_;
  return std::min<uint64_t>(block_size_bytes_, object.size_bytes - start);
}

void Index::count(Shard& shard, const Object& object, int pieces, int64_t size_bytes, uint32_t used_s) {
  if (replays_) return;
  BucketFigures& figures = shard.figures_of(object.bucket);
  figures.pieces += static_cast<uint64_t>(int64_t{pieces});
  figures.size_bytes += static_cast<uint64_t>(size_bytes);
  if (object.flags & Object::LARGE) {
    live_bytes_ += static_cast<uint64_t>(int64_t{pieces}) * BLOCK_RECORD_BYTES;
    return;
  }
  const Lock lock(counts_mutex_);
  Container& container = segments_[object.container];
  container.bucket = object.bucket;
  container.pieces += static_cast<uint32_t>(pieces);
  container.size_bytes += static_cast<uint64_t>(size_bytes);
  container.used_s = std::max(container.used_s, used_s);
  container_max_ = std::max(container_max_, object.container);
  if (container.pieces == 0) segments_.erase(object.container);
}

void Index::own(const Shard& shard, uint32_t number, uint32_t used_s) {
  if (replays_) return;
  const Object& object = shard.at(number);
  const Lock lock(counts_mutex_);
  Owner& owner = owners_.put(object.container);
  owner.number = number;
  owner.shard = static_cast<uint8_t>(&shard - shards_.get());
  owner.bucket = object.bucket;
  owner.used_s = std::max(owner.used_s, used_s);
  container_max_ = std::max(container_max_, object.container);
}

void Index::disown(const Object& object) {
  if (replays_) return;
  const Lock lock(counts_mutex_);
  owners_.erase(object.container);
}

// Of an object's record in a journal.
uint64_t Index::record_bytes(const Object& object) {
  return sizeof(ObjectRecord) + 8 + object.key_size + object.version_size;
}

void Index::count_object(Shard& shard, const Object& object, int objects) {
  if (replays_) return;
  live_bytes_ += static_cast<uint64_t>(int64_t{objects}) * record_bytes(object);
  objects_ += static_cast<uint64_t>(int64_t{objects});
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
    const auto flags = static_cast<uint8_t>(Block::HELD | (is_verified ? Block::VERIFIED : 0));
    shard.put_block(object, block, Block{crc, now_s, flags}, blocks_max(object));
  }
  object.container = container;
  object.used_s = now_s;
  count(shard, object, 1, static_cast<int64_t>(piece_bytes(object, block)), now_s);
  if (block != WHOLE) own(shard, number, now_s);
  if (replays_) shard.met.container_max = std::max(shard.met.container_max, container);
}

Piece Index::piece_of(const Shard& shard, uint32_t number, uint32_t block) const {
  Object& object = shard.at(number);
  Piece piece{object.bucket, object.id, block, object.container, object.used_s, piece_bytes(object, block),
              object.offset, object.crc, (object.flags & Object::VERIFIED) != 0};
  if (block == WHOLE) return piece;
  const BlockAt held = *shard.block(object, block);
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
  if (!shard.block(object, block)) return false;
  count(shard, object, -1, -static_cast<int64_t>(piece_bytes(object, block)), 0);
  if (shard.drop_block(object, block)) {
    disown(object);
    object.container = 0;
  }
  return true;
}

bool Index::drop_pieces(Shard& shard, uint32_t number) {
  Object& object = shard.at(number);
  if (object.container == 0) return false;
  int pieces = 1;
  auto size_bytes = static_cast<int64_t>(object.size_bytes);
  if (object.flags & Object::LARGE) {
    const Container held = held_of(shard, object);
    pieces = static_cast<int>(held.pieces);
    size_bytes = static_cast<int64_t>(held.size_bytes);
  }
  count(shard, object, -pieces, -size_bytes, 0);
  if (object.flags & Object::LARGE) {
    shard.drop_blocks(object);
    disown(object);
  }
  object.container = 0;
  object.flags = 0;
  return true;
}

void Index::drop_object(Shard& shard, uint32_t number) {
  drop_pieces(shard, number);
  count_object(shard, shard.at(number), -1);
  shard.remove(number);
}

}  // namespace stoker
