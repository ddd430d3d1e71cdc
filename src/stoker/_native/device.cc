#include "device.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

namespace stoker {

namespace {

#ifndef FOPEN_NOFLUSH
#define FOPEN_NOFLUSH (1 << 5)  // headers before Linux 5.16 do not have it
#endif
constexpr uint64_t IS_SENT_AGAIN = uint64_t{1} << 63;  // in a request's number: headers before 6.9 do not have it
constexpr uint32_t KEPT = FOPEN_KEEP_CACHE | FOPEN_NOFLUSH;
constexpr uint32_t CHANGES = O_ACCMODE | O_TRUNC;

// What a body begins with, as the protocol has it; false: it is shorter.
template <typename Body>
bool taken(std::string_view body, Body& into) {
  if (body.size() < sizeof into) return false;
  std::memcpy(&into, body.data(), sizeof into);
  return true;
}

class Answer {
 public:
  explicit Answer(uint64_t unique) : head_{sizeof head_, 0, unique} {}

  void refuse(int reason) { head_.error = -reason; }

  void open() {
    head_.len += sizeof opened_;
    opened_.open_flags = KEPT;
  }

  // False: it is not taken, and not for the reason that nobody waits any more.
  bool send(int device) {
    iovec parts[] = {{&head_, sizeof head_}, {&opened_, head_.len - sizeof head_}};
    return ::writev(device, parts, parts[1].iov_len ? 2 : 1) >= 0 || errno == ENOENT;
  }

 private:
  fuse_out_header head_;
  fuse_open_out opened_{};
};

// Whether it is known without a decision what is to be answered.
bool answers(const fuse_in_header& head, std::string_view body, const std::string& attributes, const PlainFiles& plain,
             Answer& answer) {
  switch (head.opcode) {
    case FUSE_IOCTL:
      answer.refuse(ENOTTY);
      return true;
    case FUSE_GETXATTR: {
      if (attributes.empty() || body.size() < sizeof(fuse_getxattr_in)) return false;
      answer.refuse(ENODATA);
      return body.compare(sizeof(fuse_getxattr_in), attributes.size(), attributes) != 0;
    }
    case FUSE_OPEN: {
      fuse_open_in asked;
      answer.open();
      // What a daemon before has opened under a number of its own goes on under that.
      if (head.unique & IS_SENT_AGAIN) return false;
      return taken(body, asked) && !(asked.flags & CHANGES) && plain.has(head.nodeid);
    }
    case FUSE_RELEASE: {
      fuse_release_in asked;
      return taken(body, asked) && asked.fh == 0;
    }
    default:
      return false;
  }
}

}  // namespace

void PlainFiles::add(uint64_t node) {
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_.insert(node);
}

void PlainFiles::discard(uint64_t node) {
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_.erase(node);
}

bool PlainFiles::has(uint64_t node) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return nodes_.count(node) != 0;
}

ssize_t next_request(int device, char* buffer, size_t size, const std::string& attributes, const PlainFiles& plain) {
  for (;;) {
    const ssize_t got = ::read(device, buffer, size);
    fuse_in_header head;
    if (got < static_cast<ssize_t>(sizeof head)) return got;
    std::memcpy(&head, buffer, sizeof head);
    const std::string_view body(buffer + sizeof head, static_cast<size_t>(got) - sizeof head);
    Answer answer(head.unique);
    // Whoever is handed one whose answer is not taken is told why by the next.
    if (!answers(head, body, attributes, plain, answer) || !answer.send(device)) return got;
  }
}

}  // namespace stoker
