// The index and its file: the replay at the start. Shards know nothing of each other: while one window of the file is
// read and checked, the records of the one before are applied to several shards at once, each shard's in their order.
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>

#include "index.h"
#include "index_records.h"
#include "turns.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr uint64_t THREADS_FROM_BYTES = 16 * 1024 * 1024;
constexpr size_t RUNS_MAX = 256;  // of what is counted, before it is taken over
// How many records ahead memory is asked for: first a record's slot in the table, then the object that it leads to.
constexpr size_t SLOT_AHEAD = 16, OBJECT_AHEAD = 8;

template <typename Record>
bool read_record(std::string_view body, Record& record) {
  if (body.size() < sizeof record) return false;
  std::memcpy(&record, body.data(), sizeof record);
  return true;
}

HashKey random_key() {
  std::random_device chance;
  auto word = [&] { return (uint64_t{chance()} << 32) | chance(); };
  return HashKey{word(), word()};
}

}  // namespace

class Index::Replaying : public JournalReader {
 public:
  Replaying(Index& index, uint64_t file_bytes)
      : index_(index), turns_(file_bytes < THREADS_FROM_BYTES ? 0 : Turns::threads()) {}

  void take(Kind kind, std::string_view body, uint64_t at) override;
  void end_window() override;
  void let_go() noexcept override { turns_.wait(); }
  // Counts what is held by now.
  void finish();
  bool do_blocks_fit() const { return do_blocks_fit_; }

 private:
  struct Record {
    const char* body;
    uint64_t at;
    uint64_t id_low;
    uint32_t size;
    Kind kind;
  };
  using Shares = std::array<std::vector<Record>, SHARDS>;

  void take_layout(const LayoutRecord& layout);
  void take_bucket(std::string_view body);
  void apply(Shard& shard, const std::vector<Record>& records);
  void apply(Shard& shard, Kind kind, std::string_view body, uint64_t at);
  void apply_object(Shard& shard, std::string_view body, uint64_t at);
  void count(Shard& shard);
  void take_counted(std::vector<std::pair<uint32_t, Container>>& runs, std::vector<Owner>& owners);
  uint32_t used(Shard& shard, uint32_t said_s);
  uint32_t checked(Shard& shard, uint32_t said_s);

  Index& index_;
  Shares gathered_, applied_;
  bool do_blocks_fit_ = false;
  std::unordered_set<uint32_t> gone_;
  Turns turns_;  // of shards; waits for them before anything else is gone
};

// -- in the thread that reads the file ---------------------------------------------------------------------------

void Index::Replaying::take(Kind kind, std::string_view body, uint64_t at) {
  LayoutRecord layout;
  ContainerGoneRecord container;
  Hash128 id;
  switch (kind) {
    case Kind::object: case Kind::held: case Kind::checked: case Kind::gone: case Kind::lost:
      // The identity comes first in all of them.
      if (!read_record(body, id)) return;
      gathered_[id.high >> 58].push_back({body.data(), at, id.low, static_cast<uint32_t>(body.size()), kind});
      break;
    case Kind::layout:
      if (read_record(body, layout)) take_layout(layout);
      break;
    case Kind::bucket:
      take_bucket(body);
      break;
    case Kind::container_gone: case Kind::container_max:
      if (!read_record(body, container)) return;
      if (kind == Kind::container_gone) gone_.insert(container.container);
      index_.container_max_ = std::max(index_.container_max_, container.container);
  }
}

// What comes before it had another.
void Index::Replaying::take_layout(const LayoutRecord& layout) {
  end_window();
  turns_.wait();
  do_blocks_fit_ = layout.block_size_bytes == index_.block_size_bytes_;
  if (!do_blocks_fit_) index_.drop_large();
}

void Index::Replaying::take_bucket(std::string_view body) {
  BucketRecord bucket;
  if (!read_record(body, bucket) || body.size() != sizeof bucket + bucket.name_size + bucket.note_size) return;
  const std::string name(body.substr(sizeof bucket, bucket.name_size));
  index_.bucket_max_ = std::max(index_.bucket_max_, bucket.number);
  for (const auto& [other, known] : index_.buckets_)
    if (known.first == bucket.number && other != name) return;
  index_.buckets_[name] = {bucket.number, std::string(body.substr(sizeof bucket + bucket.name_size))};
}

void Index::Replaying::end_window() {
  turns_.wait();
  gathered_.swap(applied_);
  for (std::vector<Record>& share : gathered_) share.clear();
  turns_.begin(SHARDS, [this](size_t i) { apply(index_.shards_[i], applied_[i]); });
}

void Index::Replaying::finish() {
  turns_.begin(SHARDS, [this](size_t i) { count(index_.shards_[i]); });
  turns_.wait();
  for (size_t i = 0; i < SHARDS; ++i) {
    const Met& met = index_.shards_[i].met;
    index_.container_max_ = std::max(index_.container_max_, met.container_max);
    index_.bucket_max_ = std::max(index_.bucket_max_, met.bucket_max);
    index_.is_of_later_ |= met.is_of_later;
  }
}

// -- in a shard --------------------------------------------------------------------------------------------------

void Index::Replaying::apply(Shard& shard, const std::vector<Record>& records) {
  for (size_t i = 0; i < records.size(); ++i) {
    if (i + SLOT_AHEAD < records.size()) {
      __builtin_prefetch(records[i + SLOT_AHEAD].body);
      __builtin_prefetch(shard.slot_of(records[i + SLOT_AHEAD].id_low));
    }
    if (i + OBJECT_AHEAD < records.size()) {
      const uint32_t entry = *shard.slot_of(records[i + OBJECT_AHEAD].id_low);
      if (entry) __builtin_prefetch(&shard.at(entry - 1));
    }
    apply(shard, records[i].kind, {records[i].body, records[i].size}, records[i].at);
  }
}

void Index::Replaying::apply_object(Shard& shard, std::string_view body, uint64_t at) {
  ObjectRecord record;
  if (!read_record(body, record) || record.key_size == 0) return;
  if (body.size() != sizeof record + record.key_size + record.version_size) return;
  uint32_t number = shard.find(record.id);
  const bool was_known = number != NONE;
  if (!was_known) number = shard.add(record.id);
  Object& object = shard.at(number);
  const bool is_same = was_known && (record.flags & ObjectRecord::SAME_VERSION) && object.tag == record.tag &&
                       object.size_bytes == record.size_bytes;
  if (is_same) {
    object.text_at = at;
    object.version_size = record.version_size;
    object.checked_s = checked(shard, record.checked_s);
    return;
  }
  if (was_known) index_.drop_pieces(shard, number);
  shard.met.bucket_max = std::max(shard.met.bucket_max, record.bucket);
  object.text_at = at;
  object.size_bytes = record.size_bytes;
  object.checked_s = checked(shard, record.checked_s);
  object.used_s = used(shard, record.used_s);
  object.tag = record.tag;
  object.bucket = record.bucket;
  object.key_size = record.key_size;
  object.version_size = record.version_size;
  object.flags = record.flags & Object::ABSENT;
  if (record.has_piece && record.container)
    index_.set_piece(shard, number, WHOLE, record.container, record.offset, record.crc, object.used_s, false);
}

uint32_t Index::Replaying::used(Shard& shard, uint32_t said_s) {
  shard.met.is_of_later |= said_s > index_.opened_s_;
  return std::min(said_s, index_.opened_s_);
}

uint32_t Index::Replaying::checked(Shard& shard, uint32_t said_s) {
  shard.met.is_of_later |= said_s > index_.opened_s_;
  return std::min(said_s, index_.opened_s_ - 1);
}

void Index::Replaying::apply(Shard& shard, Kind kind, std::string_view body, uint64_t at) {
  HeldRecord held;
  CheckedRecord looked;
  LostRecord lost;
  GoneRecord gone;
  if (kind == Kind::object) return apply_object(shard, body, at);
  if (!read_record(body, gone)) return;
  const uint32_t number = shard.find(gone.id);
  if (number == NONE) return;
  Object& object = shard.at(number);
  if (kind == Kind::held && read_record(body, held)) {
    const bool is_inside = held.block == WHOLE || uint64_t{held.block} * index_.block_size_bytes_ < object.size_bytes;
    if (held.tag != object.tag || !is_inside || held.container == 0 || (object.flags & Object::ABSENT)) return;
    if (held.block != WHOLE && !do_blocks_fit_) return;
    index_.set_piece(shard, number, held.block, held.container, held.offset, held.crc, used(shard, held.used_s), false);
  } else if (kind == Kind::checked && read_record(body, looked)) {
    object.checked_s = checked(shard, looked.checked_s);
  } else if (kind == Kind::gone) {
    index_.drop_object(shard, number);
  } else if (kind == Kind::lost && read_record(body, lost)) {
    if (object.container == lost.container) index_.drop_piece(shard, number, lost.block);
  }
}

// What is known and held in a shard, after what is no more was left out.
void Index::Replaying::count(Shard& shard) {
  std::vector<Owner> owners;
  std::vector<std::pair<uint32_t, Container>> runs;  // objects one after the other are often in one segment
  uint64_t live_bytes = 0;
  for (uint32_t number = 0; number < shard.used; ++number) {
    if (!shard.is_live(number)) continue;
    Object& object = shard.at(number);
    if (object.container && !gone_.empty() && gone_.count(object.container)) index_.drop_pieces(shard, number);
    BucketFigures& figures = shard.figures_of(object.bucket);
    ++figures.objects;
    live_bytes += record_bytes(object);
    if (object.container == 0) continue;
    Container found{object.bucket, false, 1, object.size_bytes, object.used_s};
    if (object.flags & Object::LARGE) {
      found = index_.held_of(shard, object);
      live_bytes += found.pieces * BLOCK_RECORD_BYTES;
      const auto which = static_cast<uint8_t>(&shard - index_.shards_.get());
      owners.push_back({object.container, number, found.used_s, object.bucket, which});
    } else if (runs.empty() || runs.back().first != object.container) {
      runs.emplace_back(object.container, found);
    } else {
      runs.back().second.add(found);
    }
    figures.pieces += found.pieces;
    figures.size_bytes += found.size_bytes;
    if (runs.size() + owners.size() >= RUNS_MAX) take_counted(runs, owners);
  }
  take_counted(runs, owners);
  index_.objects_ += shard.count;
  index_.live_bytes_ += live_bytes;
}

void Index::Replaying::take_counted(std::vector<std::pair<uint32_t, Container>>& runs, std::vector<Owner>& owners) {
  const Lock lock(index_.counts_mutex_);
  for (const auto& [number, run] : runs) index_.segments_[number].add(run);
  for (const Owner& owner : owners) index_.owners_.put(owner.container) = owner;
  runs.clear();
  owners.clear();
}

// -- opening -----------------------------------------------------------------------------------------------------

Index::Index(const std::string& path, uint32_t block_size_bytes, uint32_t now_s)
    : block_size_bytes_(block_size_bytes), path_(path), opened_s_(now_s) {
  struct stat about;
  const uint64_t file_bytes = ::stat(path.c_str(), &about) == 0 ? static_cast<uint64_t>(about.st_size) : 0;
  if (file_bytes) expect(file_bytes);
  Replaying replaying(*this, file_bytes);
  replays_ = true;
  try {
    files_[0] = std::make_unique<Journal>(Journal::open(path, replay_, replaying));
    key_ = files_[0]->key();
  } catch (const FileProblem& problem) {
    if (problem.number != ENOENT) throw;
    replays_ = false;
    key_ = random_key();
    Journal made = Journal::create(path + ".new", key_);
    made.append(Kind::layout, bytes_of(LayoutRecord{block_size_bytes}));
    made.sync();
    made.rename_to(path);
    files_[0] = std::make_unique<Journal>(std::move(made));
    return;
  }
  replaying.finish();
  replays_ = false;
  if (!replaying.do_blocks_fit()) append(Kind::layout, bytes_of(LayoutRecord{block_size_bytes}));
}

// Room for the objects that a file of this size is likely to hold: a record of each, with its names, and of its piece.
void Index::expect(uint64_t file_bytes) {
  const uint64_t objects = file_bytes / (sizeof(ObjectRecord) + sizeof(HeldRecord) + 104) / SHARDS;
  size_t size = 64;
  while (size * 3 < objects * 4) size *= 2;
  for (size_t i = 0; i < SHARDS; ++i) shards_[i].grow(size);
}

}  // namespace stoker
