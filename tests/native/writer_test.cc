// `writer_test FOLDER`: what is written, from several threads, and what is told of it.
#include "../../src/stoker/_native/writer.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <string>
#include <thread>

#include "../../src/stoker/_native/hash.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr uint64_t SLOT = 4096;

std::string block_of(uint64_t number) { return std::string(number % SLOT + 1, static_cast<char>('a' + number % 26)); }

void take(Writer& writer, std::map<uint64_t, Writer::Done>& done) {
  pollfd wanted{writer.event_fd(), POLLIN, 0};
  CHECK(::poll(&wanted, 1, 30000) == 1);
  for (const Writer::Done& one : writer.take()) CHECK(done.emplace(one.number, one).second);
}

void all_is_written_and_told_once(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  std::vector<std::string> blocks;
  for (uint64_t number = 0; number < 2000; ++number) blocks.push_back(block_of(number));
  Writer writer;
  std::vector<std::thread> threads;
  for (uint64_t first = 0; first < 4; ++first)
    threads.emplace_back([&, first] {
      for (uint64_t number = first; number < blocks.size(); number += 4)
        writer.write({number, ::dup(fd), number * SLOT, blocks[number].data(), blocks[number].size()});
    });
  std::map<uint64_t, Writer::Done> done;
  while (done.size() < blocks.size()) take(writer, done);
  for (std::thread& thread : threads) thread.join();
  for (uint64_t number = 0; number < blocks.size(); ++number) {
    const std::string& block = blocks[number];
    CHECK(done.at(number).error == 0 && done.at(number).crc == crc32c(block.data(), block.size()));
    std::string found(block.size(), 0);
    CHECK(::pread(fd, found.data(), found.size(), static_cast<off_t>(number * SLOT)) == static_cast<ssize_t>(found.size()));
    CHECK(found == block);
  }
  CHECK(writer.take().empty());
  ::close(fd);
}

void what_fails_says_why() {
  Writer writer;
  std::map<uint64_t, Writer::Done> done;
  writer.write({7, ::open("/dev/full", O_WRONLY), 0, "abc", 3});
  writer.write({8, ::open("/dev/null", O_RDONLY), 0, "abc", 3});
  while (done.size() < 2) take(writer, done);
  CHECK(done.at(7).error == ENOSPC && done.at(8).error == EBADF);
}

void its_end_waits_for_all(const std::string& path) {
  const std::string block(1 << 20, 'x');
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  {
    Writer writer;
    for (uint64_t number = 0; number < 20; ++number)
      writer.write({number, ::dup(fd), number << 20, block.data(), block.size()});
  }
  CHECK(::lseek(fd, 0, SEEK_END) == 20 << 20);
  const int next = ::dup(fd);
  CHECK(next == fd + 1);  // all descriptors were closed
  ::close(next);
  ::close(fd);
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  all_is_written_and_told_once(folder + "/blocks");
  what_fails_says_why();
  its_end_waits_for_all(folder + "/end");
  std::puts("well");
}
