#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstring>
#include <vector>

#include "../../src/stoker/_native/passing.h"
#include "check.h"

// As recvmsg: what has come, and the descriptors with it, which are the caller's.
inline ssize_t receive(int socket, char* part, size_t size, int flags, std::vector<int>& descriptors) {
  iovec into{part, size};
  alignas(cmsghdr) char control[CMSG_SPACE(stoker::Passing::COUNT_MAX * sizeof(int))];
  msghdr message{};
  message.msg_iov = &into;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); got >= 0 && header; header = CMSG_NXTHDR(&message, header)) {
    CHECK(header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS);
    for (size_t at = 0; at < header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(header) + at, sizeof descriptor);
      descriptors.push_back(descriptor);
    }
  }
  return got;
}
