// A front that asks another one for what it does not hold, while the fleet changes, and the other one stops and comes again.
//
//   peers_test FOLDER ROUNDS SECONDS
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../src/stoker/_native/front.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr uint32_t NOW = 1000;
constexpr int OBJECTS = 50;
constexpr int CLIENTS = 6;
const std::string MARK = "mark";
const std::string HEAD = " HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret-token\r\n\r\n";

uint64_t size_of(int number) { return 1 + static_cast<uint64_t>(number) * 1500; }

std::string key_of(int number) { return "key-" + std::to_string(number); }

std::string content(int number) {
  std::string bytes(size_of(number), '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + static_cast<size_t>(number));
  return bytes;
}

struct Server {
  std::shared_ptr<Index> index;
  std::shared_ptr<Files> files;
  std::shared_ptr<Front> front;
  uint16_t bucket = 0, port = 0;
  std::atomic<bool> stops{false};
  std::thread back;

  Server(const std::string& folder, bool holds) {
    ::mkdir(folder.c_str(), 0755);
    ::mkdir((folder + "/000").c_str(), 0755);
    ::unlink((folder + "/index").c_str());
    index = std::make_shared<Index>(folder + "/index", 1 << 20);
    files = std::make_shared<Files>(folder, 100);
    bucket = index->bucket("data", "");
    std::string segment;
    for (int number = 0; number < OBJECTS; ++number) {
      index->learn(bucket, key_of(number), "v", size_of(number), false, NOW);
      if (holds) CHECK(index->hold(bucket, key_of(number), "v", WHOLE, 1, static_cast<uint32_t>(segment.size()), 0, NOW));
      segment += content(number);
    }
    const int fd = ::open(files->path(1).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(::write(fd, segment.data(), segment.size()) == static_cast<ssize_t>(segment.size()));
    ::close(fd);
    FrontSettings settings;
    settings.threads = 2;
    settings.handing_bytes_max = 256 * 1024;
    front = std::make_shared<Front>(index, files, settings);
    auto rules = std::make_shared<Rules>();
    rules->add(Token{0, "secret-token", "", {{"*", {""}}}, nullptr});
    rules->buckets["data"] = {bucket, 100, 0};
    front->set_rules(rules);
    front->set_now(NOW);
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(listener, 100) == 0);
    socklen_t size = sizeof address;
    ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
    front->listen(listener);
    front->start();
    back = std::thread([this] { answer(); });
  }

  ~Server() {
    stops = true;
    back.join();
    front->stop();
  }

  void answer() {
    while (!stops) {
      for (Event& event : front->take(100))
        if (event.kind == Event::Kind::asked)
          front->say(event.connection, "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nback", false, true);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
};

void tell(Front& front, uint16_t port) {
  const std::string table(2, '\0');
  front.set_fleet(std::make_shared<Fleet>(std::vector<Fleet::PeerOf>{{"127.0.0.1", port}}, table, -1, "Bearer secret-token",
                                          std::map<std::string, Fleet::BucketOf>{{"data", {MARK, true}}}));
}

class Client {
 public:
  explicit Client(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  }
  ~Client() { ::close(fd_); }
  Client(const Client&) = delete;

  void ask(int number) {
    const std::string request = "GET /data/" + key_of(number) + HEAD;
    CHECK(::send(fd_, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size()));
  }

  // Whether it was the object; else the back's answer.
  bool is_answered_with(int number) {
    size_t end;
    while ((end = came_.find("\r\n\r\n")) == std::string::npos) receive();
    const size_t at = came_.find("Content-Length: ");
    CHECK(at < end);
    const size_t size = std::stoul(came_.substr(at + 16));
    const bool is_object = came_.compare(0, 15, "HTTP/1.1 200 OK") == 0;
    while (came_.size() < end + 4 + size) receive();
    CHECK(came_.substr(end + 4, size) == (is_object ? content(number) : "back"));
    came_.erase(0, end + 4 + size);
    return is_object;
  }

 private:
  void receive() {
    char bytes[65536];
    const ssize_t got = ::recv(fd_, bytes, sizeof bytes, 0);
    CHECK(got > 0);
    came_.append(bytes, static_cast<size_t>(got));
  }

  int fd_;
  std::string came_;
};

void read_on(uint16_t port, const std::atomic<bool>& is_over, uint64_t seed, std::atomic<uint64_t>& objects) {
  std::mt19937_64 chance(seed);
  while (!is_over) {
    Client client(port);
    for (int turn = 0; turn < 20; ++turn) {
      std::vector<int> asked;
      for (auto count = 1 + chance() % 8; count; --count) asked.push_back(static_cast<int>(chance() % OBJECTS));
      for (const int number : asked) client.ask(number);
      if (chance() % 50 == 0) break;  // it goes away with all still to come
      for (const int number : asked) objects += client.is_answered_with(number);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  const std::string folder = argv[1];
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[3]));
  Server other(folder + "/other", false);
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> objects{0};
  std::vector<std::thread> clients;
  for (int number = 0; number < CLIENTS; ++number)
    clients.emplace_back([&, number] { read_on(other.port, is_over, static_cast<uint64_t>(number), objects); });
  // It is told of one fleet after the other while it looks at what it was told; where the owner is, once there is one.
  std::atomic<int> at{0};
  std::thread teller([&] {
    while (!is_over)
      if (const int port = at) tell(*other.front, static_cast<uint16_t>(port));
  });
  uint64_t before = 0;
  for (int round = 0; round < std::atoi(argv[2]) || std::chrono::steady_clock::now() < until; ++round) {
    Server owner(folder + "/owner", true);
    tell(*owner.front, owner.port);  // of which origin it has the bucket
    at = owner.port;
    // Some must have come from it; a peer that was away is left alone for a second.
    while (objects == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (round % 2) owner.front->drain();
    before = objects;
  }
  is_over = true;
  for (std::thread& client : clients) client.join();
  teller.join();
  std::printf("well\n");
}
