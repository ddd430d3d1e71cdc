#include "journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace stoker {
namespace {

constexpr char MAGIC[8] = {'s', 't', 'o', 'k', 'i', 'd', 'x', '1'};
constexpr size_t BUFFER_MAX = 256 * 1024;
constexpr size_t READ_SIZE = 4 * 1024 * 1024;

struct FileHead {
  char magic[8];
  HashKey key;
  uint32_t crc;
  uint32_t reserved;
};
static_assert(sizeof(FileHead) == 32);

struct RecordHead {
  uint32_t crc;  // of all that follows
  uint16_t words;  // of the whole record
  uint8_t kind;
  uint8_t padding;  // bytes at its end that are not of the body
};
static_assert(sizeof(RecordHead) == 8);

[[noreturn]] void fail(const std::string& doing, const std::string& path) {
  const int number = errno;
  throw FileProblem("cannot " + doing + " " + path + ": " + std::strerror(number), number);
}

// Begun with the secret key: nobody can choose a name that reads as a record where a damaged one stood.
uint32_t checksum(const HashKey& key, const char* record, size_t size) {
  return crc32c(record + 4, size - 4, static_cast<uint32_t>(key.first));
}

struct LettingGo {
  JournalReader& reader;
  ~LettingGo() { reader.let_go(); }
};

// The whole record at `at`, if an intact one is there; 0 if not.
size_t intact(const HashKey& key, const char* at, size_t left) {
  if (left < sizeof(RecordHead)) return 0;
  RecordHead head;
  std::memcpy(&head, at, sizeof head);
  const size_t size = size_t{head.words} * 8;
  if (size < sizeof(RecordHead) || size > left || head.padding > 7 || size < sizeof head + head.padding) return 0;
  return checksum(key, at, size) == head.crc ? size : 0;
}

}  // namespace

Journal::Journal(std::string path, int fd, const HashKey& key, uint64_t size)
    : path_(std::move(path)), fd_(fd), key_(key), size_(size), written_(size) {}

Journal::Journal(Journal&& other) noexcept { *this = std::move(other); }

Journal& Journal::operator=(Journal&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(key_, other.key_);
  std::swap(size_, other.size_);
  std::swap(written_, other.written_);
  std::swap(buffer_, other.buffer_);
  std::swap(buffered_, other.buffered_);
  return *this;
}

Journal::~Journal() {
  if (fd_ >= 0) ::close(fd_);
}

Journal Journal::create(const std::string& path, const HashKey& key) {
  ::unlink(path.c_str());
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) fail("create", path);
  Journal made(path, fd, key, sizeof(FileHead));
  FileHead head{};
  std::memcpy(head.magic, MAGIC, sizeof MAGIC);
  head.key = key;
  head.crc = crc32c(&head, offsetof(FileHead, crc));
  if (::pwrite(fd, &head, sizeof head, 0) != sizeof head) fail("write to", path);
  return made;
}

Journal Journal::open(const std::string& path, Replay& replay, JournalReader& reader) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail("open", path);
  Journal found(path, fd, HashKey{}, sizeof(FileHead));
  FileHead head;
  const ssize_t got = ::pread(fd, &head, sizeof head, 0);
  if (got < 0) fail("read", path);
  if (got != sizeof head || std::memcmp(head.magic, MAGIC, sizeof MAGIC) != 0 ||
      head.crc != crc32c(&head, offsetof(FileHead, crc)))
    throw FileProblem(path + " is no index of this version", 0);
  found.key_ = head.key;
  struct stat about;
  if (::fstat(fd, &about) != 0) fail("look at", path);
  const auto total = static_cast<uint64_t>(about.st_size);

  constexpr size_t RECORD_MAX = size_t{UINT16_MAX} * 8;
  const size_t room = static_cast<size_t>(std::min<uint64_t>(READ_SIZE + RECORD_MAX, total));
  std::unique_ptr<char[]> window(new char[room]), before;  // the one before is still being looked at
  const LettingGo letting_go{reader};
  uint64_t at = sizeof head;       // of the window's first byte
  uint64_t end = at;               // of the last intact record
  size_t held = 0, done = 0;
  uint64_t damaged = 0;
  while (true) {
    if (held - done < RECORD_MAX && at + held < total) {
      reader.end_window();
      if (!before) before.reset(new char[room]);
      window.swap(before);
      std::memcpy(window.get(), before.get() + done, held - done);
      at += done;
      held -= done;
      done = 0;
      const size_t wanted = static_cast<size_t>(std::min<uint64_t>(room - held, total - at - held));
      const ssize_t more = ::pread(fd, window.get() + held, wanted, static_cast<off_t>(at + held));
      if (more < 0) fail("read", path);
      if (more == 0) break;  // it is shorter than it was
      held += static_cast<size_t>(more);
      continue;
    }
    if (held - done < sizeof(RecordHead)) break;
    const char* here = window.get() + done;
    const size_t size = intact(found.key_, here, held - done);
    if (size == 0) {
      done += 8;  // whatever comes next begins at a word
      damaged += 8;
      continue;
    }
    RecordHead record;
    std::memcpy(&record, here, sizeof record);
    const size_t body = size - sizeof record - record.padding;
    replay.damaged_bytes += damaged;
    damaged = 0;
    ++replay.records;
    reader.take(static_cast<Kind>(record.kind), {here + sizeof record, body}, at + done + sizeof record);
    done += size;
    end = at + done;
  }
  reader.end_window();
  replay.was_torn = end < total;
  if (replay.was_torn && ::ftruncate(fd, static_cast<off_t>(end)) != 0) fail("shorten", path);
  found.size_ = found.written_ = end;
  return found;
}

uint64_t Journal::append(Kind kind, std::string_view body) {
  if (body.size() > BODY_MAX) throw FileProblem("a record for " + path_ + " is too long", 0);
  const size_t padding = (8 - body.size() % 8) % 8;
  const size_t size = sizeof(RecordHead) + body.size() + padding;
  const size_t begin = buffer_.size();
  buffer_.resize(begin + size, '\0');
  char* record = buffer_.data() + begin;
  RecordHead head{0, static_cast<uint16_t>(size / 8), static_cast<uint8_t>(kind), static_cast<uint8_t>(padding)};
  std::memcpy(record, &head, sizeof head);
  if (!body.empty()) std::memcpy(record + sizeof head, body.data(), body.size());
  head.crc = checksum(key_, record, size);
  std::memcpy(record, &head, sizeof head);
  const uint64_t at = size_ + sizeof head;
  size_ += size;
  if (!buffered_ || buffer_.size() >= BUFFER_MAX) {
    try {
      flush();
    } catch (const FileProblem&) {
      size_ -= size;
      buffer_.resize(begin);
      throw;
    }
  }
  return at;
}

void Journal::flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t wrote =
        ::pwrite(fd_, buffer_.data() + done, buffer_.size() - done, static_cast<off_t>(written_ + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail("write to", path_);  // what was written of it is written again, in the same place
    done += static_cast<size_t>(wrote);
  }
  written_ += done;
  buffer_.clear();
}

void Journal::read(uint64_t at, void* into, size_t size) const {
  auto* to = static_cast<char*>(into);
  while (size) {
    if (at >= written_) {
      if (at - written_ + size > buffer_.size()) throw FileProblem(path_ + " is shorter than it was", 0);
      std::memcpy(to, buffer_.data() + (at - written_), size);
      return;
    }
    const size_t wanted = static_cast<size_t>(std::min<uint64_t>(size, written_ - at));
    const ssize_t got = ::pread(fd_, to, wanted, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_);
    if (got == 0) throw FileProblem(path_ + " is shorter than it was", 0);
    to += got;
    at += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

void Journal::sync() {
  flush();
  wait_durable();
}

void Journal::wait_durable() const {
  if (::fdatasync(fd_) != 0) fail("make durable", path_);
}

void Journal::rename_to(const std::string& path) {
  if (::rename(path_.c_str(), path.c_str()) != 0) fail("rename", path_);
  path_ = path;
}

}  // namespace stoker
