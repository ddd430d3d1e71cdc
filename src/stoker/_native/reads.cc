#include "reads.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace stoker {
namespace {

constexpr size_t READS_EACH = 4;  // of one entry in `firsts_`
constexpr size_t FEW = 4;
constexpr size_t AT_ONCE = 32;  // so many fetches from memory overlap

bool is_before(const Read& one, const Read& other) {
  return one.item != other.item ? one.item < other.item : one.position < other.position;
}

std::shared_ptr<const ReadRun> between(const ReadRun& run, int64_t from, int64_t stop) {
  std::vector<Read> kept;
  kept.reserve(run.reads().size());
  for (const Read& read : run.reads())
    if (read.position >= from && read.position < stop) kept.push_back(read);
  kept.shrink_to_fit();
  stop = std::min(run.stop(), stop);
  return std::make_shared<ReadRun>(std::move(kept), std::min(std::max(run.start(), from), stop), stop);
}

std::shared_ptr<const ReadRun> merged(const ReadRun& before, const ReadRun& last) {
  std::vector<Read> reads(before.reads().size() + last.reads().size());
  std::merge(before.reads().begin(), before.reads().end(), last.reads().begin(), last.reads().end(), reads.begin(),
             is_before);
  return std::make_shared<ReadRun>(std::move(reads), before.start(), last.stop());
}

void expect_all(const std::vector<std::shared_ptr<const Reads>>& readers, const uint64_t* items, size_t count) {
  for (const auto& reader : readers)
    for (const auto& run : reader->runs())
      for (size_t i = 0; i < count; ++i) run->expect(items[i]);
  for (const auto& reader : readers)
    for (const auto& run : reader->runs())
      for (size_t i = 0; i < count; ++i) run->expect_reads(items[i]);
}

// What this run knows of those of which earlier ones do not know all.
void look(const ReadRun& run, int64_t from, int64_t until, const uint64_t* items, std::vector<NextRead>& asked,
          bool with_again) {
  for (size_t first = 0; first < asked.size(); first += AT_ONCE) {
    const size_t stop = std::min(asked.size(), first + AT_ONCE);
    for (size_t i = first; i < stop; ++i) run.expect(items[asked[i].item]);
    for (size_t i = first; i < stop; ++i) run.expect_reads(items[asked[i].item]);
    for (size_t i = first; i < stop; ++i) {
      NextRead& one = asked[i];
      const bool is_known = one.position != NextRead::NEVER;
      if (is_known && (!with_again || one.again != NextRead::NEVER)) continue;
      const Read* read = run.find(items[one.item], from);
      if (read && !is_known && read->position < until) {
        one.position = read->position;
        read = with_again ? run.after(read) : nullptr;
      }
      if (read && read->position < until) one.again = read->position;
    }
  }
}

}  // namespace

ReadRun::ReadRun(std::vector<Read> reads, int64_t start, int64_t stop)
    : reads_(std::move(reads)), shift_(63), start_(start), stop_(stop) {
  if (reads_.size() >= UINT32_MAX) throw std::length_error("too many reads in one run");
  while (shift_ > 32 && (size_t{1} << (64 - shift_)) * READS_EACH < reads_.size()) --shift_;
  firsts_.resize((size_t{1} << (64 - shift_)) + 1);
  for (const Read& read : reads_) ++firsts_[(read.item >> shift_) + 1];
  for (size_t i = 1; i < firsts_.size(); ++i) firsts_[i] += firsts_[i - 1];
}

const Read* ReadRun::find(uint64_t item, int64_t from) const {
  const uint32_t* first = &firsts_[item >> shift_];
  const Read* stop = reads_.data() + first[1];
  const Read* found = std::lower_bound(reads_.data() + first[0], stop, Read{item, from}, is_before);
  return found != stop && found->item == item ? found : nullptr;
}

const Read* ReadRun::after(const Read* read) const {
  const Read* next = read + 1;
  return next != reads_.data() + reads_.size() && next->item == read->item ? next : nullptr;
}

size_t Reads::size() const {
  size_t size = 0;
  for (const auto& run : runs_) size += run->reads().size();
  return size;
}

int64_t Reads::positions() const {
  int64_t positions = 0;
  for (const auto& run : runs_) positions += run->stop() - run->start();
  return positions;
}

std::shared_ptr<const Reads> Reads::with(std::vector<Read> reads, int64_t start, int64_t stop) const {
  auto made = std::make_shared<Reads>(*this);
  std::sort(reads.begin(), reads.end(), is_before);
  auto& runs = made->runs_;
  runs.push_back(std::make_shared<ReadRun>(std::move(reads), start, stop));
  while (runs.size() > 1) {
    const ReadRun &before = *runs[runs.size() - 2], &last = *runs.back();
    const size_t before_size = before.reads().size(), last_size = last.reads().size();
    if (last_size * 2 < before_size || before_size + last_size > RUN_READS_MAX) break;
    auto both = merged(before, last);
    runs.pop_back();
    runs.back() = std::move(both);
  }
  return made;
}

std::shared_ptr<const Reads> Reads::until(int64_t stop, int64_t from) const {
  auto made = std::make_shared<Reads>();
  for (const auto& run : runs_)
    if (run->start() < stop) made->runs_.push_back(run->stop() <= stop ? run : between(*run, from, stop));
  return made;
}

std::shared_ptr<const Reads> Reads::since(int64_t from) const {
  auto made = std::make_shared<Reads>();
  for (const auto& run : runs_)
    if (run->stop() > from) made->runs_.push_back(run);
  if (!made->runs_.empty()) {
    auto& first = made->runs_.front();
    if (from - first->start() > first->stop() - from) first = between(*first, from, first->stop());
  }
  return made;
}

std::vector<NextRead> next_reads(const std::vector<std::shared_ptr<const Reads>>& readers,
                                 const std::vector<int64_t>& from, const std::vector<int64_t>& until,
                                 const uint64_t* items, size_t count, bool with_again) {
  // Of many, memory is gone through once for each run, from its beginning to its end.
  std::vector<NextRead> asked(count);
  for (uint32_t i = 0; i < count; ++i) asked[i].item = i;
  if (count > FEW) std::sort(asked.begin(), asked.end(), [items](const NextRead& one, const NextRead& other) {
    return items[one.item] < items[other.item];
  });
  std::vector<NextRead> found;
  if (count <= FEW) expect_all(readers, items, count);
  for (uint32_t reader = 0; reader < readers.size(); ++reader) {
    for (NextRead& one : asked) one = {reader, one.item, NextRead::NEVER, NextRead::NEVER};
    for (const auto& run : readers[reader]->runs())
      if (run->stop() > from[reader] && run->start() < until[reader])
        look(*run, from[reader], until[reader], items, asked, with_again);
    std::copy_if(asked.begin(), asked.end(), std::back_inserter(found),
                 [](const NextRead& one) { return one.position != NextRead::NEVER; });
  }
  return found;
}

}  // namespace stoker
