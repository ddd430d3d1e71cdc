// What concerns many objects at once. No shard is locked for longer than a few hundred objects take.
#include <algorithm>

#include "index.h"
#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr uint32_t STEPS_MAX = 4096;

// xorshift64* (Vigna 2016): chance enough to draw a sample.
struct Chance {
  uint64_t state;
  uint64_t draw() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1D;
  }
};

}  // namespace

uint64_t Index::refresh(uint16_t bucket, std::string_view prefix) {
  uint64_t refreshed = 0;
  each(AT_ONCE, [&](Shard& shard, uint32_t number) {
    Object& object = shard.at(number);
    if (object.bucket != bucket || object.key_size < prefix.size()) return;
    if (!prefix.empty() && text(shard, object.text_at, prefix.size()) != prefix) return;
    object.checked_s = 0;
    append_gone(Kind::checked, bytes_of(CheckedRecord{object.id, 0, 0}));
    ++refreshed;
  });
  return refreshed;
}

void Index::clear(uint16_t bucket) {
  each(AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.at(number).bucket != bucket) return;
    const GoneRecord record{shard.at(number).id};
    drop_object(shard, number);
    append_gone(Kind::gone, bytes_of(record));
  });
}

void Index::lose_container(uint32_t container) {
  drop_containers({container});
  append_gone(Kind::container_gone, bytes_of(ContainerGoneRecord{container}));
}

void Index::drop_containers(const std::unordered_set<uint32_t>& gone) {
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    const uint32_t container = shard.at(number).container;
    if (container && gone.count(container)) drop_pieces(shard, number);
  });
}

void Index::drop_large() {
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.at(number).flags & Object::LARGE) drop_pieces(shard, number);
  });
}

std::map<uint32_t, Container> Index::containers() const {
  const Lock lock(counts_mutex_);
  return {containers_.begin(), containers_.end()};
}

std::map<uint16_t, BucketFigures> Index::figures() const {
  std::map<uint16_t, BucketFigures> sums;
  for (size_t i = 0; i < SHARDS; ++i) {
    const Shard& shard = shards_[i];
    const Lock lock(shard.mutex);
    for (size_t bucket = 0; bucket < shard.figures.size(); ++bucket) {
      const BucketFigures& figures = shard.figures[bucket];
      if (figures.objects == 0) continue;
      BucketFigures& sum = sums[static_cast<uint16_t>(bucket)];
      sum.objects += figures.objects;
      sum.pieces += figures.pieces;
      sum.size_bytes += figures.size_bytes;
    }
  }
  return sums;
}

std::vector<Piece> Index::sample(size_t count, int bucket, uint64_t seed) const {
  std::vector<Piece> drawn;
  Chance chance{seed | 1};
  for (int i = 0; i < 4; ++i) chance.draw();
  while (drawn.size() < count) {
    const size_t first = chance.draw() >> 58;
    size_t tried = 0;
    while (tried < SHARDS && !draw(shards_[(first + tried) % SHARDS], bucket, chance.draw(), drawn)) ++tried;
    if (tried == SHARDS) break;  // there is none
  }
  return drawn;
}

// A piece of this shard: the first from a place on that is drawn.
bool Index::draw(const Shard& shard, int bucket, uint64_t chance, std::vector<Piece>& drawn) const {
  const Lock lock(shard.mutex);
  if (shard.used == 0) return false;
  auto number = static_cast<uint32_t>((chance >> 32) * shard.used >> 32);
  for (uint32_t step = 0; step < std::min(shard.used, STEPS_MAX); ++step, number = (number + 1) % shard.used) {
    const Object& object = shard.at(number);
    if (object.container == 0 || (bucket >= 0 && object.bucket != bucket)) continue;
    Piece piece{object.bucket, object.id, WHOLE, object.container, object.used_s, object.size_bytes};
    if (object.flags & Object::LARGE) {
      const std::vector<Block>& blocks = shard.large.at(number);
      auto block = static_cast<uint32_t>((chance & UINT32_MAX) * blocks.size() >> 32);
      while (!(blocks[block].flags & Block::HELD)) block = static_cast<uint32_t>((block + 1) % blocks.size());
      piece.block = block;
      piece.used_s = blocks[block].used_s;
      piece.size_bytes = piece_bytes(object, block);
    }
    drawn.push_back(piece);
    return true;
  }
  return false;
}

std::vector<Name> Index::scan(uint16_t bucket, std::string_view prefix, uint64_t& cursor, size_t limit) const {
  std::vector<Name> names;
  size_t i = cursor >> 32;
  auto number = static_cast<uint32_t>(cursor);
  for (; i < SHARDS; ++i, number = 0) {
    const Shard& shard = shards_[i];
    while (true) {
      const Lock lock(shard.mutex);
      const uint32_t end = std::min(shard.used, number + AT_ONCE);
      if (number >= end) break;
      for (; number < end; ++number) {
        const Object& object = shard.at(number);
        if (!shard.is_live(number) || object.bucket != bucket || object.key_size < prefix.size()) continue;
        std::string key = text(shard, object.text_at, size_t{object.key_size} + object.version_size);
        if (std::string_view(key).substr(0, prefix.size()) != prefix) continue;
        std::string version = key.substr(object.key_size);
        key.resize(object.key_size);
        names.push_back({std::move(key), std::move(version), object});
        if (names.size() < limit) continue;
        cursor = (uint64_t{i} << 32) | (number + 1);
        return names;
      }
    }
  }
  cursor = 0;
  return names;
}

uint64_t Index::memory_bytes() const {
  uint64_t total = sizeof *this + SHARDS * sizeof(Shard);
  for (size_t i = 0; i < SHARDS; ++i) {
    const Shard& shard = shards_[i];
    const Lock lock(shard.mutex);
    total += shard.table.capacity() * 4 + shard.chunks.size() * CHUNK * sizeof(Object) + shard.spare.capacity() * 4;
    total += shard.moved.capacity() * 8;
    for (const auto& [_, blocks] : shard.large) total += 64 + blocks.capacity() * sizeof(Block);
  }
  const Lock lock(counts_mutex_);
  return total + containers_.size() * 64;
}

}  // namespace stoker
