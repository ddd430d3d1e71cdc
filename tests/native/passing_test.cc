// Descriptors on their way: what a reader says it has, how many are open at once, and readers that take none.
//
//   passing_test FOLDER
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "../../src/stoker/_native/frames.h"
#include "../../src/stoker/_native/passing.h"
#include "check.h"
#include "descriptors.h"

using namespace stoker;

namespace {

constexpr uid_t NOBODY = 65534;
constexpr rlim_t OPEN_MAX_HERE = 64;
constexpr uint32_t LARGE = 301;

void what_a_reader_says_it_has() {
  const std::string instance = "instance";
  for (uint32_t count = 0; count < 20; ++count) {
    Wanted wanted;
    wanted.held = instance;
    for (uint32_t number = 0; number < count; ++number) append_number(wanted.held, number * 1000 + 300, 4);
    for (uint32_t number = 0; number < 20; ++number) {
      CHECK(wanted.has(number * 1000 + 300, instance) == (number < count));
      CHECK(!wanted.has(number * 1000 + 299, instance) && !wanted.has(number * 1000 + 301, instance));
      CHECK(!wanted.has(number * 1000 + 300, "Instance"));
    }
    wanted.held += "cut";
    CHECK(wanted.has(300, instance) == (count > 0));
  }
  for (const char* odd : {"", "inst", "instance", "instance\1"}) {
    Wanted wanted;
    wanted.held = odd;
    CHECK(!wanted.has(0, instance));
  }
}

struct Store {
  Index index;
  Files files{".", 2};
  uint16_t bucket;

  Store() : index("./passing.index", 65536), bucket(index.bucket("data", "")) {
    ::mkdir("000", 0755);
    for (uint32_t container = 1; container <= 300; ++container) {
      const std::string key = "key" + std::to_string(container);
      index.learn(bucket, key, "v", 3, false, 1000);
      CHECK(index.hold(bucket, key, "v", WHOLE, container, 0, 0, 1000));
      const int fd = ::open(files.path(container).c_str(), O_WRONLY | O_CREAT, 0644);
      CHECK(fd >= 0 && ::write(fd, "abc", 3) == 3);
      ::close(fd);
    }
    index.learn(bucket, "large", "v", 3, false, 1000);
    CHECK(index.hold(bucket, "large", "v", 0, LARGE, 0, 0, 1000));
    ::close(::open(files.path(LARGE).c_str(), O_WRONLY | O_CREAT, 0600));
  }
};

void only_files_of_large_objects_are_marked(const Store& store) {
  const auto mode_of = [&](uint32_t container) {
    struct stat found {};
    CHECK(::stat(store.files.path(container).c_str(), &found) == 0);
    return found.st_mode & 07777;
  };
  CHECK(mode_of(LARGE) == 0600 && mode_of(1) == 0644);
  for (int i = 0; i < 2; ++i) {
    Passing passing(std::make_shared<Counter>(0), 10);
    CHECK(passing.add(store.index, store.files, store.bucket, LARGE));
    CHECK(passing.add(store.index, store.files, store.bucket, 1));
    CHECK(mode_of(LARGE) == (0600 | Passing::HANDED_OUT) && mode_of(1) == 0644);
  }
}

void no_more_than_may_be_open(const Store& store) {
  const auto open = std::make_shared<Counter>(0);
  {
    Passing first(open, 10), second(open, 10), all(std::make_shared<Counter>(0), 1000);
    for (uint32_t container = 1; container <= 7; ++container)
      CHECK(first.add(store.index, store.files, store.bucket, container));
    for (uint32_t container = 1; container <= 7; ++container)
      CHECK(second.add(store.index, store.files, store.bucket, container) == (container <= 3));
    CHECK(open->load() == 10);
    for (uint32_t container = 1; container <= 300; ++container)
      CHECK(all.add(store.index, store.files, store.bucket, container) == (container <= Passing::COUNT_MAX));
    const auto other = static_cast<uint16_t>(store.bucket + 1);
    Passing none(std::make_shared<Counter>(0), 10);
    CHECK(!none.add(store.index, store.files, other, 1) && !none.add(store.index, store.files, store.bucket, 999));
  }
  CHECK(open->load() == 0);
}

size_t arrived(int socket, std::string& bytes) {
  char part[100];
  std::vector<int> descriptors;
  const ssize_t got = receive(socket, part, sizeof part, MSG_DONTWAIT, descriptors);
  if (got <= 0) return 0;
  bytes.append(part, static_cast<size_t>(got));
  for (const int descriptor : descriptors) ::close(descriptor);
  return descriptors.size();
}

// The kernel lets a user have no more on their way than a process may have open. The bytes go out nevertheless.
void readers_that_take_none(const Store& store) {
  if (::geteuid() == 0) CHECK(::setuid(NOBODY) == 0);
  const rlimit limit{OPEN_MAX_HERE, OPEN_MAX_HERE};
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const auto open = std::make_shared<Counter>(0);
  std::string sent, got;
  for (int i = 0; i < 30; ++i) {
    Passing passing(open, 100);
    for (uint32_t container = 1; container <= 5; ++container)
      CHECK(passing.add(store.index, store.files, store.bucket, container));
    const std::string text = "message " + std::to_string(i) + ";";
    CHECK(passing.send(ends[0], text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
    sent += text;
  }
  size_t count = 0;
  while (got.size() < sent.size()) {
    const size_t before = got.size();
    count += arrived(ends[1], got);
    CHECK(got.size() > before);
  }
  CHECK(got == sent);
  CHECK(count >= OPEN_MAX_HERE / 2 && count < 150 && count % 5 == 0);
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = std::string(argv[1]) + "/passing";  // which nobody may enter as well
  CHECK(::mkdir(folder.c_str(), 0755) == 0 && ::chdir(folder.c_str()) == 0);
  what_a_reader_says_it_has();
  const Store store;
  no_more_than_may_be_open(store);
  only_files_of_large_objects_are_marked(store);
  readers_that_take_none(store);
  std::puts("well");
  std::fflush(stdout);
  ::_exit(0);  // the sanitizer's look for leaks needs more descriptors, and rights, than are left
}
