// When each thing is read next, of what readers said that they are going to read. Nothing here ever changes: what is
// looked up in one thread may be replaced in another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace stoker {

// An item is a number that stands for what is read; a position counts the reads of one reader.
struct Read {
  uint64_t item;
  int64_t position;
};

// Some consecutive reads, by item and position. Items are spread evenly over all numbers, as hashes are: where those of
// a number begin is looked up by its highest bits.
class ReadRun {
 public:
  // `reads` are sorted.
  ReadRun(std::vector<Read> reads, int64_t start, int64_t stop);

  const std::vector<Read>& reads() const { return reads_; }
  int64_t start() const { return start_; }
  int64_t stop() const { return stop_; }
  // The first steps of a search, for who has many to do: each has the memory fetched that the next one needs.
  void expect(uint64_t item) const { __builtin_prefetch(&firsts_[item >> shift_]); }
  void expect_reads(uint64_t item) const { __builtin_prefetch(reads_.data() + firsts_[item >> shift_]); }
  // Its first read from a position on; null if there is none.
  const Read* find(uint64_t item, int64_t from) const;
  // The same item's next.
  const Read* after(const Read* read) const;

 private:
  std::vector<Read> reads_;
  std::vector<uint32_t> firsts_;
  int shift_;
  int64_t start_;
  int64_t stop_;
};

// The coming reads of one reader: few runs of shrinking size, as in a log-structured merge tree.
class Reads {
 public:
  static constexpr size_t RUN_READS_MAX = 1 << 20;  // larger ones are not merged: dropping a part takes milliseconds

  size_t size() const;
  // Of how many positions all is known.
  int64_t positions() const;
  const std::vector<std::shared_ptr<const ReadRun>>& runs() const { return runs_; }
  // These as well: `reads`, in any order, are all of those from `start`, where the others end, to `stop`.
  std::shared_ptr<const Reads> with(std::vector<Read> reads, int64_t start, int64_t stop) const;
  // Only those before a position; those that are before `from` may be gone, too.
  std::shared_ptr<const Reads> until(int64_t stop, int64_t from) const;
  // Those from a position on; some before it may be left where few are.
  std::shared_ptr<const Reads> since(int64_t from) const;

 private:
  std::vector<std::shared_ptr<const ReadRun>> runs_;
};

// An item that a reader reads at `position` and then, if that is known, `again`.
struct NextRead {
  static constexpr int64_t NEVER = INT64_MAX;
  uint32_t reader;
  uint32_t item;  // its place among those that were asked for
  int64_t position;
  int64_t again;
};

// The next reads of items, by each reader from its place in `from` on, and before that in `until`; by reader.
std::vector<NextRead> next_reads(const std::vector<std::shared_ptr<const Reads>>& readers,
                                 const std::vector<int64_t>& from, const std::vector<int64_t>& until,
                                 const uint64_t* items, size_t count, bool with_again);

}  // namespace stoker
