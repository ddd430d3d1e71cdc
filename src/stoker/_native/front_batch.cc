// Many objects, or parts of them, in one answer.
#include <unistd.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "frames.h"
#include "front.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr uint64_t COPY_MAX = 8 * 1024;  // up to here a copy is cheaper than sendfile
constexpr size_t FILES_MAX = 512;        // that are open for one answer
constexpr size_t PARTS_MAX = 4096;
constexpr uint64_t TEXT_MAX = 4 * 1024 * 1024;
constexpr uint64_t BLOCKS_MAX = 256 * 1024;  // that are looked at
constexpr size_t RANGE_BYTES = 20;

uint64_t number_at(const std::string& bytes, size_t at, size_t size) {
  uint64_t number = 0;
  for (size_t i = at; i < at + size; ++i) number = number << 8 | static_cast<unsigned char>(bytes[i]);
  return number;
}

// A part of one object, which may end behind its end.
struct Item {
  size_t key;
  uint64_t start, stop;
};

size_t items_in(const Reads& reads) { return reads.ranges ? reads.ranges->size() / RANGE_BYTES : reads.keys.size(); }

Item item_at(const Reads& reads, size_t i) {
  if (!reads.ranges) return {i, 0, UINT64_MAX};
  const size_t at = i * RANGE_BYTES;
  return {static_cast<size_t>(number_at(*reads.ranges, at, 4)), number_at(*reads.ranges, at + 4, 8),
          number_at(*reads.ranges, at + 12, 8)};
}

// What is said so far.
struct Builder {
  Files& files;
  std::vector<Part> parts{1};
  std::unordered_set<uint32_t> sent_from{};  // containers
  uint64_t size = 0;       // of the whole body
  uint64_t text_size = 0;  // of it, what is not in files

  void text(const std::string& bytes) {
    parts.back().bytes += bytes;
    size += bytes.size();
    text_size += bytes.size();
  }
  bool data(const std::shared_ptr<File>& file, uint64_t offset, uint64_t wanted) {
    std::string frame;
    append_frame(frame, FRAME_LAST, wanted);
    if (wanted <= COPY_MAX) {
      const size_t head = frame.size();
      frame.resize(head + wanted);
      if (::pread(file->fd, frame.data() + head, wanted, static_cast<off_t>(offset)) != static_cast<ssize_t>(wanted))
        return false;
      text(frame);
      return true;
    }
    sent_from.insert(file->container);
    if (parts.size() > PARTS_MAX || sent_from.size() > FILES_MAX) return false;
    text(frame);
    Part& part = parts.back();
    part.file = file;
    part.offset = offset;
    part.size = wanted;
    size += wanted;
    parts.emplace_back();
    return true;
  }
  void place(uint64_t wanted, uint32_t container, uint64_t offset) {
    std::string frame;
    append_frame(frame, FRAME_PLACE, 16);
    append_number(frame, wanted, 4);
    append_number(frame, container, 4);
    append_number(frame, offset, 8);
    text(frame);
  }
  void before(const std::string& bytes) {
    parts.front().bytes.insert(0, bytes);
    size += bytes.size();
  }
};

}  // namespace

// All of them first: nothing is read in vain. What is asked for many times is looked up once.
bool Front::look_up_all(const Reads& reads, const BucketRule& rule, uint32_t now, std::vector<Object>& objects) const {
  for (size_t i = 0; i < reads.keys.size(); ++i) {
    Object object;
    if (!index_->look_up(rule.number, reads.keys[i], now, object)) return false;
    const bool is_there = object.container != 0 || object.size_bytes == 0;
    if (!is_there || (object.flags & Object::ABSENT) || !rule.is_fresh(object.checked_s, now)) return false;
    if (i < reads.versions.size() && !reads.versions[i].empty()) {
      try {
        const auto found = index_->find(rule.number, reads.keys[i], false);
        if (!found || found->version != reads.versions[i]) return false;
        object = found->object;  // it may have changed since
        if ((object.flags & Object::ABSENT) || !rule.is_fresh(object.checked_s, now)) return false;
      } catch (const FileProblem&) {
        return false;
      }
    }
    objects.push_back(object);
  }
  return true;
}

Batch Front::answer_batch(uint64_t connection, const Reads& reads, const BucketRule& rule, const Wanted& wanted) {
  Batch batch;
  Builder body{*files_};
  auto passing = std::make_shared<Passing>(passing_, settings_.passing_max);
  std::unordered_map<uint32_t, bool> readable;
  const auto can_read = [&](uint32_t container) {
    const auto [found, is_new] = readable.try_emplace(container, false);
    if (is_new)
      found->second = wanted.has(container, instance_) ||
                      (passing->size() < wanted.count_max && add(*passing, rule.number, container));
    return found->second;
  };
  const uint32_t now = now_s_.load(std::memory_order_relaxed);
  std::vector<Object> objects;
  objects.reserve(reads.keys.size());
  if (!look_up_all(reads, rule, now, objects)) return batch;
  std::shared_ptr<File> file;  // of the last item: many lie in few
  std::unordered_set<uint32_t> large;
  uint64_t blocks = 0;
  for (size_t i = 0; i < items_in(reads); ++i) {
    const Item item = item_at(reads, i);
    if (item.key >= objects.size() || item.stop < item.start) return batch;
    const Object& object = objects[item.key];
    const uint64_t start = std::min(item.start, object.size_bytes), stop = std::min(item.stop, object.size_bytes);
    const uint64_t size_bytes = stop - start;
    if (size_bytes == 0) {
      std::string frame;
      append_frame(frame, FRAME_LAST, 0);
      body.text(frame);
      if (body.text_size > TEXT_MAX) return batch;
      continue;
    }
    if (object.container == 0 || size_bytes > UINT32_MAX) return batch;
    int number = 0;
    // Opened first, and then it is looked at: see `put_piece`.
    if (!file || file->container != object.container) file = files_->open(object.container, number);
    if (!file) return batch;
    const bool is_large = object.flags & Object::LARGE;
    if (is_large && (blocks += size_bytes / index_->block_size_bytes() + 1) > BLOCKS_MAX) return batch;
    if (is_large ? !index_->covers(object, start, stop, now)
                 : !is_right(object, rule.number, reads.keys[item.key], *file))
      return batch;
    const uint64_t offset = is_large ? start : object.offset + start;
    batch.size_bytes += size_bytes;
    const bool may_place = size_bytes >= wanted.from_bytes && object.size_bytes <= PLACE_OBJECT_BYTES_MAX;
    if (may_place && can_read(object.container)) {
      body.place(size_bytes, object.container, offset);
      batch.places += 1;
      if (is_large) large.insert(object.container);
    } else if (!body.data(file, offset, size_bytes)) {
      return batch;
    }
    if (body.text_size > TEXT_MAX) return batch;
  }
  batch.large.assign(large.begin(), large.end());
  Command command;
  command.kind = Command::Kind::parts;
  command.connection = connection;
  if (passing->size()) {
    body.before(passing->frame(instance_));
    command.passing = std::move(passing);
  }
  body.parts.front().bytes.insert(0, "HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: " +
                                         std::to_string(body.size) + "\r\n\r\n");
  command.parts = std::move(body.parts);
  order(std::move(command));
  batch.is_answered = true;
  return batch;
}

}  // namespace stoker
