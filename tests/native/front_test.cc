// The front between many clients and a back that takes its time: every byte of every answer is right, whoever leaves.
//
//   front_test FOLDER SEED SECONDS
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../src/stoker/_native/front.h"
#include "check.h"
#include "descriptors.h"

using namespace stoker;

namespace {

constexpr uint32_t BLOCK = 64 * 1024;
constexpr uint32_t NOW = 1000;

std::string content(const std::string& key, size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(key.size() * 31 + i * 7 + i / 251);
  return bytes;
}

struct Stored {
  const char* key;
  size_t size;
  bool is_large;
};
// The last block of `part` is not held, and of `absent` nothing is.
const Stored OBJECTS[] = {{"empty", 0, false},       {"one", 1, false},        {"small", 900, false}, {"2k", 2048, false},
                          {"packed", 50000, false}, {"large", 300000, true}, {"part", 200000, true}};

struct Store {
  std::shared_ptr<Index> index;
  std::shared_ptr<Files> files;
  uint16_t bucket;

  explicit Store(const std::string& folder) {
    ::mkdir((folder + "/000").c_str(), 0700);
    index = std::make_shared<Index>(folder + "/front.index", BLOCK);
    files = std::make_shared<Files>(folder, 2);
    bucket = index->bucket("data", "");
    uint32_t container = 1;
    std::string segment = "this is of another";
    for (const Stored& object : OBJECTS) {
      index->learn(bucket, object.key, std::string("v-") + object.key, object.size, false, NOW);
      const std::string bytes = content(object.key, object.size);
      if (!object.is_large) {
        if (object.size)
          CHECK(index->hold(bucket, object.key, std::string("v-") + object.key, WHOLE, 1,
                            static_cast<uint32_t>(segment.size()), 0, NOW));
        segment += bytes;
        continue;
      }
      write(++container, bytes);
      for (uint32_t block = 0; block * size_t{BLOCK} < object.size; ++block) {
        const bool is_last = (block + 1) * size_t{BLOCK} >= object.size;
        if (!is_last || std::strcmp(object.key, "part") != 0)
          CHECK(index->hold(bucket, object.key, std::string("v-") + object.key, block, container, 0, 0, NOW));
      }
    }
    write(1, segment);
  }

  void write(uint32_t container, const std::string& bytes) const {
    const int fd = ::open(files->path(container).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    ::close(fd);
  }
};

int listening(uint16_t& port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(fd, 128) == 0);
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  port = ntohs(address.sin_port);
  return fd;
}

const char UNIX_PATH[] = "front.sock";

int listening_near() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, UNIX_PATH);
  ::unlink(UNIX_PATH);
  CHECK(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(fd, 128) == 0);
  return fd;
}

std::string number_of(uint64_t number, int bytes) {
  std::string text;
  for (int shift = (bytes - 1) * 8; shift >= 0; shift -= 8) text.push_back(static_cast<char>(number >> shift));
  return text;
}

std::string back_answer(const std::string& method, const std::string& target, const std::string& body) {
  const std::string said = "back: " + method + " " + target + " " + std::to_string(body.size());
  return "HTTP/1.1 404 Not Found\r\nContent-Length: " + std::to_string(said.size()) + "\r\n\r\n" + said;
}

const std::string PASS_HEAD = "HTTP/1.1 200 OK\r\nContent-Length: 88\r\n\r\n";

// Blocks that come in while they are sent: each to whoever asks for it until the next is begun.
class Coming {
 public:
  explicit Coming(Store& store) : store_(store) {}

  std::shared_ptr<Inflow> newest() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!newest_ || newest_->filled() > 200000) unfinished_.push_back(newest_ = std::make_shared<Inflow>(300000));
    return newest_;
  }

  void fill(std::atomic<bool>& done, uint64_t seed) {
    const std::string bytes = content("large", 300000);
    std::mt19937_64 chance(seed);
    while (!done) {
      std::vector<std::shared_ptr<Inflow>> filling;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        filling = unfinished_;
      }
      for (const auto& inflow : filling) {
        const uint64_t at = inflow->filled();
        CHECK(!inflow->take(bytes.data(), 300001 - at));
        CHECK(inflow->take(bytes.data() + at, std::min<uint64_t>(300000 - at, chance() % 60000)));
        if (inflow->filled() < 300000) continue;
        int number = 0;
        if (chance() % 4) inflow->keep(store_.files->open(2, number), 0);
        const std::lock_guard<std::mutex> lock(mutex_);
        unfinished_.erase(std::find(unfinished_.begin(), unfinished_.end(), inflow));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(chance() % 3000));
    }
  }

 private:
  Store& store_;
  std::mutex mutex_;
  std::shared_ptr<Inflow> newest_;
  std::vector<std::shared_ptr<Inflow>> unfinished_;
};

const char* const KEYS[] = {"empty", "one", "small", "2k", "packed", "large", "part"};

std::string range_of(uint64_t key, uint64_t start, uint64_t stop) {
  return number_of(key, 4) + number_of(start, 8) + number_of(stop, 8);
}

// What the back has to say, or to fetch.
void refuse_ranges(Front& front, const BucketRule& rule) {
  const uint64_t connection = 0;  // nothing is said
  const std::vector<std::string> keys{"one", "part", "large"};
  const std::string good = range_of(0, 0, 1);
  for (const std::string& bad : {range_of(3, 0, 1), range_of(0, 1, 0), range_of(1, 0, 200000), range_of(1, 196607, 196609),
                                 range_of(UINT32_MAX, 0, 0), range_of(2, UINT64_MAX, 0)})
    CHECK(!front.answer_batch(connection, Reads{keys, good + bad}, rule, {}).is_answered);
  CHECK(!front.answer_batch(connection, Reads{keys, good, {"v-one", "", "v-other"}}, rule, {}).is_answered);
  CHECK(!front.answer_batch(connection, Reads{keys, good, {"v-on"}}, rule, {}).is_answered);
  std::string many;
  for (int i = 0; i < 5000; ++i) many += range_of(2, 0, 9000);
  CHECK(!front.answer_batch(connection, Reads{keys, many}, rule, {}).is_answered);
  many.clear();
  for (int i = 0; i < 60000; ++i) many += range_of(2, 0, UINT64_MAX);
  const Wanted all{1, 0, front.instance() + number_of(2, 4)};
  CHECK(!front.answer_batch(connection, Reads{keys, many}, rule, all).is_answered);  // too many blocks to look at
}

// Answers what the front hands over, some of it in pieces and late.
void be_the_back(Front& front, Store& store, Coming& coming, std::atomic<bool>& done, uint64_t seed) {
  std::mt19937_64 chance(seed);
  std::map<uint64_t, Asked> bodies;  // that are still coming in
  while (!done) {
    pollfd waits{front.event_fd(), POLLIN, 0};
    ::poll(&waits, 1, 20);
    for (Event& event : front.take(16)) {
      if (event.kind == Event::Kind::gone) bodies.erase(event.connection);
      if (event.kind == Event::Kind::asked && event.asked.body_bytes != 0) {
        bodies[event.connection] = std::move(event.asked);
        front.more(event.connection, 1 + chance() % 5000);
        continue;
      }
      if (event.kind == Event::Kind::body) {
        const auto coming_in = bodies.find(event.connection);
        if (coming_in == bodies.end()) continue;
        coming_in->second.body += event.bytes;
        if (!event.is_last) {
          front.more(event.connection, 1 + chance() % 5000);
          continue;
        }
        event.asked = std::move(coming_in->second);
        bodies.erase(coming_in);
      } else if (event.kind != Event::Kind::asked) {
        continue;
      }
      const Asked& asked = event.asked;
      CHECK(asked.principal == 3);
      if (chance() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 2000));
      if (asked.target == "/data/drop") {
        front.drop(event.connection);
      } else if (asked.target == "/-/batch") {
        const BucketRule rule{store.bucket, 100, NOW};
        CHECK(!front.answer_batch(event.connection, Reads{{"one", "part"}}, rule, {}).is_answered);
        CHECK(!front.answer_batch(event.connection, Reads{{"one"}}, {store.bucket, 0, 0}, {}).is_answered);
        const BucketRule later{store.bucket, 100, NOW + 1};
        CHECK(!front.answer_batch(event.connection, Reads{{"one"}}, later, {}).is_answered);
        CHECK(asked.body.empty() || asked.is_near);
        Wanted wanted;
        if (!asked.body.empty()) wanted.from_bytes = 1000;
        if (asked.body == "pass") wanted.count_max = 1;
        if (asked.body == "held") wanted.held = front.instance() + number_of(1, 4) + number_of(7, 4);
        if (asked.body == "held of another") wanted.held = std::string(8, 'x') + number_of(1, 4);
        const Reads reads{{"small", "empty", "packed", "one", "2k"}};
        const Batch batch = front.answer_batch(event.connection, reads, rule, wanted);
        const bool by_place = asked.body == "pass" || asked.body == "held";
        CHECK(batch.is_answered && batch.size_bytes == 52949 && batch.places == (by_place ? 2 : 0) && batch.large.empty());
      } else if (asked.target == "/-/ranges") {
        // What the request is about is its body: whether places are wanted, a version for each key, and ranges.
        Wanted wanted;
        if (asked.body[0] == 'p') wanted = {1000, 0, front.instance() + number_of(1, 4) + number_of(2, 4) + number_of(3, 4)};
        std::vector<std::string> versions;
        for (const char* key : KEYS) versions.push_back(chance() % 2 ? std::string("v-") + key : "");
        const Reads reads{{std::begin(KEYS), std::end(KEYS)}, asked.body.substr(1), chance() % 2 ? versions : std::vector<std::string>{}};
        const Batch batch = front.answer_batch(event.connection, reads, {store.bucket, 100, NOW}, wanted);
        CHECK(batch.is_answered && batch.large.size() <= 2 && (batch.large.empty() || batch.places > 0));
      } else if (asked.target == "/-/pass") {
        front.say(event.connection, PASS_HEAD, false);
        for (const uint32_t container : {2, 1})
          CHECK(front.pass(event.connection, store.bucket, container, "before", "after"));
        const auto other = static_cast<uint16_t>(store.bucket + 1);
        CHECK(!front.pass(event.connection, other, 1, "", "") && !front.pass(event.connection, store.bucket, 99, "", ""));
        front.finish(event.connection);
      } else if (asked.target == "/data/coming") {
        front.say(event.connection, "HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n", false);
        const uint64_t half = chance() % 300000;
        front.send_inflow(event.connection, coming.newest(), 0, half);
        front.send_inflow(event.connection, coming.newest(), half, 300000 - half);
        front.finish(event.connection);
      } else if (asked.target == "/data/from-file") {
        int number = 0;
        front.say(event.connection, "HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n", false);
        for (uint64_t at = 0; at < 300000; at += 100000) {
          front.send_file(event.connection, store.files->open(2, number), at, 100000);
          if (at == 100000) front.notify(event.connection, 0);
        }
        front.finish(event.connection);
      } else {
        const std::string answer = back_answer(asked.method, asked.target, asked.body);
        const size_t half = chance() % answer.size();
        front.say(event.connection, answer.substr(0, half), false);
        front.say(event.connection, answer.substr(half), true);
        front.finish(event.connection);
      }
    }
  }
}

struct Passed {
  uint32_t container;
  size_t until;  // it has come, of the answer's bytes
};

struct Request {
  std::string text;
  std::string answer;  // what has to come back, to the byte
  std::vector<Passed> passed{};
};

std::string etag_headers(const std::string& key) {
  return "ETag: \"v-" + key + "\"\r\nAccept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\n";
}

// A frame of a batch: the object, or its place.
std::string framed(const std::string& key, bool by_place) {
  uint64_t offset = 18;  // in the segment, behind what is of another
  for (const Stored& object : OBJECTS) {
    if (key == object.key) {
      if (!by_place) return "\x01" + number_of(object.size, 4) + content(key, object.size);
      return "\x06" + number_of(16, 4) + number_of(object.size, 4) + number_of(1, 4) + number_of(offset, 8);
    }
    if (!object.is_large) offset += object.size;
  }
  return "";
}

std::string descriptor_frame(const std::string& instance, uint32_t container) {
  struct stat found {};
  CHECK(::stat(("000/0000000" + std::to_string(container)).c_str(), &found) == 0);
  return "\x05" + number_of(28, 4) + instance + number_of(container, 4) + number_of(found.st_dev, 8) +
         number_of(found.st_ino, 8);
}

Request batch_request(const std::string& asked, const std::string& instance) {
  const bool by_place = asked == "pass" || asked == "held";
  const std::string first = asked == "pass" ? descriptor_frame(instance, 1) : "";
  const std::string body = first + framed("small", false) + framed("empty", false) + framed("packed", by_place) +
                           framed("one", false) + framed("2k", by_place);
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: " +
                           std::to_string(body.size()) + "\r\n\r\n";
  Request request{"POST /-/batch HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret-token\r\nContent-Length: " +
                      std::to_string(asked.size()) + "\r\n\r\n" + asked,
                  head + body, {}};
  if (asked == "pass") request.passed.push_back({1, head.size() + first.size()});
  return request;
}

// Ranges of all that is held; some end behind the object.
Request range_request(std::mt19937_64& chance, bool by_place) {
  std::string asked(1, by_place ? 'p' : 'b'), body;
  for (auto count = chance() % 30; count; --count) {
    const uint64_t key = chance() % std::size(KEYS);
    uint64_t held = 0, offset = 18;  // see `framed`
    for (const Stored& object : OBJECTS) {
      if (std::strcmp(object.key, KEYS[key]) == 0) {
        held = std::strcmp(object.key, "part") == 0 ? 3 * BLOCK : object.size;
        if (object.is_large) offset = 0;
        break;
      }
      if (!object.is_large) offset += object.size;
    }
    const bool is_whole = key != 6;
    const uint64_t start = chance() % (held + 1 + (is_whole ? 100 : 0));
    uint64_t stop = start + (chance() % 2 ? chance() % 3000 : chance() % 300000);
    if (is_whole && chance() % 8 == 0) stop = UINT64_MAX;
    if (!is_whole) stop = std::min(stop, held);
    asked += range_of(key, start, stop);
    const uint64_t from = std::min(start, held), size = std::min(stop, held) - from;
    if (by_place && size >= 1000)
      body += "\x06" + number_of(16, 4) + number_of(size, 4) + number_of(key < 5 ? 1 : key - 3, 4) + number_of(offset + from, 8);
    else
      body += "\x01" + number_of(size, 4) + content(KEYS[key], held).substr(from, size);
  }
  return {"POST /-/ranges HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret-token\r\nContent-Length: " +
              std::to_string(asked.size()) + "\r\n\r\n" + asked,
          "HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: " + std::to_string(body.size()) +
              "\r\n\r\n" + body,
          {}};
}

Request pass_request(const std::string& instance) {
  Request request{"GET /-/pass HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret-token\r\n\r\n", PASS_HEAD, {}};
  for (const uint32_t container : {2, 1}) {
    request.answer += "before" + descriptor_frame(instance, container);
    request.passed.push_back({container, request.answer.size()});
    request.answer += "after";
  }
  return request;
}

Request near_request(std::mt19937_64& chance, const std::string& instance) {
  const char* asked[] = {"pass", "pass", "held", "held of another", "none", ""};
  const size_t number = chance() % (std::size(asked) + 4);
  if (number >= std::size(asked) + 2) return range_request(chance, true);
  return number < std::size(asked) ? batch_request(asked[number], instance) : pass_request(instance);
}

Request any_request(std::mt19937_64& chance) {
  const std::string token = "Host: h\r\nAuthorization: Bearer secret-token\r\n";
  const Stored& object = OBJECTS[chance() % std::size(OBJECTS)];
  const std::string key = object.key, bytes = content(key, object.size);
  switch (chance() % 13) {
    case 11: case 12: return range_request(chance, false);
    case 8: case 9: return batch_request("", "");
    case 10:
      return {"GET /data/coming HTTP/1.1\r\n" + token + "\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + content("large", 300000)};
    case 0: {
      const std::string body(chance() % 3 ? chance() % 100 : chance() % 100000, 'b');
      if (chance() % 2)
        return {"POST /-/read HTTP/1.1\r\n" + token + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body,
                back_answer("POST", "/-/read", body)};
      char size[32];
      std::snprintf(size, sizeof size, "%zx\r\n", body.size());
      const std::string chunk = body.empty() ? "" : size + body + "\r\n";
      return {"PUT /x HTTP/1.1\r\n" + token + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0\r\n\r\n",
              back_answer("PUT", "/x", body)};
    }
    case 1:
      return {"GET /data/from-file HTTP/1.1\r\n" + token + "\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + content("large", 300000)};
    case 2:
      return {"GET /data/none HTTP/1.1\r\n" + token + "\r\n", back_answer("GET", "/data/none", "")};
    case 3:
      return {"HEAD /data/" + key + " HTTP/1.1\r\n" + token + "\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(object.size) + "\r\n" + etag_headers(key) + "\r\n"};
    case 4: case 5:
      if (object.size > 1) {
        const uint64_t start = chance() % object.size, stop = start + 1 + chance() % (object.size - start);
        const std::string text = "GET /data/" + key + " HTTP/1.1\r\n" + token + "Range: bytes=" + std::to_string(start) +
                                 "-" + std::to_string(stop - 1) + "\r\n\r\n";
        if (key == "part" && (stop - 1) / BLOCK == 3) return {text, back_answer("GET", "/data/part", "")};
        return {text, "HTTP/1.1 206 Partial Content\r\nContent-Length: " + std::to_string(stop - start) + "\r\n" +
                          etag_headers(key) + "Content-Range: bytes " + std::to_string(start) + "-" +
                          std::to_string(stop - 1) + "/" + std::to_string(object.size) + "\r\n\r\n" +
                          bytes.substr(start, stop - start)};
      }
      [[fallthrough]];
    default:
      if (key == "part") return {"GET /data/part HTTP/1.1\r\n" + token + "\r\n", back_answer("GET", "/data/part", "")};
      return {"GET /data/" + key + " HTTP/1.1\r\n" + token + "\r\n",
              "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(object.size) + "\r\n" + etag_headers(key) + "\r\n" +
                  bytes};
  }
}

int connected(uint16_t port, bool is_near) {
  if (is_near) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, UNIX_PATH);
    CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return fd;
  }
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

struct Arrived {
  int fd;
  size_t before;  // so many bytes had come then
};

// Sends while it reads, so that neither side can fill the other's buffers.
std::string exchange(int fd, const std::string& text, size_t wanted, std::mt19937_64& chance,
                     std::vector<Arrived>& arrived) {
  std::string got;
  size_t sent = 0;
  char part[40000];
  while (got.size() < wanted) {
    pollfd waits{fd, static_cast<short>(POLLIN | (sent < text.size() ? POLLOUT : 0)), 0};
    CHECK(::poll(&waits, 1, 30000) == 1);
    if (waits.revents & POLLOUT) {
      const size_t size = std::min(text.size() - sent, size_t{1} + chance() % (chance() % 4 ? 30 : 30000));
      const ssize_t done = ::send(fd, text.data() + sent, size, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (done > 0) sent += static_cast<size_t>(done);
    }
    if (waits.revents & (POLLIN | POLLHUP)) {
      std::vector<int> descriptors;
      const ssize_t more = receive(fd, part, 1 + chance() % sizeof part, 0, descriptors);
      for (const int number : descriptors) arrived.push_back({number, got.size()});
      if (more <= 0) break;
      got.append(part, static_cast<size_t>(more));
    }
  }
  return got;
}

// They are the files that were promised, no later than promised, and for reading; nobody else uses their offset.
void look_at(const std::vector<Arrived>& arrived, const std::vector<Passed>& promised) {
  CHECK(arrived.size() == promised.size());
  for (size_t i = 0; i < arrived.size(); ++i) {
    const auto [fd, before] = arrived[i];
    CHECK(before < promised[i].until);
    CHECK((::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY && ::lseek(fd, 0, SEEK_CUR) == 0);
    const std::string wanted = promised[i].container == 1 ? "this is of another" : content("large", 300000);
    std::string got(wanted.size(), '\0');
    CHECK(::read(fd, got.data(), got.size()) == static_cast<ssize_t>(got.size()) && got == wanted);
  }
}

void close_all(std::vector<Arrived>& arrived) {
  for (const Arrived& one : arrived) ::close(one.fd);
  arrived.clear();
}

void be_a_client(uint16_t port, const std::string& instance, std::atomic<bool>& done, uint64_t seed) {
  std::mt19937_64 chance(seed);
  std::vector<Arrived> arrived;
  while (!done) {
    const bool is_near = chance() % 2;
    const int fd = connected(port, is_near);
    for (int round = 0; round < 4; ++round) {
      std::string text, answers;
      std::vector<Passed> promised;
      for (auto count = 1 + chance() % 12; count; --count) {
        const Request request = is_near && chance() % 2 ? near_request(chance, instance) : any_request(chance);
        for (const Passed& one : request.passed) promised.push_back({one.container, answers.size() + one.until});
        text += request.text;
        answers += request.answer;
      }
      if (chance() % 16 == 0) {  // it leaves in the midst of it
        (void)!::send(fd, text.data(), chance() % text.size(), MSG_NOSIGNAL);
        break;
      }
      if (chance() % 16 == 0) {
        text += "GET /data/drop HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret-token\r\n\r\n";
        const std::string got = exchange(fd, text, answers.size() + 1, chance, arrived);
        CHECK(answers.compare(0, got.size(), got) == 0 && "what came before it was dropped is right");
        break;
      }
      if (chance() % 16 == 0) {
        const std::string got = exchange(fd, text + "nonsense\r\n\r\n", answers.size() + 12, chance, arrived);
        CHECK(got.compare(0, answers.size(), answers) == 0 && got.compare(answers.size(), 12, "HTTP/1.1 400") == 0);
        break;
      }
      CHECK(exchange(fd, text, answers.size(), chance, arrived) == answers);
      look_at(arrived, promised);
      close_all(arrived);
    }
    close_all(arrived);
    ::close(fd);
  }
}

auto open_count() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  std::filesystem::current_path(folder);
  const auto open_before = open_count();
  const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
  Store store(".");
  FrontSettings settings;
  settings.threads = 2;
  const auto held = std::make_shared<Front>(store.index, store.files, settings);
  Front& front = *held;
  uint16_t port = 0;
  front.listen(listening(port));
  front.listen(listening_near());
  auto rules = std::make_shared<Rules>();
  rules->add({3, "secret-token", "", {{"*", {""}}}, front.tenant("all", 0)});
  rules->buckets["data"] = {store.bucket, 100.0, NOW};
  front.set_rules(rules);
  front.set_now(NOW);
  front.start();
  refuse_ranges(front, {store.bucket, 100, NOW});
  std::atomic<bool> done{false}, back_done{false};
  Coming coming(store);
  std::thread back([&] { be_the_back(front, store, coming, back_done, seed); });
  std::thread filling([&] { coming.fill(back_done, seed + 1); });
  std::vector<std::thread> clients;
  for (uint64_t i = 0; i < 4; ++i) clients.emplace_back([&, i] { be_a_client(port, front.instance(), done, seed * 100 + i); });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[3]));
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    front.set_rules(std::make_shared<Rules>(*rules));
    front.figures();
    front.take_hits();
  }
  done = true;
  for (std::thread& client : clients) client.join();
  front.drain();
  for (int i = 0; i < 500 && front.figures().connections; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(front.figures().connections == 0);
  CHECK(front.figures().requests > 100);
  back_done = true;
  back.join();
  filling.join();
  front.stop();
  // Its own two, those of its two loops, those that `files` keeps, and the index.
  CHECK(open_count() <= open_before + 1 + 4 + 2 + 2);
  std::puts("well");
}
