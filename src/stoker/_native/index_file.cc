// The index and its file: buckets, and writing it anew when most of it is of the past.
#include <algorithm>

#include "index.h"
#include "index_records.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr uint64_t COMPACT_FROM_BYTES = 16 * 1024 * 1024;

std::string bucket_body(uint16_t number, const std::string& name, const std::string& note) {
  const BucketRecord record{number, static_cast<uint16_t>(name.size()), static_cast<uint32_t>(note.size())};
  return std::string(bytes_of(record)) + name + note;
}

}  // namespace

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
  Object& object = shard.at(number);
  const bool is_packed = object.container && !(object.flags & Object::LARGE);
  const ObjectRecord record{
      object.id, object.size_bytes, object.checked_s, object.tag, object.bucket, object.key_size,
      object.version_size, static_cast<uint8_t>(object.flags & Object::ABSENT), is_packed,
      is_packed ? object.container : 0, is_packed ? object.offset : 0, is_packed ? object.crc : 0, object.used_s};
  std::string body(bytes_of(record));
  body += text(shard, object.text_at, size_t{object.key_size} + object.version_size);
  const std::unique_lock lock(file_mutex_);
  shard.moved[number] = next.append(Kind::object, body);
  if (!(object.flags & Object::LARGE)) return;
  for (uint32_t block = 0; block < shard.blocks(object); ++block) {
    const auto at = shard.block(object, block);
    if (!at) continue;
    const HeldRecord held{object.id, object.tag, block, object.container, 0, at->crc, at->used_s};
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
