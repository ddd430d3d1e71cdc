// Many objects in one answer.
#include <unistd.h>

#include <unordered_map>

#include "frames.h"
#include "front.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr uint64_t COPY_MAX = 8 * 1024;  // up to here a copy is cheaper than sendfile
constexpr size_t FILES_MAX = 512;
constexpr uint64_t TEXT_MAX = 4 * 1024 * 1024;

// What is said of the objects so far.
struct Builder {
  Files& files;
  std::vector<Part> parts{1};
  uint64_t size = 0;       // of the whole body
  uint64_t text_size = 0;  // of it, what is not in files

  void text(const std::string& bytes) {
    parts.back().bytes += bytes;
    size += bytes.size();
    text_size += bytes.size();
  }
  bool data(std::shared_ptr<File> file, uint64_t offset, uint64_t wanted) {
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
    if (parts.size() > FILES_MAX) return false;
    text(frame);
    Part& part = parts.back();
    part.file = std::move(file);
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

Batch Front::answer_batch(uint64_t connection, const std::vector<std::string>& keys, const BucketRule& rule,
                          const Wanted& wanted) {
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
  std::vector<Object> objects(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {  // all first: nothing is read in vain
    if (!index_->look_up(rule.number, keys[i], now, objects[i])) return batch;
    const bool is_there = objects[i].container != 0 || objects[i].size_bytes == 0;
    if (!is_there || (objects[i].flags & Object::ABSENT) || !rule.is_fresh(objects[i].checked_s, now)) return batch;
  }
  for (const Object& object : objects) {
    if (object.size_bytes == 0) {
      std::string frame;
      append_frame(frame, FRAME_LAST, 0);
      body.text(frame);
      continue;
    }
    int number = 0;
    std::shared_ptr<File> file = files_->open(object.container, number);  // first, and then it is looked at: see `put_piece`
    const bool is_large = object.flags & Object::LARGE;
    if (!file || object.size_bytes > index_->block_size_bytes()) return batch;
    if (is_large ? !index_->covers(object, 0, object.size_bytes, now) : !(object.flags & Object::VERIFIED)) return batch;
    const uint64_t offset = is_large ? 0 : object.offset;
    batch.size_bytes += object.size_bytes;
    if (object.size_bytes >= wanted.from_bytes && can_read(object.container)) {
      body.place(object.size_bytes, object.container, offset);
      batch.places += 1;
      if (is_large) batch.large.push_back(object.container);
    } else if (!body.data(std::move(file), offset, object.size_bytes)) {
      return batch;
    }
    if (body.text_size > TEXT_MAX) return batch;
  }
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
