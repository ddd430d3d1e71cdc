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

uint64_t Index::forget_absent(uint32_t before_s) {
  uint64_t forgotten = 0;
  each(AT_ONCE, [&](Shard& shard, uint32_t number) {
    const Object& object = shard.at(number);
    if (!(object.flags & Object::ABSENT) || object.checked_s >= before_s) return;
    const GoneRecord record{object.id};
    drop_object(shard, number);
    append_gone(Kind::gone, bytes_of(record));
    ++forgotten;
  });
  return forgotten;
}

void Index::clear(uint16_t bucket) {
  each(AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.at(number).bucket != bucket) return;
    const GoneRecord record{shard.at(number).id};
    drop_object(shard, number);
    append_gone(Kind::gone, bytes_of(record));
  });
}

void Index::lose_container(uint32_t container) { lose_containers({container}); }

void Index::lose_containers(const std::unordered_set<uint32_t>& containers) {
  drop_containers(containers);
  for (const uint32_t container : containers) append_gone(Kind::container_gone, bytes_of(ContainerGoneRecord{container}));
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

std::map<uint32_t, Container> Index::segments() const {
  const Lock lock(counts_mutex_);
  return {segments_.begin(), segments_.end()};
}

std::map<uint32_t, Container> Index::containers() const {
  std::map<uint32_t, Container> found = segments();
  std::vector<uint32_t> large;
  {
    const Lock lock(counts_mutex_);
    for (const Owner& owner : owners_.slots())
      if (owner.container) large.push_back(owner.container);
  }
  for (const uint32_t number : large)
    if (const auto one = container(number)) found[number] = *one;  // with what is in a segment of that number
  return found;
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

// Nothing where small objects are packed in it.
std::optional<Owner> Index::owner(uint32_t container) const {
  const Lock lock(counts_mutex_);
  const Owner* found = container ? owners_.find(container) : nullptr;
  return found && segments_.count(container) == 0 ? std::optional(*found) : std::nullopt;
}

std::optional<Container> Index::container(uint32_t number) const {
  Container found;
  std::optional<Owner> large;
  {
    const Lock lock(counts_mutex_);
    if (const auto segment = segments_.find(number); segment != segments_.end()) found = segment->second;
    if (const Owner* owner = number ? owners_.find(number) : nullptr) large = *owner;
  }
  if (large)
    at_owner(*large, [&](Shard& shard, uint32_t object) {
      Container blocks = held_of(shard, shard.at(object));
      blocks.used_s = large->used_s;
      found.add(blocks);
    });
  return found.pieces ? std::optional(found) : std::nullopt;
}

// The blocks of a large object; `used_s` is then when one of them was used last.
Container Index::held_of(const Shard& shard, Object& object) const {
  Container found{object.bucket, true, 0, 0, 0};
  for (uint32_t block = 0; block < shard.blocks(object); ++block)
    if (const auto held = shard.block(object, block))
      found.add({object.bucket, true, 1, piece_bytes(object, block), held->used_s});
  return found;
}

void Index::doubt(uint32_t container) {
  if (container == 0) return;
  const auto distrust = [&](Shard& shard, uint32_t number) {
    Object& object = shard.at(number);
    object.flags &= static_cast<uint8_t>(~Object::VERIFIED);
    for (uint32_t block = 0; block < shard.blocks(object); ++block)
      if (const auto held = shard.block(object, block)) held->flags &= static_cast<uint8_t>(~Block::VERIFIED);
  };
  if (const auto large = owner(container)) {
    at_owner(*large, distrust);
    return;
  }
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.at(number).container == container) distrust(shard, number);
  });
}

std::string Index::key_of(const Piece& piece) const {
  const Shard& shard = shard_of(piece.id);
  const Lock lock(shard.mutex);
  const uint32_t number = shard.find(piece.id);
  if (number == NONE) return {};
  return text(shard, shard.at(number).text_at, shard.at(number).key_size);
}

uint32_t Index::container_max() const {
  const Lock lock(counts_mutex_);
  return container_max_;
}

std::vector<NamedPiece> Index::pieces(uint32_t container, bool with_keys) const {
  std::vector<NamedPiece> found;
  if (container == 0) return found;
  const auto take = [&](const Shard& shard, uint32_t number) {
    Object& object = shard.at(number);
    const std::string key = with_keys ? text(shard, object.text_at, object.key_size) : std::string();
    if (!(object.flags & Object::LARGE)) found.push_back({piece_of(shard, number, WHOLE), key});
    for (uint32_t block = 0; block < shard.blocks(object); ++block)
      if (shard.block(object, block)) found.push_back({piece_of(shard, number, block), key});
  };
  if (const auto large = owner(container)) {
    at_owner(*large, take);
    return found;
  }
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.at(number).container == container) take(shard, number);
  });
  return found;
}

std::map<uint32_t, std::string> Index::container_keys() const {
  std::map<uint32_t, std::string> keys;
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    const Object& object = shard.at(number);
    if (object.container == 0) return;
    std::string& key = keys[object.container];
    if (key.empty()) key = text(shard, object.text_at, object.key_size);
  });
  return keys;
}

std::vector<Piece> Index::sample(size_t count, const std::unordered_set<uint16_t>& buckets, Packing packing,
                                 uint64_t seed) const {
  std::vector<Piece> drawn;
  Chance chance{seed | 1};
  for (int i = 0; i < 4; ++i) chance.draw();
  if (packing == Packing::large) {
    while (drawn.size() < count && draw_large(buckets, chance.draw(), drawn)) {
    }
    return drawn;
  }
  while (drawn.size() < count) {
    const size_t first = chance.draw() >> 58;
    size_t tried = 0;
    while (tried < SHARDS && !draw(shards_[(first + tried) % SHARDS], buckets, packing, chance.draw(), drawn)) ++tried;
    if (tried == SHARDS) break;  // there is none
  }
  return drawn;
}

std::unordered_map<uint32_t, std::vector<Hash128>> Index::sample_ids(const std::vector<uint32_t>& segments,
                                                                     size_t count, uint64_t seed) const {
  struct Drawn {
    std::vector<Hash128> ids;
    uint64_t met = 0;
  };
  std::unordered_map<uint32_t, Drawn> drawn;
  for (const uint32_t segment : segments) drawn[segment];
  Chance chance{seed | 1};
  for (int i = 0; i < 4; ++i) chance.draw();
  each(16 * AT_ONCE, [&](Shard& shard, uint32_t number) {
    const Object& object = shard.at(number);
    if (object.container == 0 || (object.flags & Object::LARGE)) return;
    const auto found = drawn.find(object.container);
    if (found == drawn.end()) return;
    Drawn& of = found->second;
    ++of.met;
    if (of.ids.size() < count) {
      of.ids.push_back(object.id);
      return;
    }
    // Vitter's reservoir (1985): each that was met is in it with the same chance.
    const uint64_t place = chance.draw() % of.met;
    if (place < of.ids.size()) of.ids[place] = object.id;
  });
  std::unordered_map<uint32_t, std::vector<Hash128>> ids;
  for (auto& [segment, of] : drawn)
    if (!of.ids.empty()) ids[segment] = std::move(of.ids);
  return ids;
}

// A piece of this shard: the first from a place on that is drawn.
bool Index::draw(const Shard& shard, const std::unordered_set<uint16_t>& buckets, Packing packing, uint64_t chance,
                 std::vector<Piece>& drawn) const {
  const Lock lock(shard.mutex);
  if (shard.used == 0) return false;
  auto number = static_cast<uint32_t>((chance >> 32) * shard.used >> 32);
  for (uint32_t step = 0; step < std::min(shard.used, STEPS_MAX); ++step, number = (number + 1) % shard.used) {
    const Object& object = shard.at(number);
    if (object.container == 0 || (!buckets.empty() && buckets.count(object.bucket) == 0)) continue;
    if ((object.flags & Object::LARGE) && packing == Packing::packed) continue;
    drawn.push_back(piece_of(shard, number, object.flags & Object::LARGE ? block_from(shard, number, chance) : WHOLE));
    return true;
  }
  return false;
}

// A block of some large object: of the first from a place on, in the order of their files' numbers' hashes.
bool Index::draw_large(const std::unordered_set<uint16_t>& buckets, uint64_t chance, std::vector<Piece>& drawn) const {
  size_t step = 0;
  while (true) {
    Owner owner;
    {
      const Lock lock(counts_mutex_);
      const std::vector<Owner>& slots = owners_.slots();
      for (const size_t first = (chance >> 32) * slots.size() >> 32; step < slots.size() && !owner.container; ++step) {
        const Owner& slot = slots[(first + step) % slots.size()];
        if (slot.container && (buckets.empty() || buckets.count(slot.bucket))) owner = slot;
      }
    }
    if (!owner.container) return false;
    if (at_owner(owner, [&](Shard& shard, uint32_t number) {
          drawn.push_back(piece_of(shard, number, block_from(shard, number, chance)));
        }))
      return true;
  }
}

// A held block of a large object, by chance.
uint32_t Index::block_from(const Shard& shard, uint32_t number, uint64_t chance) const {
  Object& object = shard.at(number);
  const uint32_t blocks = shard.blocks(object);
  auto block = static_cast<uint32_t>((chance & UINT32_MAX) * blocks >> 32);
  while (!shard.block(object, block)) block = (block + 1) % blocks;
  return block;
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
        cut_attributes(version);
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
    total += shard.lists.capacity() * sizeof(BlockList) + shard.spare_lists.capacity() * 4;
    for (const BlockList& list : shard.lists) total += list.size ? 16 + list.size * sizeof(Block) : 0;
  }
  const Lock lock(counts_mutex_);
  return total + segments_.size() * 64 + owners_.slots().size() * sizeof(Owner);
}

}  // namespace stoker
