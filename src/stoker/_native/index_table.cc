// A shard: its table, and the blocks of large objects.
#include <algorithm>

#include "index.h"

namespace stoker {

uint32_t Index::Shard::find(const Hash128& id) const {
  if (table.empty()) return NONE;
  const size_t mask = table.size() - 1;
  for (size_t slot = id.low & mask;; slot = (slot + 1) & mask) {
    if (table[slot] == 0) return NONE;
    if (at(table[slot] - 1).id == id) return table[slot] - 1;
  }
}

void Index::Shard::grow(size_t size) {
  table = std::vector<uint32_t>(size);
  const size_t mask = size - 1;
  for (uint32_t number = 0; number < used; ++number) {  // in the order of memory, which is faster than that of the table
    if (!is_live(number)) continue;
    size_t slot = at(number).id.low & mask;
    while (table[slot]) slot = (slot + 1) & mask;
    table[slot] = number + 1;
  }
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
  spare.push_back(number);
  --count;
}

BucketFigures& Index::Shard::figures_of(uint16_t bucket) {
  if (figures.size() <= bucket) figures.resize(bucket + 1);
  return figures[bucket];
}

// -- blocks ------------------------------------------------------------------------------------------------------

// A large object that can have one block only keeps it in itself; others have a list.

uint32_t Index::Shard::blocks(const Object& object) const {
  if (!(object.flags & Object::LARGE)) return 0;
  return object.block_flags ? 1 : lists[object.offset].size;
}

std::optional<BlockAt> Index::Shard::block(Object& object, uint32_t block) const {
  if (block >= blocks(object)) return std::nullopt;
  if (object.block_flags) return BlockAt{object.crc, object.offset, object.block_flags};
  Block& found = lists[object.offset].blocks[block];
  if (!(found.flags & Block::HELD)) return std::nullopt;
  return BlockAt{found.crc, found.used_s, found.flags};
}

// Of an object that does not hold this one, and nothing that is packed.
void Index::Shard::put_block(Object& object, uint32_t block, const Block& value, uint64_t blocks_max) {
  const bool is_first = !(object.flags & Object::LARGE);
  object.flags = Object::LARGE;
  if (blocks_max == 1) {
    object.crc = value.crc;
    object.offset = value.used_s;
    object.block_flags = value.flags;
    return;
  }
  if (is_first) {
    if (spare_lists.empty()) {
      spare_lists.push_back(static_cast<uint32_t>(lists.size()));
      lists.emplace_back();
    }
    object.offset = spare_lists.back();
    spare_lists.pop_back();
  }
  BlockList& list = lists[object.offset];
  if (block >= list.size) {
    const uint64_t wanted = std::max<uint64_t>(block + 1, uint64_t{list.size} * 3 / 2);
    const auto size = static_cast<uint32_t>(std::min(wanted, blocks_max));
    std::unique_ptr<Block[]> larger(new Block[size]);
    std::copy(list.blocks.get(), list.blocks.get() + list.size, larger.get());
    list.blocks = std::move(larger);
    list.size = size;
  }
  list.blocks[block] = value;
  ++list.held;
}

// One that is held; whether it was the last.
bool Index::Shard::drop_block(Object& object, uint32_t block) {
  if (!object.block_flags) {
    BlockList& list = lists[object.offset];
    list.blocks[block] = Block{};
    if (--list.held) return false;
  }
  drop_blocks(object);
  return true;
}

void Index::Shard::drop_blocks(Object& object) {
  if (!object.block_flags) {
    lists[object.offset] = BlockList{};
    spare_lists.push_back(object.offset);
  }
  object.block_flags = 0;
  object.flags = 0;
}

}  // namespace stoker
