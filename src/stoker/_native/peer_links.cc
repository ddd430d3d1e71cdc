#include "peer_links.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "front.h"
#include "http.h"

namespace stoker {
namespace {

constexpr size_t READ_SIZE = 64 * 1024;
constexpr size_t HEAD_MAX = 16 * 1024;
constexpr size_t LINKS_MAX = 256;  // to one peer
constexpr size_t IDLE_MAX = 32;    // of them
constexpr double IDLE_S = 60;      // less than peers have patience for
constexpr double DOUBTED_S = 1;    // so long the back finds out what is the matter with a peer
constexpr double ANSWER_TIMES = 5;  // what an answer may take in all, over the patience for silence
constexpr uint64_t REFUSAL_MAX = 64 * 1024;  // a longer one is not worth the connection

std::string_view after(std::string_view line, std::string_view name) {
  if (line.size() <= name.size() || line[name.size()] != ':' || !equals_ignoring_case(line.substr(0, name.size()), name))
    return {};
  line.remove_prefix(name.size() + 1);
  while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
  return line;
}

}  // namespace

PeerLinks::~PeerLinks() {
  for (const auto& [_, link] : links_) ::close(link->fd);
}

bool PeerLinks::ask(const Peer& peer, PeerQuestion& question, double now_s) {
  Peered& peered = peers_[peer.name];
  if (peered.doubted_until_s > now_s) return false;
  if (const auto found = peered.refused_until_s.find(question.bucket); found != peered.refused_until_s.end()) {
    if (found->second > now_s) return false;
    peered.refused_until_s.erase(found);
  }
  std::string asked = question.bucket + "/" + question.what;
  if (asked_.count(asked)) return false;
  Link* link = kept(peered);
  if (!link && peered.count < LINKS_MAX) link = open(peer, now_s);
  if (!link) return false;
  asked_.insert(std::move(asked));
  link->question = std::move(question);
  link->is_asked = true;
  link->has_head = link->is_kept_after = link->is_refused = false;
  link->sent = 0;
  link->left = link->question.size_bytes;
  link->asked_s = link->progress_s = now_s;
  link->head.clear();
  if (link->is_open && !send(*link, now_s)) fail(*link, now_s, false);
  return true;
}

PeerLinks::Link* PeerLinks::kept(Peered& peered) {
  if (peered.idle.empty()) return nullptr;
  Link* link = links_.at(peered.idle.back()).get();
  peered.idle.pop_back();
  return link;
}

PeerLinks::Link* PeerLinks::open(const Peer& peer, double now_s) {
  const int fd = ::socket(peer.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return nullptr;
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&peer.address), peer.address_bytes) != 0 && errno != EINPROGRESS) {
    ::close(fd);
    doubt(peer.name, now_s);
    return nullptr;
  }
  auto made = std::make_unique<Link>();
  Link* link = made.get();
  link->id = next_id_++;
  link->fd = fd;
  link->peer = peer.name;
  links_[link->id] = std::move(made);
  ++peers_[peer.name].count;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = link->id;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  return link;
}

void PeerLinks::on_ready(uint64_t id, uint32_t events, double now_s) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  Link& link = *found->second;
  if (!link.is_open) {
    if (!(events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(link.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return fail(link, now_s, true);
    link.is_open = true;
  }
  if (!link.is_asked) {
    // It has ended, or says what nobody has asked for.
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) close(link);
    return;
  }
  if (events & (EPOLLRDHUP | EPOLLHUP)) link.has_ended = true;
  if (!send(link, now_s) || !receive(link, now_s)) fail(link, now_s, false);
}

bool PeerLinks::send(Link& link, double now_s) {
  const std::string& request = link.question.request;
  while (link.sent < request.size()) {
    const ssize_t sent = ::send(link.fd, request.data() + link.sent, request.size() - link.sent, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    link.sent += static_cast<size_t>(sent);
    link.progress_s = now_s;
  }
  return true;
}

// False if it is broken, or says what it must not.
bool PeerLinks::receive(Link& link, double now_s) {
  char buffer[READ_SIZE];
  for (;;) {
    const ssize_t got = ::recv(link.fd, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    link.progress_s = peers_[link.peer].progress_s = now_s;
    if (!take_in(link, {buffer, static_cast<size_t>(got)}, now_s)) return false;
    if (link.has_head && link.left == 0) {
      finish(link, now_s);
      return true;
    }
  }
}

bool PeerLinks::take_in(Link& link, std::string_view came, double now_s) {
  if (!link.has_head) {
    const size_t from = link.head.size() < 3 ? 0 : link.head.size() - 3;
    const size_t before = link.head.size();
    link.head.append(came);
    const size_t end = link.head.find("\r\n\r\n", from);
    if (end == std::string::npos) return link.head.size() <= HEAD_MAX;
    came.remove_prefix(end + 4 - before);
    link.head.resize(end + 2);
    if (!read_head(link, now_s)) return false;
    link.has_head = true;
    if (!link.is_refused) link.question.answer.reserve(link.question.answer.size() + link.left);
  }
  if (came.size() > link.left) return false;
  if (!link.is_refused) link.question.answer.append(came);
  link.left -= came.size();
  return true;
}

// Whether it is the answer that was asked for: that part, of that version; or an orderly refusal, after which the
// connection is as good as it was.
bool PeerLinks::read_head(Link& link, double now_s) {
  std::string_view lines = link.head;
  const bool is_refused = lines.substr(0, 10) == "HTTP/1.1 4" || lines.substr(0, 10) == "HTTP/1.1 5";
  if (!is_refused && lines.substr(0, 13) != "HTTP/1.1 206 ") return false;
  const bool is_of_bucket = lines.substr(9, 4) == "404 " || lines.substr(9, 4) == "409 ";
  const PeerQuestion& question = link.question;
  bool is_length = false, is_version = false, is_part = false;
  uint64_t refusal_bytes = REFUSAL_MAX + 1;
  link.is_kept_after = link.sent == question.request.size();
  while (!lines.empty()) {
    const size_t end = lines.find("\r\n");
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end + 2);
    if (after(line, "transfer-encoding").data()) return false;
    if (const auto said = after(line, "connection"); equals_ignoring_case(said, "close")) link.is_kept_after = false;
    if (const auto said = after(line, "content-length"); said.data()) {
      is_length = said == std::to_string(question.size_bytes);
      const auto read = std::from_chars(said.data(), said.data() + said.size(), refusal_bytes);
      if (read.ec != std::errc() || read.ptr != said.data() + said.size()) return false;
    }
    if (const auto said = after(line, "etag"); said.data()) is_version = said == question.etag;
    if (const auto said = after(line, "content-range"); said.data()) is_part = said == question.content_range;
  }
  if (!is_refused) return is_length && is_version && is_part;
  if (refusal_bytes > REFUSAL_MAX) return false;
  link.left = refusal_bytes;
  refuse(link, is_of_bucket, now_s);
  return true;
}

// `is_of_bucket`: the peer has none of it, or another one; so much is asked again later.
void PeerLinks::refuse(Link& link, bool is_of_bucket, double now_s) {
  if (is_of_bucket) peers_[link.peer].refused_until_s[link.question.bucket] = now_s + DOUBTED_S;
  answer(link, false);
  link.is_refused = true;
}

void PeerLinks::finish(Link& link, double now_s) {
  if (!link.is_refused) answer(link, true);
  link.head = {};  // with its memory: connections are kept for long
  link.is_asked = false;
  link.progress_s = now_s;
  Peered& peered = peers_[link.peer];
  if (!link.is_kept_after || link.has_ended || peered.idle.size() >= IDLE_MAX) return close(link);
  peered.idle.push_back(link.id);
}

void PeerLinks::answer(Link& link, bool is_whole) {
  PeerQuestion& question = link.question;
  asked_.erase(question.bucket + "/" + question.what);
  if (is_whole) answers_.push_back({question.connection, true, std::move(question.answer), std::move(question.reserved)});
  else answers_.push_back({question.connection, false, {}, nullptr});
  link.question = {};
}

void PeerLinks::fail(Link& link, double now_s, bool is_doubted) {
  if (!link.is_refused) answer(link, false);
  link.is_asked = false;
  if (is_doubted) doubt(link.peer, now_s);
  close(link);
}

// Of what it says no more is known, nor whether it still hears on connections that nothing is asked on.
void PeerLinks::doubt(const std::string& peer, double now_s) {
  peers_[peer].doubted_until_s = now_s + DOUBTED_S;
  const std::vector<uint64_t> idle = peers_[peer].idle;
  for (const uint64_t id : idle) close(*links_.at(id));
}

void PeerLinks::close(Link& link) {
  Peered& peered = peers_[link.peer];
  peered.idle.erase(std::remove(peered.idle.begin(), peered.idle.end(), link.id), peered.idle.end());
  --peered.count;
  ::close(link.fd);
  links_.erase(link.id);
}

void PeerLinks::on_tick(double now_s) {
  std::vector<Link*> silent, late, unused;
  for (const auto& [_, link] : links_) {
    if (link->is_asked && now_s - link->progress_s > settings_.peer_silence_s) silent.push_back(link.get());
    else if (link->is_asked && now_s - link->asked_s > ANSWER_TIMES * settings_.peer_silence_s) late.push_back(link.get());
    if (!link->is_asked && now_s - link->progress_s > IDLE_S) unused.push_back(link.get());
  }
  for (Link* link : unused) close(*link);  // first, as those of who is doubted go, too
  for (Link* link : late) fail(*link, now_s, false);
  for (Link* link : silent) {
    // One question may be a long one, while others are answered.
    const bool is_alive = link->is_open && now_s - peers_[link->peer].progress_s <= settings_.peer_silence_s;
    fail(*link, now_s, !is_alive);
  }
  for (auto it = peers_.begin(); it != peers_.end();) {
    Peered& peered = it->second;
    for (auto refused = peered.refused_until_s.begin(); refused != peered.refused_until_s.end();)
      refused = refused->second <= now_s ? peered.refused_until_s.erase(refused) : std::next(refused);
    const bool is_forgotten = peered.count == 0 && peered.doubted_until_s <= now_s && peered.refused_until_s.empty();
    it = is_forgotten ? peers_.erase(it) : std::next(it);
  }
}

}  // namespace stoker
