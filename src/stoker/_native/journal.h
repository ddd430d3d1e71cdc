// An append-only file of checksummed records, which survives crashes, torn writes and flipped bits.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "hash.h"

namespace stoker {

// The file cannot be written, read or understood; what() says which and why.
struct FileProblem : std::runtime_error {
  FileProblem(const std::string& what, int number) : std::runtime_error(what), number(number) {}
  int number;  // errno; 0: the file is not what it should be
};

enum class Kind : uint8_t { layout = 1, bucket, object, held, checked, gone, lost, container_gone, container_max };

// What a replay met.
struct Replay {
  uint64_t records = 0;
  uint64_t damaged_bytes = 0;  // skipped, because no checksum fitted
  bool was_torn = false;       // the end was cut off: the last server was killed while it wrote, or its host was
};

// Who gets the intact records of a file, in their order.
class JournalReader {
 public:
  virtual ~JournalReader() = default;
  // `body` is at `at` in the file, and stays where it is in memory until the next `end_window` but one has returned, or
  // `let_go`.
  virtual void take(Kind kind, std::string_view body, uint64_t at) = 0;
  // Some MiB were taken.
  virtual void end_window() = 0;
  // Look at no body any more once this has returned.
  virtual void let_go() noexcept = 0;
};

// Records are a head of 8 bytes (checksum, size in words of 8 bytes, kind, padding) and a body, padded to words.
class Journal {
 public:
  static constexpr size_t BODY_MAX = 64 * 1024;

  // A new file, which replaces nothing until `rename_to`.
  static Journal create(const std::string& path, const HashKey& key);
  // An existing one. Throws FileProblem.
  static Journal open(const std::string& path, Replay& replay, JournalReader& reader);

  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&& other) noexcept;
  ~Journal();

  // Returns where the body is. Throws FileProblem, and then nothing was appended.
  uint64_t append(Kind kind, std::string_view body);
  // Bytes of a body that was appended. Throws FileProblem.
  void read(uint64_t at, void* into, size_t size) const;
  void flush();
  void sync();
  // Makes durable what was flushed before; may run beside `append`.
  void wait_durable() const;
  void rename_to(const std::string& path);

  const HashKey& key() const { return key_; }
  uint64_t size_bytes() const { return size_; }
  const std::string& path() const { return path_; }
  // Appended records stay in memory until `flush`, or until there are many.
  void set_buffered(bool buffered) { buffered_ = buffered; }

 private:
  Journal(std::string path, int fd, const HashKey& key, uint64_t size);

  std::string path_;
  int fd_ = -1;
  HashKey key_;
  uint64_t size_ = 0;     // with what is buffered
  uint64_t written_ = 0;  // without
  std::string buffer_;
  bool buffered_ = false;
};

}  // namespace stoker
