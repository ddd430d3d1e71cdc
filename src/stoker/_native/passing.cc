#include "passing.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "frames.h"

namespace stoker {

bool Wanted::has(uint32_t container, const std::string& instance) const {
  if (held.size() < instance.size() || held.compare(0, instance.size(), instance) != 0) return false;
  std::string wanted;
  append_number(wanted, container, 4);
  const char* first = held.data() + instance.size();
  size_t count = (held.size() - instance.size()) / 4;
  while (count) {
    const size_t half = count / 2;
    const int order = std::memcmp(first + half * 4, wanted.data(), 4);
    if (order == 0) return true;
    if (order < 0) {
      first += (half + 1) * 4;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return false;
}

Passing::~Passing() {
  for (const Entry& entry : entries_) ::close(entry.fd);
  open_->fetch_sub(static_cast<int64_t>(entries_.size()));
}

bool Passing::add(const Index& index, const Files& files, uint16_t bucket, uint32_t container) {
  if (entries_.size() == COUNT_MAX || open_->load() >= open_max_) return false;
  const std::optional<Container> known = index.container(container);
  if (!known || known->bucket != bucket) return false;
  const int fd = ::open(files.path(container).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  struct stat found {};
  bool is_good = ::fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
  // Who maps it may look at it when this server is long gone: the next one must not make holes in it either.
  if (is_good && known->is_large && !(found.st_mode & HANDED_OUT))
    is_good = ::fchmod(fd, (found.st_mode & 0777) | HANDED_OUT) == 0;
  if (!is_good) {
    ::close(fd);
    return false;
  }
  entries_.push_back({fd, container, found.st_dev, found.st_ino});
  open_->fetch_add(1);
  return true;
}

std::string Passing::frame(const std::string& instance) const {
  std::string frame;
  append_frame(frame, FRAME_DESCRIPTORS, instance.size() + entries_.size() * 20);
  frame += instance;
  for (const Entry& entry : entries_) {
    append_number(frame, entry.container, 4);
    append_number(frame, entry.device, 8);
    append_number(frame, entry.inode, 8);
  }
  return frame;
}

ssize_t Passing::send(int socket, const char* bytes, size_t size, int flags) const {
  iovec part{const_cast<char*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(COUNT_MAX * sizeof(int))];
  std::memset(control, 0, sizeof control);
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(entries_.size() * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(entries_.size() * sizeof(int));
  for (size_t i = 0; i < entries_.size(); ++i)
    std::memcpy(CMSG_DATA(header) + i * sizeof(int), &entries_[i].fd, sizeof(int));
  const ssize_t sent = ::sendmsg(socket, &message, flags);
  // Readers have too many that they do not take. This one sees that none came, and asks for the bytes.
  if (sent < 0 && errno == ETOOMANYREFS) return ::send(socket, bytes, size, flags);
  return sent;
}

}  // namespace stoker
