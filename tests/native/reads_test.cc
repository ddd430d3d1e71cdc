// When each item is read next, against a plain list, whatever was announced and read; also while it is looked up.
//
//   reads_test SEED ROUNDS
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "../../src/stoker/_native/reads.h"
#include "check.h"

using namespace stoker;

namespace {

using Chance = std::mt19937_64;

// Spread as hashes are, with some at both ends.
uint64_t item_of(uint64_t number) {
  return number == 0 ? 0 : number == 1 ? UINT64_MAX : number * 0x9E3779B97F4A7C15;
}

// One reader, and its reads as a plain list.
struct Reader {
  std::shared_ptr<const Reads> reads = std::make_shared<Reads>();
  std::vector<uint64_t> plain;
  int64_t cursor = 0;

  void say(Chance& chance, uint64_t items) {
    const auto stop = static_cast<int64_t>(plain.size());
    const int64_t start = chance() % 4 ? stop : static_cast<int64_t>(chance() % (plain.size() + 1));
    if (start < stop) reads = reads->until(start, cursor);
    plain.resize(static_cast<size_t>(start));
    std::vector<Read> added;
    for (auto left = chance() % 200; left; --left) {
      added.push_back({item_of(chance() % items), static_cast<int64_t>(plain.size())});
      plain.push_back(added.back().item);
    }
    std::shuffle(added.begin(), added.end(), chance);
    reads = reads->with(std::move(added), start, static_cast<int64_t>(plain.size()));
  }

  void read(Chance& chance) {
    const int64_t left = static_cast<int64_t>(plain.size()) - cursor;
    if (left > 0) cursor += static_cast<int64_t>(chance() % static_cast<uint64_t>(left + 1));
    reads = reads->since(cursor);
    const auto after = static_cast<size_t>(std::max(int64_t{0}, static_cast<int64_t>(plain.size()) - cursor));
    CHECK(reads->size() >= after && reads->size() <= 2 * after);
  }

  int64_t next(uint64_t item, int64_t from, int64_t until) const {
    for (; from < std::min(until, static_cast<int64_t>(plain.size())); ++from)
      if (plain[static_cast<size_t>(from)] == item) return from;
    return NextRead::NEVER;
  }
};

void compare(const std::vector<Reader>& readers, uint64_t items) {
  std::vector<std::shared_ptr<const Reads>> reads;
  std::vector<int64_t> from, until;
  for (const Reader& reader : readers) {
    reads.push_back(reader.reads);
    from.push_back(reader.cursor);
    until.push_back(reader.plain.size() % 3 ? NextRead::NEVER : reader.cursor + 50);
  }
  std::vector<uint64_t> asked;
  const uint64_t first = items > 50 ? 0 : items / 2, stop = items > 50 ? items + 2 : first + 3;  // many, or a few
  for (uint64_t number = first; number < stop; ++number) asked.push_back(item_of(number));
  for (const bool with_again : {false, true}) {
    std::vector<NextRead> found = next_reads(reads, from, until, asked.data(), asked.size(), with_again);
    std::sort(found.begin(), found.end(), [](const NextRead& one, const NextRead& other) {
      return one.reader != other.reader ? one.reader < other.reader : one.item < other.item;
    });
    size_t at = 0;
    for (uint32_t reader = 0; reader < readers.size(); ++reader)
      for (uint32_t item = 0; item < asked.size(); ++item) {
        const int64_t next = readers[reader].next(asked[item], from[reader], until[reader]);
        if (next == NextRead::NEVER) continue;
        CHECK(at < found.size() && found[at].item == item && found[at].reader == reader);
        CHECK(found[at].position == next);
        const int64_t again = readers[reader].next(asked[item], next + 1, until[reader]);
        CHECK(found[at].again == (with_again ? again : NextRead::NEVER));
        ++at;
      }
    CHECK(at == found.size());
  }
}

void what_a_plain_list_says(Chance& chance) {
  std::vector<Reader> readers(chance() % 5);
  const uint64_t items = 1 + chance() % 100;
  for (int step = 0; step < 20; ++step) {
    for (Reader& reader : readers) chance() % 2 ? reader.say(chance, items) : reader.read(chance);
    compare(readers, items);
  }
}

// What is looked up stays as it is while its successor is made.
void in_two_threads(Chance& chance) {
  std::shared_ptr<const Reads> reads = std::make_shared<Reads>();
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    const uint64_t item = item_of(7);
    while (!is_over) {
      const auto found = next_reads({std::atomic_load(&reads)}, {0}, {NextRead::NEVER}, &item, 1, true);
      CHECK(found.size() <= 1);
    }
  });
  int64_t stop = 0;
  for (int step = 0; step < 100; ++step) {
    std::vector<Read> added;
    for (int i = 0; i < 100; ++i) added.push_back({item_of(chance() % 50), stop + i});
    auto next = reads->with(std::move(added), stop, stop + 100);
    stop += 100;
    std::atomic_store(&reads, next->since(stop / 2));
  }
  is_over = true;
  other.join();
}

}  // namespace

int main(int, char** argv) {
  Chance chance(std::strtoull(argv[1], nullptr, 10));
  for (auto round = std::strtoull(argv[2], nullptr, 10); round; --round) what_a_plain_list_says(chance);
  in_two_threads(chance);
  std::puts("well");
}
