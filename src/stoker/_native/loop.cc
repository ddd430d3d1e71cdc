#include "loop.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>

namespace stoker {
namespace {

constexpr uint64_t WAKE = 0;
constexpr uint64_t FIRST_CONNECTION = uint64_t{1} << 32;  // below: the numbers of listening sockets
constexpr int ACCEPTS = 64;
constexpr double TICK_S = 1;
constexpr double THROTTLE_S = 0.005;
constexpr int UNIX_BUFFER_BYTES = 2 * 1024 * 1024;

void tune(int fd, const sockaddr_storage& peer) {
  const int on = 1;
  if (peer.ss_family == AF_UNIX)
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &UNIX_BUFFER_BYTES, sizeof UNIX_BUFFER_BYTES);
  else
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

double clock_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double boot_clock_s() {
  timespec now;
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

Loop::Loop(Front& front, uint64_t number) : front_(front), number_(number), next_id_(FIRST_CONNECTION) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  peers_ = std::make_unique<PeerLinks>(front_.settings_, epoll_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = WAKE;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  for (const int listening : front_.listening_) {
    event.events = EPOLLIN | EPOLLEXCLUSIVE;
    event.data.u64 = static_cast<uint64_t>(listening) + 1;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, listening, &event);
  }
}

Loop::~Loop() {
  stop();
  connections_.clear();
  ::close(epoll_);
  ::close(wake_);
}

void Loop::start() { thread_ = std::thread([this] { run(); }); }

void Loop::stop() {
  stops_ = true;
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

bool Loop::post(Command command) {
  bool is_first;
  {
    const std::lock_guard<std::mutex> lock(commands_mutex_);
    is_first = commands_.empty();
    commands_.push_back(std::move(command));
  }
  const uint64_t one = 1;
  if (is_first) (void)!::write(wake_, &one, sizeof one);
  return true;
}

void Loop::run() {
  // Signals are for the interpreter's threads; sendfile to a reader that is gone would raise SIGPIPE here.
  sigset_t every;
  sigfillset(&every);
  ::pthread_sigmask(SIG_BLOCK, &every, nullptr);
  std::vector<epoll_event> events(512);
  double now_s = clock_s();
  while (!stops_) {
    const int ready = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait_ms(now_s));
    now_s = clock_s();
    for (int i = 0; i < ready; ++i) {
      const uint64_t what = events[static_cast<size_t>(i)].data.u64;
      if (what == WAKE) {
        uint64_t count;
        (void)!::read(wake_, &count, sizeof count);
      } else if (what & PeerLinks::LINK) {
        peers_->on_ready(what, events[static_cast<size_t>(i)].events, now_s);
      } else if (what < FIRST_CONNECTION) {
        accept(static_cast<int>(what - 1), now_s);
      } else {
        on_ready(what, events[static_cast<size_t>(i)].events, now_s);
      }
    }
    run_commands(now_s);
    run_again(now_s);
    wake_throttled(now_s);
    take_from_peers(now_s);
    if (now_s - ticked_s_ < TICK_S) continue;
    ticked_s_ = now_s;
    peers_->on_tick(now_s);
    take_from_peers(now_s);
    std::vector<uint64_t> ids;
    ids.reserve(connections_.size());
    for (const auto& [id, _] : connections_) ids.push_back(id);
    for (const uint64_t id : ids) {
      Connection& connection = *connections_.at(id);
      const Connection::Step step = connection.on_tick(now_s);
      settle(connection, step == Connection::Step::again ? connection.advance(now_s) : step);
    }
  }
  connections_.clear();  // here, as TLS still says goodbye: to who is gone that raises SIGPIPE
}

int Loop::wait_ms(double now_s) const {
  if (!again_.empty()) return 0;
  double until_s = ticked_s_ + TICK_S;
  if (!throttled_.empty()) until_s = std::min(until_s, throttled_until_s_);
  return static_cast<int>(std::clamp(std::ceil((until_s - now_s) * 1000), 0.0, 1000.0));
}

void Loop::accept(int listening, double now_s) {
  const std::shared_ptr<const TlsContext> tls = front_.tls();
  for (int i = 0; i < ACCEPTS; ++i) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    const int fd = ::accept4(listening, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      // Out of descriptors: the caller stays in the backlog. A pause keeps this thread from spinning on it.
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) ::usleep(1000);
      return;
    }
    if (front_.drains_ || front_.connections_ >= front_.settings_.connections_max) {
      static constexpr char FULL[] =
          "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
      if (!tls || peer.ss_family == AF_UNIX) (void)!::send(fd, FULL, sizeof FULL - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
      ::close(fd);
      front_.refused_.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    tune(fd, peer);
    front_.accepted_.fetch_add(1, std::memory_order_relaxed);
    // The number of the loop is in the lowest bits, so that a connection is found by its id.
    const uint64_t id = (next_id_++ << 8) | number_;
    auto made = std::make_unique<Connection>(front_, *this, id, fd, peer.ss_family == AF_UNIX, now_s);
    made->set_peer(peer);
    if (tls && peer.ss_family != AF_UNIX) {
      std::unique_ptr<TlsSession> session = tls->accept(fd);
      if (!session) continue;  // `made` closes it
      made->seal(std::move(session));
    }
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.u64 = id;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    Connection& connection = *made;
    connections_[id] = std::move(made);
    settle(connection, connection.advance(now_s));  // a request has often come along
  }
}

void Loop::on_ready(uint64_t id, uint32_t events, double now_s) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  found->second->on_ready(events);
  settle(*found->second, found->second->advance(now_s));
}

void Loop::settle(Connection& connection, Connection::Step step) {
  if (step == Connection::Step::close) {
    close(connection);
    return;
  }
  const bool is_again = step == Connection::Step::again;
  // Where others wait for what they may send together, it has its next turn after theirs.
  const bool gives_way = is_again && connection.unsent_bytes() && connection.shares_limit() && !throttled_.empty();
  if ((connection.is_throttled() || gives_way) && !connection.is_queued) {
    connection.is_queued = true;
    throttled_.push_back(connection.id());
  }
  if (is_again && !gives_way) list(connection);
}

void Loop::list(Connection& connection) {
  if (connection.is_listed) return;
  connection.is_listed = true;
  again_.push_back(connection.id());
}

void Loop::close(Connection& connection) { connections_.erase(connection.id()); }

// In the order in which they came to wait; those whose tenant can send no more keep their places.
void Loop::wake_throttled(double now_s) {
  if (throttled_.empty() || now_s < throttled_until_s_) return;
  throttled_until_s_ = now_s + THROTTLE_S;
  std::deque<uint64_t> waiting, kept;
  waiting.swap(throttled_);
  std::unordered_set<const Tenant*> dry;
  for (const uint64_t id : waiting) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Connection& connection = *found->second;
    const Tenant* tenant = connection.tenant();
    if (dry.count(tenant)) {
      kept.push_back(id);
      continue;
    }
    connection.is_queued = false;
    connection.wake();
    const uint64_t before = connection.unsent_bytes();
    const Connection::Step step = connection.advance(now_s);
    const bool is_dry = step != Connection::Step::close && connection.is_throttled() && connection.is_starved();
    if (is_dry) dry.insert(tenant);
    if (is_dry && connection.unsent_bytes() == before) {
      connection.is_queued = true;
      kept.push_back(id);  // its turn is still to come
    } else {
      settle(connection, step);
    }
  }
  throttled_.insert(throttled_.begin(), kept.begin(), kept.end());
}

void Loop::run_again(double now_s) {
  std::vector<uint64_t> ids;
  ids.swap(again_);
  for (const uint64_t id : ids) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    found->second->is_listed = false;
    settle(*found->second, found->second->advance(now_s));
  }
}

// What has come from other servers, or is known not to come, for who waits for it.
void Loop::take_from_peers(double now_s) {
  for (std::vector<PeerAnswer> answers = peers_->take(); !answers.empty(); answers = peers_->take()) {
    for (PeerAnswer& answer : answers) {
      const auto found = connections_.find(answer.connection);
      if (found == connections_.end()) continue;
      found->second->take_from_peer(answer, now_s);
      settle(*found->second, found->second->advance(now_s));
    }
  }
}

const Fleet& Loop::fleet() {
  const uint64_t version = front_.fleet_.version();
  if (version != fleet_version_) {
    fleet_ = front_.fleet_.get();
    fleet_version_ = version;
  }
  return *fleet_;
}

void Loop::run_commands(double now_s) {
  std::vector<Command> commands;
  {
    const std::lock_guard<std::mutex> lock(commands_mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) carry_out(command, now_s);
}

void Loop::carry_out(Command& command, double now_s) {
  if (command.kind == Command::Kind::drain) {
    for (const auto& [_, connection] : connections_) {
      connection->drain();
      list(*connection);
    }
    return;
  }
  const auto found = connections_.find(command.connection);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  switch (command.kind) {
    case Command::Kind::say:
      connection.say(std::move(command.bytes), command.is_data, std::move(command.passing));
      if (command.is_last) connection.finish(now_s);
      break;
    case Command::Kind::file: connection.send_file(std::move(command.file), command.offset, command.size); break;
    case Command::Kind::inflow:
      connection.send_inflow(std::move(command.inflow), command.offset, command.size);
      break;
    case Command::Kind::wake: connection.go_on(); break;
    case Command::Kind::parts:
      for (Part& part : command.parts) {
        connection.say(std::move(part.bytes), true, std::move(command.passing));
        if (part.file) connection.send_file(std::move(part.file), part.offset, part.size);
      }
      connection.finish(now_s);
      break;
    case Command::Kind::charge: connection.charge(std::move(command.tenant)); break;
    case Command::Kind::more: connection.more(command.size, now_s); break;
    case Command::Kind::finish: connection.finish(now_s); break;
    case Command::Kind::notify: connection.notify(command.size); break;
    default: close(connection); return;
  }
  list(connection);
}

void Loop::count_hit(uint16_t bucket, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(hits_mutex_);
  HitFigures& figures = hits_[bucket];
  figures.hits += 1;
  figures.hit_bytes += bytes;
}

void Loop::count_handed_on(uint16_t bucket, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(hits_mutex_);
  HitFigures& figures = hits_[bucket];
  figures.handed_on += 1;
  figures.handed_on_bytes += bytes;
}

std::unordered_map<uint16_t, HitFigures> Loop::take_hits() {
  const std::lock_guard<std::mutex> lock(hits_mutex_);
  return std::exchange(hits_, {});
}

}  // namespace stoker
