// A file that is long enough for threads to replay it, and the table of large files beside a naive twin.
//
//   index_replay_test FOLDER SEED
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "../../src/stoker/_native/index.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr uint32_t BLOCK = 100;

// So many records that shards are replayed beside each other: what is of one key stays in its order.
void a_long_file(const std::string& folder) {
  constexpr uint32_t COUNT = 90'000;
  const std::string path = folder + "/long";
  ::unlink(path.c_str());
  const std::string version(60, 'v');
  const auto key_at = [](uint32_t i) { return "key-" + std::to_string(i); };
  {
    Index index(path, BLOCK);
    CHECK(index.bucket("one", "") == 1);
    for (uint32_t i = 0; i < COUNT; ++i) {
      index.learn(1, key_at(i), "before", 50, false, 1);
      index.learn(1, key_at(i), version, i % 3 == 0 ? 250 : 50, false, 2);
      if (i % 3 == 0) {
        for (uint32_t block = 0; block < 3; ++block)
          index.hold(1, key_at(i), version, block, 1000 + i, 0, i + block, 3);
      } else {
        index.hold(1, key_at(i), version, i % 3 == 1 ? 0 : WHOLE, i % 3 == 1 ? 1000 + i : 1 + i / 1000, 5, i, 3);
      }
      if (i % 9 == 0) CHECK(index.lose({1, index.find(1, key_at(i), false)->object.id, 1, 1000 + i}));
      if (i % 10 == 0) index.forget(1, key_at(i));
    }
    index.lose_container(7);
    index.sync();
    CHECK(index.file_bytes() > 20 * 1024 * 1024);
  }
  Index index(path, BLOCK, 2);  // a clock that was set back
  CHECK(index.is_of_later() && index.replay().damaged_bytes == 0);
  CHECK(index.objects() == COUNT - COUNT / 10 && index.container_max() == 1000 + COUNT - 2);
  BucketFigures held;
  size_t files = 0;
  for (uint32_t i = 0; i < COUNT; ++i) {
    const auto found = index.find(1, key_at(i), true);
    CHECK(found.has_value() == (i % 10 != 0));
    if (!found) continue;
    const bool is_gone = i % 3 == 2 && 1 + i / 1000 == 7;
    CHECK(found->version == version && found->object.checked_s == 1 && found->object.used_s == 2);
    CHECK((found->object.container != 0) == !is_gone);
    CHECK(found->blocks.size() == (i % 3 == 0 ? 3 : i % 3 == 1 ? 1 : 0));
    for (uint32_t block = 0; block < found->blocks.size(); ++block) {
      if (i % 9 == 0 && block == 1) CHECK(found->blocks[block].flags == 0);
      else CHECK(found->blocks[block].flags == Block::HELD && found->blocks[block].crc == i + block);
    }
    const uint32_t pieces = is_gone ? 0 : i % 3 ? 1 : i % 9 ? 3 : 2;
    held.pieces += pieces;
    held.size_bytes += i % 3 == 0 ? pieces * 100 - 50 : pieces * 50;
    if (i % 3 == 2) continue;
    ++files;
    CHECK(i % 97 || (index.container(1000 + i)->pieces == pieces && index.pieces(1000 + i, false).size() == pieces));
  }
  CHECK(index.figures().at(1).pieces == held.pieces && index.figures().at(1).size_bytes == held.size_bytes);
  CHECK(index.containers().size() == files + index.segments().size() && index.segments().size() == 89);
  for (const auto& [_, container] : index.containers()) held.pieces -= container.pieces;
  CHECK(held.pieces == 0);
  std::set<uint32_t> drawn;
  for (const Piece& piece : index.sample(200, {1}, Packing::large, 3)) drawn.insert(piece.container);
  CHECK(drawn.size() > 150 && *drawn.begin() > 1000 && index.sample(5, {2}, Packing::large, 3).empty());
}

void owners_beside_their_twin(uint64_t seed) {
  std::mt19937_64 chance(seed);
  Owners owners;
  std::map<uint32_t, uint32_t> twin;
  for (uint32_t i = 1; i < 20'000; ++i) {
    const auto container = static_cast<uint32_t>(1 + chance() % (i < 10'000 ? 4000 : 400));
    if (chance() % 3) {
      owners.put(container).number = i;
      twin[container] = i;
    } else {
      owners.erase(container);
      twin.erase(container);
    }
  }
  for (uint32_t container = 1; container <= 4000; ++container) {
    const Owner* found = owners.find(container);
    CHECK((found != nullptr) == (twin.count(container) != 0) && (!found || found->number == twin[container]));
  }
  CHECK(owners.size() == twin.size());
}

}  // namespace

int main(int, char** argv) {
  a_long_file(argv[1]);
  owners_beside_their_twin(std::strtoull(argv[2], nullptr, 10));
  std::puts("well");
}
