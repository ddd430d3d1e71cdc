// The index and its file: replay at the start, and writing it anew when most of it is of the past.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>

#include "index.h"
#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr uint64_t COMPACT_FROM_BYTES = 16 * 1024 * 1024;

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

std::string bucket_body(uint16_t number, const std::string& name, const std::string& note) {
  const BucketRecord record{number, static_cast<uint16_t>(name.size()), static_cast<uint32_t>(note.size())};
  return std::string(bytes_of(record)) + name + note;
}

}  // namespace

Index::Index(const std::string& path, uint32_t block_size_bytes, uint32_t now_s)
    : block_size_bytes_(block_size_bytes), path_(path), opened_s_(now_s) {
  struct stat about;
  if (::stat(path.c_str(), &about) == 0) expect(static_cast<uint64_t>(about.st_size));
  try {
    files_[0] = std::make_unique<Journal>(
        Journal::open(path, replay_, [this](Kind kind, std::string_view body, uint64_t at) {
          if (kind == Kind::object && body.size() >= sizeof(ObjectRecord)) take_object(body, at);
          else take(kind, body, at);
        }));
    key_ = files_[0]->key();
  } catch (const FileProblem& problem) {
    if (problem.number != ENOENT) throw;
    key_ = random_key();
    Journal made = Journal::create(path + ".new", key_);
    made.append(Kind::layout, bytes_of(LayoutRecord{block_size_bytes}));
    made.sync();
    made.rename_to(path);
    files_[0] = std::make_unique<Journal>(std::move(made));
    return;
  }
  if (!replayed_gone_.empty()) drop_containers(replayed_gone_);
  replayed_gone_.clear();
  if (!blocks_fit_) append(Kind::layout, bytes_of(LayoutRecord{block_size_bytes}));
}

// Room for the objects that a file of this size can hold.
void Index::expect(uint64_t file_bytes) {
  const uint64_t objects = file_bytes / (sizeof(ObjectRecord) + 64) / SHARDS;
  size_t size = 64;
  while (size * 3 < objects * 4) size *= 2;
  for (size_t i = 0; i < SHARDS; ++i) shards_[i].grow(size);
}

void Index::take_object(std::string_view body, uint64_t at) {
  ObjectRecord record;
  read_record(body, record);
  if (record.key_size == 0 || body.size() != sizeof record + record.key_size + record.version_size) return;
  Shard& shard = shard_of(record.id);
  uint32_t number = shard.find(record.id);
  if (number == NONE) {
    number = shard.add(record.id);
  } else {
    drop_pieces(shard, number);
    count_object(shard, shard.at(number), -1);
  }
  Object& object = shard.at(number);
  bucket_max_ = std::max(bucket_max_, record.bucket);
  object.text_at = at;
  object.size_bytes = record.size_bytes;
  object.checked_s = checked(record.checked_s);
  object.used_s = used(record.used_s);
  object.tag = record.tag;
  object.bucket = record.bucket;
  object.key_size = record.key_size;
  object.version_size = record.version_size;
  object.flags = record.flags & Object::ABSENT;
  count_object(shard, object, 1);
  if (record.has_piece && record.container)
    set_piece(shard, number, WHOLE, record.container, record.offset, record.crc, used(record.used_s), false);
}

uint32_t Index::used(uint32_t said_s) {
  is_of_later_ |= said_s > opened_s_;
  return std::min(said_s, opened_s_);
}

uint32_t Index::checked(uint32_t said_s) {
  is_of_later_ |= said_s > opened_s_;
  return std::min(said_s, opened_s_ - 1);
}

void Index::take(Kind kind, std::string_view body, uint64_t) {
  auto find = [this](const Hash128& id, auto&& then) {
    Shard& shard = shard_of(id);
    const uint32_t number = shard.find(id);
    if (number != NONE) then(shard, number);
  };
  LayoutRecord layout;
  BucketRecord bucket;
  HeldRecord held;
  CheckedRecord looked;
  GoneRecord gone;
  LostRecord lost;
  ContainerGoneRecord container;
  if (kind == Kind::layout && read_record(body, layout)) {
    blocks_fit_ = layout.block_size_bytes == block_size_bytes_;
    if (!blocks_fit_) drop_large();
  } else if (kind == Kind::bucket && read_record(body, bucket)) {
    if (body.size() != sizeof bucket + bucket.name_size + bucket.note_size) return;
    const std::string name(body.substr(sizeof bucket, bucket.name_size));
    bucket_max_ = std::max(bucket_max_, bucket.number);
    for (const auto& [other, known] : buckets_)
      if (known.first == bucket.number && other != name) return;
    buckets_[name] = {bucket.number, std::string(body.substr(sizeof bucket + bucket.name_size))};
  } else if (kind == Kind::held && read_record(body, held)) {
    find(held.id, [&](Shard& shard, uint32_t number) {
      const Object& object = shard.at(number);
      const bool is_inside = held.block == WHOLE || uint64_t{held.block} * block_size_bytes_ < object.size_bytes;
      if (held.tag != object.tag || !is_inside || held.container == 0 || (object.flags & Object::ABSENT)) return;
      if (held.block == WHOLE || blocks_fit_)
        set_piece(shard, number, held.block, held.container, held.offset, held.crc, used(held.used_s), false);
    });
  } else if (kind == Kind::checked && read_record(body, looked)) {
    find(looked.id, [&](Shard& shard, uint32_t number) { shard.at(number).checked_s = checked(looked.checked_s); });
  } else if (kind == Kind::gone && read_record(body, gone)) {
    find(gone.id, [&](Shard& shard, uint32_t number) { drop_object(shard, number); });
  } else if (kind == Kind::lost && read_record(body, lost)) {
    find(lost.id, [&](Shard& shard, uint32_t number) {
      if (shard.at(number).container == lost.container) drop_piece(shard, number, lost.block);
    });
  } else if (kind == Kind::container_max && read_record(body, container)) {
    container_max_ = std::max(container_max_, container.container);
  } else if (kind == Kind::container_gone && read_record(body, container)) {
    replayed_gone_.insert(container.container);
    container_max_ = std::max(container_max_, container.container);
  }
}

uint16_t Index::bucket(const std::string& name, const std::string& note) {
  const Lock lock(counts_mutex_);
  const auto found = buckets_.find(name);
  if (found != buckets_.end() && found->second.second == note) return found->second.first;
  uint16_t number = 0;
  if (found != buckets_.end()) {
    number = found->second.first;
  } else {
    if (bucket_max_ == UINT16_MAX || name.size() > UINT16_MAX) throw FileProblem("there are too many buckets", 0);
    number = ++bucket_max_;  // never used again, whatever becomes of it
  }
  append(Kind::bucket, bucket_body(number, name, note));
  buckets_[name] = {number, note};
  return number;
}

std::map<std::string, std::pair<uint16_t, std::string>> Index::buckets() const {
  const Lock lock(counts_mutex_);
  return buckets_;
}

// -- writing it anew ---------------------------------------------------------------------------------------------

// While `next` is written, every change goes to both files. An object that is copied is copied as it is at that moment,
// under its shard's lock, and what changes later comes later in the file: so the file as a whole is always true.
bool Index::compact(bool anyway) {
  const Lock only(compaction_mutex_);
  if (!anyway && !owes_ && file_bytes() < COMPACT_FROM_BYTES + 2 * live_bytes_) return false;
  const bool owed = owes_.exchange(false);
  try {
    write_anew();
  } catch (...) {
    if (owed) owes_ = true;
    throw;
  }
  return true;
}

void Index::write_anew() {
  auto next = std::make_unique<Journal>(Journal::create(path_ + ".new", key_));
  {
    const Lock names(counts_mutex_);
    const std::unique_lock lock(file_mutex_);
    next->set_buffered(true);
    next->append(Kind::layout, bytes_of(LayoutRecord{block_size_bytes_}));
    next->append(Kind::container_max, bytes_of(ContainerGoneRecord{container_max_}));
    for (const auto& [name, known] : buckets_) next->append(Kind::bucket, bucket_body(known.first, name, known.second));
    next_failed_ = false;
    files_[1 - current_] = std::move(next);
  }
  try {
    copy_all();
    begin_switch();
  } catch (...) {
    owes_ = true;
    const std::unique_lock lock(file_mutex_);
    files_[1 - current_].reset();
    ::remove((path_ + ".new").c_str());
    throw;  // offsets that were noted for it stay behind, and mean nothing
  }
  switch_over();
}

void Index::copy_all() {
  Journal& next = *files_[1 - current_];
  each(AT_ONCE, [&](Shard& shard, uint32_t number) {
    if (shard.moved.size() <= number) shard.moved.resize(shard.used);
    copy(shard, number, next);
  });
  {
    const std::unique_lock lock(file_mutex_);
    next.flush();
  }
  next.wait_durable();
}

void Index::begin_switch() {
  const std::unique_lock lock(file_mutex_);
  Journal& next = *files_[1 - current_];
  if (next_failed_) throw FileProblem("cannot write to " + next.path(), 0);
  next.set_buffered(false);
  next.sync();
  next.rename_to(path_);
  switches_ = true;
  current_ = static_cast<uint8_t>(1 - current_);
}

void Index::copy(Shard& shard, uint32_t number, Journal& next) {
  const Object& object = shard.at(number);
  const bool is_packed = object.container && !(object.flags & Object::LARGE);
  const ObjectRecord record{
      object.id, object.size_bytes, object.checked_s, object.tag, object.bucket, object.key_size,
      object.version_size, static_cast<uint8_t>(object.flags & Object::ABSENT), is_packed,
      is_packed ? object.container : 0, object.offset, object.crc, object.used_s};
  std::string body(bytes_of(record));
  body += text(shard, object.text_at, size_t{object.key_size} + object.version_size);
  const std::unique_lock lock(file_mutex_);
  shard.moved[number] = next.append(Kind::object, body);
  if (!(object.flags & Object::LARGE)) return;
  const std::vector<Block>& blocks = shard.large.at(number);
  for (uint32_t block = 0; block < blocks.size(); ++block) {
    if (!(blocks[block].flags & Block::HELD)) continue;
    const HeldRecord held{object.id, object.tag, block, object.container, 0, blocks[block].crc, blocks[block].used_s};
    next.append(Kind::held, bytes_of(held));
  }
}

void Index::switch_over() {
  const auto old = static_cast<uint8_t>(1 - current_);
  for (size_t i = 0; i < SHARDS; ++i) {
    Shard& shard = shards_[i];
    const Lock lock(shard.mutex);
    for (uint32_t number = 0; number < shard.used; ++number)
      if (shard.is_live(number)) shard.at(number).text_at = shard.moved[number];
    shard.file = current_;
    shard.moved = {};
  }
  const std::unique_lock lock(file_mutex_);
  switches_ = false;
  files_[old].reset();
}

void Index::sync() {
  {
    const std::unique_lock lock(file_mutex_);
    files_[current_]->flush();
  }
  const std::shared_lock lock(file_mutex_);  // who reads names need not wait for the disk
  files_[current_]->wait_durable();
}

uint64_t Index::file_bytes() const {
  const std::shared_lock lock(file_mutex_);
  return files_[current_]->size_bytes();
}

}  // namespace stoker
