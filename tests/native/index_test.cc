// The index beside a naive twin, over crashes, torn and flipped files, and used by several threads at once.
//
//   index_test FOLDER SEED ROUNDS
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "../../src/stoker/_native/index.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr uint32_t BLOCK = 100;

struct Held {
  uint32_t container = 0, offset = 0, crc = 0;
};

struct Twin {
  std::string version;
  uint64_t size = 0;
  bool absent = false;
  uint32_t checked = 0;
  bool is_large = false;
  std::map<uint32_t, Held> pieces;
};

using Twins = std::map<std::pair<uint16_t, std::string>, Twin>;

void compare(const Index& index, const Twins& twins) {
  CHECK(index.objects() == twins.size());
  std::map<uint32_t, Container> containers;
  std::map<uint16_t, BucketFigures> figures;
  std::map<uint32_t, std::set<std::string>> keys;
  for (const auto& [name, twin] : twins) {
    const auto found = index.find(name.first, name.second, true);
    CHECK(found);
    const Object& object = found->object;
    CHECK(found->version == twin.version);
    CHECK(object.size_bytes == twin.size);
    CHECK(object.checked_s == twin.checked);
    CHECK(((object.flags & Object::ABSENT) != 0) == twin.absent);
    CHECK((object.container != 0) == !twin.pieces.empty());
    CHECK(((object.flags & Object::LARGE) != 0) == (twin.is_large && !twin.pieces.empty()));
    figures[name.first].objects += 1;
    for (const auto& [block, piece] : twin.pieces) {
      CHECK(object.container == piece.container);
      const auto held = index.held(name.first, name.second, object.tag, block == WHOLE ? 0 : block, object.used_s);
      CHECK(held && held->container == piece.container && held->crc == piece.crc && held->block == block);
      CHECK(held->offset == (block == WHOLE ? piece.offset : uint64_t{block} * BLOCK));
      CHECK(!index.held(name.first, name.second, object.tag + 1, block, object.used_s));
      CHECK(index.key_of(*held) == name.second);
      keys[piece.container].insert(name.second);
      if (block == WHOLE) {
        CHECK(object.offset == piece.offset && object.crc == piece.crc);
      } else {
        CHECK(block < found->blocks.size() && (found->blocks[block].flags & Block::HELD));
        CHECK(found->blocks[block].crc == piece.crc);
      }
      const uint64_t size = block == WHOLE ? twin.size : std::min<uint64_t>(BLOCK, twin.size - uint64_t{block} * BLOCK);
      containers[piece.container].pieces += 1;
      containers[piece.container].size_bytes += size;
      figures[name.first].pieces += 1;
      figures[name.first].size_bytes += size;
    }
    for (uint32_t block = 0; block < found->blocks.size(); ++block)
      CHECK(((found->blocks[block].flags & Block::HELD) != 0) == (twin.pieces.count(block) != 0));
  }
  const auto counted = index.containers();
  CHECK(counted.size() == containers.size());
  for (const auto& [number, container] : containers) {
    CHECK(counted.at(number).pieces == container.pieces);
    CHECK(counted.at(number).size_bytes == container.size_bytes);
    CHECK(index.container(number)->pieces == container.pieces && number <= index.container_max());
    const auto pieces = index.pieces(number, true);
    CHECK(pieces.size() == container.pieces);
    for (const NamedPiece& one : pieces) CHECK(keys[number].count(one.key) && one.piece.container == number);
  }
  CHECK(!index.container(index.container_max() + 1) && index.pieces(0, false).empty());
  for (const auto& [number, key] : index.container_keys()) CHECK(keys[number].count(key));
  for (const auto& [bucket, want] : index.figures()) {
    CHECK(figures[bucket].objects == want.objects && figures[bucket].pieces == want.pieces);
    CHECK(figures[bucket].size_bytes == want.size_bytes);
  }
  std::set<std::string> seen;
  for (uint64_t cursor = 0;;) {
    for (const Name& name : index.scan(1, "a", cursor, 7)) {
      CHECK(seen.insert(name.key).second);
      CHECK(twins.at({1, name.key}).version == name.version);
    }
    if (cursor == 0) break;
  }
  for (const auto& [name, _] : twins)
    if (name.first == 1 && name.second[0] == 'a') CHECK(seen.erase(name.second) == 1);
  CHECK(seen.empty());
  for (const Piece& piece : index.sample(20, {2}, Packing::any, 5)) CHECK(piece.bucket == 2 && piece.container);
}

std::string key_of(std::mt19937_64& chance) {
  std::string key(1, static_cast<char>('a' + chance() % 3));
  return key + std::to_string(chance() % 60) + std::string(chance() % 3 * 5, 'x');
}

// One random change to both.
void change(Index& index, Twins& twins, std::mt19937_64& chance, uint32_t now, uint32_t& containers) {
  const auto bucket = static_cast<uint16_t>(1 + chance() % 2);
  const std::string key = key_of(chance);
  const auto at = twins.find({bucket, key});
  switch (chance() % 17) {
    case 0: case 1: case 2: case 3: {
      const std::string version = "v" + std::to_string(chance() % 3);
      const uint64_t size = chance() % 2 ? 50 : 450;
      const bool absent = chance() % 8 == 0;
      const bool same = at != twins.end() && at->second.version == version && at->second.size == size &&
                        at->second.absent == absent;
      CHECK(index.learn(bucket, key, version, size, absent, now) == !same);
      Twin& twin = twins[{bucket, key}];
      if (!same) twin = Twin{version, size, absent, now, false, {}};
      twin.checked = now;
      break;
    }
    case 4:
      CHECK(index.forget(bucket, key) == (at != twins.end()));
      if (at != twins.end()) twins.erase(at);
      break;
    case 5: case 6: case 7: {
      const std::string version = at == twins.end() ? "v0" : chance() % 8 ? at->second.version : "other";
      if (chance() % 2) ++containers;
      const Held held{containers, 7, static_cast<uint32_t>(chance())};
      const bool fits = at != twins.end() && version == at->second.version && !at->second.absent;
      CHECK(index.hold(bucket, key, version, WHOLE, held.container, held.offset, held.crc, now) == fits);
      if (fits) {
        at->second.pieces = {{WHOLE, held}};
        at->second.is_large = false;
      }
      break;
    }
    case 8: case 9: case 10: case 11: {
      const auto block = static_cast<uint32_t>(chance() % 6);
      const bool fits = at != twins.end() && !at->second.absent && uint64_t{block} * BLOCK < at->second.size;
      const bool goes_on = fits && at->second.is_large && !at->second.pieces.empty() && chance() % 8;
      const Held held{goes_on ? at->second.pieces.begin()->second.container : ++containers, 0,
                      static_cast<uint32_t>(chance())};
      const std::string version = at == twins.end() ? "v0" : at->second.version;
      CHECK(index.hold(bucket, key, version, block, held.container, 0, held.crc, now) == fits);
      if (fits) {
        if (!goes_on) at->second.pieces.clear();
        at->second.pieces[block] = held;
        at->second.is_large = true;
      }
      break;
    }
    case 12: {
      if (at == twins.end() || at->second.pieces.empty()) break;
      const uint32_t block = chance() % 4 ? at->second.pieces.begin()->first : static_cast<uint32_t>(chance() % 6);
      const Piece piece{bucket, index.find(bucket, key, false)->object.id, block,
                        at->second.pieces.begin()->second.container};
      CHECK(index.lose(piece) == (at->second.pieces.count(block) != 0));
      at->second.pieces.erase(block);
      break;
    }
    case 16: {
      if (at == twins.end() || at->second.pieces.count(WHOLE) == 0) break;
      Held& held = at->second.pieces.at(WHOLE);
      Piece piece{bucket, index.find(bucket, key, false)->object.id, WHOLE, held.container, 0, 0, held.offset};
      CHECK(index.move(piece, ++containers, 9));
      CHECK(!index.move(piece, containers, 9) && "it lies there no more");
      held.container = containers;
      held.offset = 9;
      if (chance() % 2) index.doubt(containers);
      break;
    }
    case 13: {
      if (chance() % 8) break;
      const auto gone = 1 + static_cast<uint32_t>(chance() % containers);
      ++containers;  // a number is never used again
      index.lose_container(gone);
      for (auto& [_, twin] : twins)
        if (!twin.pieces.empty() && twin.pieces.begin()->second.container == gone) twin.pieces.clear();
      break;
    }
    case 14: {
      if (chance() % 8) break;
      const std::string prefix(chance() % 2, 'b');
      uint64_t expected = 0;
      for (auto& [name, twin] : twins) {
        if (name.first != bucket || name.second.compare(0, prefix.size(), prefix) != 0) continue;
        twin.checked = 0;
        ++expected;
      }
      CHECK(index.refresh(bucket, prefix) == expected);
      break;
    }
    default:
      if (chance() % 64 == 0) {
        index.clear(bucket);
        for (auto i = twins.begin(); i != twins.end();) i = i->first.first == bucket ? twins.erase(i) : std::next(i);
      }
      if (chance() % 16 == 0) CHECK(index.compact(true));
  }
}

void beside_its_twin(const std::string& folder, uint64_t seed) {
  std::mt19937_64 chance(seed);
  const std::string path = folder + "/index";
  ::unlink(path.c_str());
  Twins twins;
  uint32_t containers = 1;
  for (int life = 0; life < 4; ++life) {
    Index index(path, BLOCK);
    CHECK(index.replay().damaged_bytes == 0 && !index.replay().was_torn);
    compare(index, twins);
    CHECK(index.bucket("one", "") == 1 && index.bucket("two", "s3://" + std::to_string(life)) == 2);
    CHECK(index.buckets().at("two").second == "s3://" + std::to_string(life));
    for (int i = 0; i < 600; ++i) change(index, twins, chance, 1000 + static_cast<uint32_t>(life), containers);
    compare(index, twins);
  }
}

std::string contents(const std::string& path) {
  std::string all;
  FILE* file = std::fopen(path.c_str(), "rb");
  char part[4096];
  for (size_t got; (got = std::fread(part, 1, sizeof part, file)) > 0;) all.append(part, got);
  std::fclose(file);
  return all;
}

void write(const std::string& path, const std::string& text) {
  FILE* file = std::fopen(path.c_str(), "wb");
  CHECK(std::fwrite(text.data(), 1, text.size(), file) == text.size());
  std::fclose(file);
}

// Whatever was lost of the file: what is found was so once, all of it of one version.
void over_damage(const std::string& folder, uint64_t seed) {
  std::mt19937_64 chance(seed);
  const std::string path = folder + "/damaged";
  ::unlink(path.c_str());
  std::map<std::string, std::map<std::string, std::map<uint32_t, uint32_t>>> ever;  // key, version, block, checksums
  {
    Index index(path, BLOCK);
    CHECK(index.bucket("private", "") == 1);
    for (int i = 0; i < 300; ++i) {
      const std::string key = "k" + std::to_string(chance() % 20), version = "v" + std::to_string(i);
      index.learn(1, key, version, 450, false, 1000);
      for (uint32_t block = 0; block < 5; ++block) {
        const auto crc = static_cast<uint32_t>(chance());
        CHECK(index.hold(1, key, version, block, static_cast<uint32_t>(i + 1), 0, crc, 1000));
        ever[key][version][block] = crc;
      }
    }
  }
  const std::string whole = contents(path);
  for (int i = 0; i < 40; ++i) {
    std::string part = whole;
    if (chance() % 2) part[50] ^= 1;  // the record that names the bucket
    if (chance() % 2) part.resize(32 + chance() % (part.size() - 32));
    for (auto flips = chance() % 20; flips; --flips) {
      const size_t where = 32 + chance() % (part.size() - 32);
      part[where] = static_cast<char>(part[where] ^ (1 << chance() % 8));
    }
    write(path, part);
    uint64_t objects = 0;
    for (int again = 0; again < 2; ++again) {
      Index index(path, BLOCK);
      CHECK(!again || (index.objects() == objects && !index.replay().was_torn));
      objects = index.objects();
      const uint16_t other = index.bucket("other", "");
      for (const auto& [key, versions] : ever) {
        CHECK(!index.find(other, key, false) && "nobody gets another's number");
        const auto found = index.find(1, key, true);
        if (!found) continue;
        CHECK(versions.count(found->version));
        for (uint32_t block = 0; block < found->blocks.size(); ++block)
          if (found->blocks[block].flags & Block::HELD)
            CHECK(found->blocks[block].crc == versions.at(found->version).at(block));
      }
    }
  }
  write(path, "this is no index, and long enough for a head");
  bool refused = false;
  try {
    Index index(path, BLOCK);
  } catch (const FileProblem& problem) {
    refused = problem.number == 0;
  }
  CHECK(refused);
}

void with_other_blocks(const std::string& folder) {
  const std::string path = folder + "/blocks";
  ::unlink(path.c_str());
  for (const uint32_t size : {100U, 100U, 200U, 200U, 100U}) {
    Index index(path, size);
    const bool is_new = !index.find(1, "k", false);
    if (is_new) {
      index.learn(1, "k", "v", 450, false, 1);
      CHECK(index.hold(1, "k", "v", 1, 5, 0, 9, 1));
    }
    CHECK(index.find(1, "k", true)->blocks.empty() == (size == 200));
    if (size == 200) break;
  }
  Index index(path, 100);
  CHECK(index.find(1, "k", true)->blocks.empty() && "they were given up for good");
}

void by_many_threads(const std::string& folder) {
  const std::string path = folder + "/threads";
  ::unlink(path.c_str());
  Index index(path, BLOCK);
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int who = 0; who < 2; ++who)
    threads.emplace_back([&, who] {
      std::mt19937_64 chance(static_cast<uint64_t>(who));
      while (!done) {
        const std::string key = "k" + std::to_string(chance() % 300);
        if (const auto found = index.find(1, key, true)) CHECK(found->version.substr(1) == key);
        uint64_t cursor = 0;
        if (chance() % 64 == 0) index.scan(1, "k1", cursor, 10);
        if (chance() % 64 == 0) index.sample(5, {}, Packing(chance() % 3), chance());
        if (chance() % 64 == 0) index.containers();
        index.use(1, key, WHOLE, 5);
      }
    });
  threads.emplace_back([&] {
    while (!done) index.compact(true);
  });
  std::mt19937_64 chance(7);
  for (int i = 0; i < 6000; ++i) {
    const std::string key = "k" + std::to_string(chance() % 300), version = "v" + key;
    index.learn(1, key, version, 50, false, 5);
    const auto container = static_cast<uint32_t>(1 + i / 50);
    index.hold(1, key, version, WHOLE, container, 0, 3, 5);
    if (chance() % 4 == 0) index.forget(1, "k" + std::to_string(chance() % 300));
    if (chance() % 512 == 0 && container > 4) index.lose_container(container - 1 - static_cast<uint32_t>(chance() % 4));
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  const uint64_t objects = index.objects();
  std::map<std::string, uint32_t> held;
  for (int i = 0; i < 300; ++i)
    if (const auto found = index.find(1, "k" + std::to_string(i), false))
      held["k" + std::to_string(i)] = found->object.container;
  Index again(path, BLOCK);
  CHECK(again.objects() == objects && held.size() == objects);
  for (const auto& [key, container] : held) CHECK(again.find(1, key, false)->object.container == container);
}

void hashes() {
  CHECK(crc32c("123456789", 9) == 0xE3069283);
  HashKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  const Hash128 empty = siphash(key, "", "");
  CHECK(empty.high == 0xe6a825ba047f81a3 && empty.low == 0x930255c71472f66d);
  CHECK(siphash(key, "12345678", "9abc") == siphash(key, "", "123456789abc"));
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  const uint64_t seed = std::strtoull(argv[2], nullptr, 10), rounds = std::strtoull(argv[3], nullptr, 10);
  hashes();
  with_other_blocks(folder);
  for (uint64_t round = 0; round < rounds; ++round) {
    beside_its_twin(folder, seed + round);
    over_damage(folder, seed + round);
  }
  by_many_threads(folder);
  std::puts("well");
}
