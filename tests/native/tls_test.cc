// The front's TLS between clients that read, stall, speak nonsense and leave, while certificates are renewed: every byte of
// every answer is right.
//
//   tls_test FOLDER SEED SECONDS     with server.pem and server.key in FOLDER/pki
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../src/stoker/_native/front.h"
#include "../../src/stoker/_native/tls.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr uint32_t BLOCK = 64 * 1024, NOW = 1000;
constexpr size_t LARGE = 1'000'000, SMALL = 900;

std::string content(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 7 + i / 251);
  return bytes;
}

// The client's side of the library, which the front has no use for.
struct Client {
  void* library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  template <typename Function>
  Function* of(const char* name) const {
    void* found = library ? ::dlsym(library, name) : nullptr;
    CHECK(found != nullptr);
    return reinterpret_cast<Function*>(found);
  }
  void* (*new_context)(const void*) = of<void*(const void*)>("SSL_CTX_new");
  void* (*new_session)(void*) = of<void*(void*)>("SSL_new");
  void (*free_session)(void*) = of<void(void*)>("SSL_free");
  void (*free_context)(void*) = of<void(void*)>("SSL_CTX_free");
  int (*set_fd)(void*, int) = of<int(void*, int)>("SSL_set_fd");
  int (*connect)(void*) = of<int(void*)>("SSL_connect");
  int (*read)(void*, void*, int) = of<int(void*, void*, int)>("SSL_read");
  int (*write)(void*, const void*, int) = of<int(void*, const void*, int)>("SSL_write");
  void* context = new_context(of<const void*()>("TLS_client_method")());
  ~Client() { free_context(context); }
};

int dial(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int buffer_bytes = 100'000;  // so that the front has to wait in the middle of records
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

// Reads one answer; its body.
std::string answer_of(const Client& client, void* session, std::string& held) {
  char bytes[32 * 1024];
  size_t end;
  while ((end = held.find("\r\n\r\n")) == std::string::npos) {
    const int got = client.read(session, bytes, sizeof bytes);
    CHECK(got > 0);
    held.append(bytes, static_cast<size_t>(got));
  }
  const size_t at = held.find("Content-Length: ");
  CHECK(at < end);
  const size_t size = std::stoul(held.substr(at + 16));
  held.erase(0, end + 4);
  while (held.size() < size) {
    const int got = client.read(session, bytes, sizeof bytes);
    CHECK(got > 0);
    held.append(bytes, static_cast<size_t>(got));
  }
  std::string body = held.substr(0, size);
  held.erase(0, size);
  return body;
}

void speak(const Client& client, uint16_t port, const std::string& large, std::mt19937& chance) {
  const int fd = dial(port);
  void* session = client.new_session(client.context);
  CHECK(client.set_fd(session, fd) == 1 && client.connect(session) == 1);
  std::string held;
  for (int turn = static_cast<int>(chance() % 6); turn >= 0; --turn) {
    const int count = 1 + static_cast<int>(chance() % 4);
    std::vector<std::pair<size_t, size_t>> ranges;
    std::string said;
    for (int i = 0; i < count; ++i) {
      const size_t start = chance() % LARGE, stop = start + 1 + chance() % (LARGE - start);
      ranges.emplace_back(start, stop);
      const bool is_back = chance() % 4 == 0;
      if (is_back) ranges.back() = {0, 0};
      said += is_back ? std::string("GET /data/none HTTP/1.1\r\nHost: x\r\n\r\n")
                      : "GET /data/large HTTP/1.1\r\nHost: x\r\nRange: bytes=" + std::to_string(start) + "-" +
                            std::to_string(stop - 1) + "\r\n\r\n";
    }
    CHECK(client.write(session, said.data(), static_cast<int>(said.size())) == static_cast<int>(said.size()));
    if (chance() % 8 == 0) break;  // and is gone
    if (chance() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(chance() % 20));
    for (const auto& [start, stop] : ranges) {
      const std::string body = answer_of(client, session, held);
      CHECK(body == (stop ? large.substr(start, stop - start) : large.substr(0, SMALL)));
    }
  }
  client.free_session(session);
  ::close(fd);
}

void babble(uint16_t port, std::mt19937& chance) {
  const int fd = dial(port);
  std::string said = chance() % 2 ? "\x16\x03\x01" : "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
  for (size_t i = chance() % 3000; i > 0; --i) said += static_cast<char>(chance());
  (void)!::send(fd, said.data(), said.size(), MSG_NOSIGNAL);
  if (chance() % 2) {
    char bytes[1000];
    pollfd waiting{fd, POLLIN, 0};
    if (::poll(&waiting, 1, 20) > 0) (void)!::recv(fd, bytes, sizeof bytes, 0);
  }
  ::close(fd);
}

void serve_back(Front& front, const std::string& large, std::atomic<bool>& is_over) {
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(SMALL) + "\r\n\r\n";
  while (!is_over) {
    pollfd waiting{front.event_fd(), POLLIN, 0};
    ::poll(&waiting, 1, 20);
    for (const Event& event : front.take(100)) {
      if (event.kind != Event::Kind::asked) continue;
      CHECK(event.asked.certificate.empty());
      front.say(event.connection, head, false);
      front.say(event.connection, large.substr(0, SMALL), true);
      front.finish(event.connection);
    }
  }
}

// Whoever goes on with less than was begun sends all of that.
void end_what_was_begun(const Client& client, const TlsContext& context, const std::string& large) {
  int fds[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  CHECK(::fcntl(fds[0], F_SETFL, O_NONBLOCK) == 0);
  std::atomic<bool> may_read{false};
  std::string came;
  std::thread peer([&] {
    void* session = client.new_session(client.context);
    CHECK(client.set_fd(session, fds[1]) == 1 && client.connect(session) == 1);
    while (!may_read) std::this_thread::yield();
    char bytes[32 * 1024];
    int got;
    while ((got = client.read(session, bytes, sizeof bytes)) > 0) came.append(bytes, static_cast<size_t>(got));
    client.free_session(session);
  });
  const std::unique_ptr<TlsSession> session = context.accept(fds[0]);
  char byte;
  while (!session->is_open()) {
    CHECK(session->read(&byte, 1) == -1 && errno == EAGAIN);
    pollfd waiting{fds[0], POLLIN, 0};
    if (!session->is_open()) ::poll(&waiting, 1, 1000);
  }
  size_t sent = 0;
  ssize_t got;
  while ((got = session->write(large.data() + sent, TlsSession::RECORD_BYTES)) > 0) sent += static_cast<size_t>(got);
  CHECK(errno == EAGAIN && session->begun_bytes() == TlsSession::RECORD_BYTES);
  may_read = true;
  while ((got = session->write(large.data() + sent, 1)) < 0) {
    CHECK(errno == EAGAIN && session->begun_bytes() == TlsSession::RECORD_BYTES);
    pollfd waiting{fds[0], POLLOUT, 0};
    ::poll(&waiting, 1, 1000);
  }
  CHECK(got == TlsSession::RECORD_BYTES && session->begun_bytes() == 0);
  sent += static_cast<size_t>(got);
  session->end();
  peer.join();
  CHECK(came == large.substr(0, sent));
  ::close(fds[0]);
  ::close(fds[1]);
}

}  // namespace

int main(int, char** arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  const std::string folder = arguments[1], certificate = folder + "/pki/server.pem", key = folder + "/pki/server.key";
  const auto seed = static_cast<unsigned>(std::stoul(arguments[2]));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(std::stol(arguments[3]));
  const std::string large = content(LARGE);
  ::mkdir((folder + "/tls").c_str(), 0700);
  ::mkdir((folder + "/tls/000").c_str(), 0700);
  auto index = std::make_shared<Index>(folder + "/tls/index", BLOCK);
  auto files = std::make_shared<Files>(folder + "/tls", 10);
  const uint16_t bucket = index->bucket("data", "");
  index->learn(bucket, "large", "v", LARGE, false, NOW);
  for (uint32_t block = 0; block * size_t{BLOCK} < LARGE; ++block)
    CHECK(index->hold(bucket, "large", "v", block, 1, 0, 0, NOW));
  FILE* file = std::fopen(files->path(1).c_str(), "wb");
  CHECK(file && std::fwrite(large.data(), 1, LARGE, file) == LARGE && std::fclose(file) == 0);

  bool is_refused = false;
  try {
    TlsContext(certificate, certificate, "");
  } catch (const TlsProblem&) {
    is_refused = true;
  }
  CHECK(is_refused);
  end_what_was_begun(Client(), TlsContext(certificate, key, ""), large);

  for (const double rate : {0.0, 20e6}) {
    FrontSettings settings;
    settings.threads = 2;
    settings.egress_bytes_per_s = rate;
    auto front = std::make_shared<Front>(index, files, settings);
    front->set_tls(std::make_shared<TlsContext>(certificate, key, ""));
    auto rules = std::make_shared<Rules>();
    rules->is_open = true;
    rules->buckets["data"] = BucketRule{bucket, 100, 0};
    front->set_rules(rules);
    front->set_now(NOW);
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && ::listen(listener, 100) == 0);
    CHECK(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    const uint16_t port = ntohs(address.sin_port);
    front->listen(listener);
    front->start();
    std::atomic<bool> is_over{false};
    std::thread back([&] { serve_back(*front, large, is_over); });
    std::vector<std::thread> clients;
    const Client client;
    const auto half = std::chrono::steady_clock::now() + (until - std::chrono::steady_clock::now()) / (rate == 0 ? 2 : 1);
    for (unsigned i = 0; i < 4; ++i)
      clients.emplace_back([&, i] {
        std::mt19937 chance(seed * 100 + i);
        do {
          if (chance() % 4) speak(client, port, large, chance);
          else babble(port, chance);
        } while (std::chrono::steady_clock::now() < half);
      });
    do {
      front->set_tls(std::make_shared<TlsContext>(certificate, key, certificate));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (std::chrono::steady_clock::now() < half);
    for (std::thread& one : clients) one.join();
    CHECK(front->figures().handed_over > 0);
    is_over = true;
    back.join();
    front->stop();
  }
  std::puts("well");
}
