#include "connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "loop.h"

namespace stoker {
namespace {

constexpr size_t READ_SIZE = 64 * 1024;
constexpr uint64_t UNSENT_MAX = 4 * 1024 * 1024;  // beyond that no further request is looked at
constexpr int TURNS = 16;
constexpr double LINGER_S = 1;  // after the last that came
// Who still sends a body that nobody wants must not be reset before it has read why; but not for ever.
constexpr double THROW_S = 30;
constexpr uint64_t THROW_MAX = 64 * 1024 * 1024;
constexpr double BODY_TIMES = 10;  // what a body may take in all, over its patience for each part

const char* reason_of(int status) {
  switch (status) {
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 431: return "Request Header Fields Too Large";
    default: return "Service Unavailable";
  }
}

std::string lower_of(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  return lower;
}

}  // namespace

Connection::Connection(Front& front, Loop& loop, uint64_t id, int fd, bool is_near, double now_s)
    : front_(front), loop_(loop), id_(id), fd_(fd), is_near_(is_near),
      rate_(front.settings_.connection_bytes_per_s), tenant_(front.nobody_), since_s_(now_s) {
  front_.connections_.fetch_add(1, std::memory_order_relaxed);
}

Connection::~Connection() {
  if (tls_ && !is_lost_ && !is_shut_ && unsent_bytes_ == 0) (void)tls_->end();
  ::close(fd_);
  front_.connections_.fetch_sub(1, std::memory_order_relaxed);
  if (state_ == State::back || notify_at_ >= 0) front_.post(Event{Event::Kind::gone, id_, {}});
}

void Connection::set_peer(const sockaddr_storage& peer) {
  char text[INET6_ADDRSTRLEN] = "";
  if (peer.ss_family == AF_INET)
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr, text, sizeof text);
  else if (peer.ss_family == AF_INET6)
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr, text, sizeof text);
  peer_ = text;
}

void Connection::on_ready(uint32_t events) {
  if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) is_readable_ = true;
  if (events & EPOLLOUT) is_writable_ = true;
  if (tls_) is_readable_ = is_writable_ = true;  // to read may have waited for room to write, and the other way round
  if (events & EPOLLRDHUP) ends_soon_ = true;
  // Once this side is shut, a peer that ends its own is no loss: what it sent before is still to be read.
  if ((events & EPOLLERR) || ((events & EPOLLHUP) && !is_shut_)) is_lost_ = true;
}

// As much as can be done now, and as is fair. Events are edge-triggered: what is left undone here is asked for again.
Connection::Step Connection::advance(double now_s) {
  for (int turn = 0; turn < TURNS; ++turn) {
    if (is_lost_) {
      // Why a peer gave up it says before it goes.
      if (tls_ && !tls_->is_open()) (void)receive(now_s);
      return Step::close;
    }
    if (can_send() && !flush(now_s)) return Step::close;
    if (state_ == State::head && (closes_ || (has_ended_ && is_looked_at_))) state_ = State::ending;
    if (state_ == State::ending && unsent_bytes_ == 0) {
      if (has_ended_) return Step::close;
      if (!is_shut_ && (!tls_ || is_writable_)) {
        // Closing now, with input unread, would reset the connection and take back what was sent last.
        if (shut_since_s_ == 0) since_s_ = shut_since_s_ = now_s;
        is_shut_ = !tls_ || tls_->end();
        if (is_shut_) ::shutdown(fd_, SHUT_WR);
        else is_writable_ = false;
      }
    }
    if (has_work()) work(now_s);
    else if (!wants_bytes() || !is_readable_) break;
    else if (!receive(now_s)) return Step::close;
  }
  return can_send() || has_work() || (wants_bytes() && is_readable_) ? Step::again : Step::go_on;
}

bool Connection::can_send() const { return unsent_bytes_ && is_writable_ && !is_throttled_ && !waits_for_inflow_; }

bool Connection::has_work() const {
  const bool is_taken = state_ == State::head || state_ == State::body || is_streaming();
  return !is_looked_at_ && !closes_ && is_taken && unsent_bytes_ < UNSENT_MAX;
}

// -- what comes in -----------------------------------------------------------------------------------------------

bool Connection::wants_bytes() const {
  if (has_ended_) return false;
  if (state_ == State::ending) return true;  // to throw them away
  return (!is_elsewhere() || is_streaming()) && !closes_ && unsent_bytes_ < UNSENT_MAX;
}

bool Connection::receive(double now_s) {
  char buffer[READ_SIZE];
  const bool shakes_hands = tls_ && !tls_->is_open();
  const ssize_t got = tls_ ? tls_->read(buffer, sizeof buffer) : ::recv(fd_, buffer, sizeof buffer, 0);
  if (got < 0) {
    if (errno == EINTR) return true;
    is_readable_ = false;
    // One that only looked whether the port is open, and resets it, has failed at nothing.
    if (shakes_hands && errno == EPROTO) loop_.tally.handshake_failed();
    if (errno == EAGAIN || !tls_ || !tls_->met_plaintext()) return errno == EAGAIN;
    tls_.reset();
    is_readable_ = true;
    refuse(400, "protocol", "this port speaks TLS: ask for https://", now_s);
    return true;
  }
  if (got == 0) {
    has_ended_ = true;
    if (state_ == State::body) state_ = State::ending;  // it will not be whole; what was answered before still goes out
    return state_ == State::head || (state_ == State::ending && unsent_bytes_);
  }
  if (!tls_ && got < static_cast<ssize_t>(sizeof buffer) && !ends_soon_) is_readable_ = false;
  if (state_ == State::ending) {
    since_s_ = now_s;
    if (shut_since_s_ > 0) thrown_bytes_ += static_cast<uint64_t>(got);
    return thrown_bytes_ <= THROW_MAX;
  }
  if (input_.empty() && state_ == State::head) since_s_ = now_s;
  input_.append(buffer, static_cast<size_t>(got));
  is_looked_at_ = false;
  return true;
}

void Connection::work(double now_s) {
  is_looked_at_ = true;
  while (!closes_ && unsent_bytes_ < UNSENT_MAX && taken_ < input_.size()) {
    const size_t before = taken_;
    const State state = state_;
    if (state == State::head) read_head(now_s);
    else if (state == State::body) read_body(now_s);
    else if (is_streaming()) stream_body(now_s);
    else break;
    if (taken_ == before && state_ == state) break;  // it is not whole yet
  }
  if (taken_ < input_.size() && (is_elsewhere() || unsent_bytes_ >= UNSENT_MAX)) is_looked_at_ = false;
  if (taken_ == input_.size()) {
    input_.clear();
    if (input_.capacity() > READ_SIZE * 2) input_.shrink_to_fit();
  } else {
    input_.erase(0, taken_);
  }
  taken_ = 0;
}

void Connection::read_head(double now_s) {
  if (seen_ == 0)  // empty lines before a request are let pass (RFC 9112, 2.2), and are no part of one
    while (input_.compare(taken_, 2, "\r\n") == 0) taken_ += 2;
  if (taken_ == input_.size()) return;
  const char* why = nullptr;
  const std::string_view left = std::string_view(input_).substr(taken_);
  const Parsed parsed = parse_head(left, seen_, head_, why);
  const size_t size = parsed == Parsed::more ? left.size() : head_.size;
  if (size > front_.settings_.head_bytes_max)
    return refuse(431, "header_too_large",
                  "a request head has at most " + std::to_string(front_.settings_.head_bytes_max) + " bytes", now_s);
  if (parsed == Parsed::more) return;
  if (parsed == Parsed::bad) return refuse(400, "protocol", std::string("this is not HTTP/1.1: ") + why, now_s);
  taken_ += head_.size;
  front_.requests_.fetch_add(1, std::memory_order_relaxed);
  keeps_alive_ = head_.keeps_alive;
  if (!is_authorised()) {
    if (!is_anonymous_s3()) return refuse(401, "no_token", "a bearer token is needed", now_s);
    principal_ = Rules::UNPROVEN;  // the back refuses it in S3's words
    is_remembered_ = false;
  }
  since_s_ = now_s;
  if (!head_.has_body() && answer_hit(now_s)) {
    if (!keeps_alive_ && state_ == State::head) closes_ = true;
    return;
  }
  ask_back(now_s);
}

// What this is not to answer.
void Connection::ask_back(double now_s) {
  asked_ = Asked{};
  asked_.method = head_.method;
  asked_.target = head_.target;
  for (const Header& header : head_.headers)
    asked_.headers.emplace_back(lower_of(header.name), std::string(header.value));
  asked_.principal = rules_->id_of(principal_ == Rules::NOBODY ? Rules::UNPROVEN : principal_);
  asked_.is_near = is_near_;
  asked_.peer = peer_;
  if (tls_) asked_.certificate = tls_->peer();
  if (!head_.has_body()) return dispatch(now_s);
  chunks_ = ChunkReader();
  // Of whom it is not known who they are the back judges the head before it asks for anything.
  const bool is_gathered = asked_.target.compare(0, front_.settings_.gathered.size(), front_.settings_.gathered) == 0;
  if (!is_gathered || asked_.principal == Rules::UNPROVEN) {
    is_streamed_ = true;
    owes_continue_ = head_.expects_continue;
    window_bytes_ = streamed_bytes_ = 0;
    waited_s_ = 0;
    body_left_ = head_.content_length;
    asked_.body_bytes = head_.is_chunked ? -1 : static_cast<int64_t>(head_.content_length);
    return dispatch(now_s);
  }
  if (head_.content_length > front_.settings_.body_bytes_max)
    return refuse(413, "too_large",
                  "a request body has at most " + std::to_string(front_.settings_.body_bytes_max) + " bytes", now_s);
  if (head_.expects_continue) put_text("HTTP/1.1 100 Continue\r\n\r\n", false);
  body_.clear();
  state_ = State::body;
  body_since_s_ = now_s;
}

void Connection::read_body(double now_s) {
  const std::string_view left = std::string_view(input_).substr(taken_);
  since_s_ = now_s;
  bool is_done;
  if (head_.is_chunked) {
    taken_ += chunks_.take(left, body_);
    if (chunks_.is_bad()) return refuse(400, "protocol", "the chunks of the body cannot be read", now_s);
    is_done = chunks_.is_done();
  } else {
    const size_t part = std::min<size_t>(left.size(), head_.content_length - body_.size());
    body_.append(left.substr(0, part));
    taken_ += part;
    is_done = body_.size() == head_.content_length;
  }
  if (body_.size() > front_.settings_.body_bytes_max)
    return refuse(413, "too_large",
                  "a request body has at most " + std::to_string(front_.settings_.body_bytes_max) + " bytes", now_s);
  if (!is_done) return;
  asked_.body = std::move(body_);
  body_ = {};
  return dispatch(now_s);
}

// A part of the body that the back waits for. What cannot be understood ends the connection: of that the back is told.
void Connection::stream_body(double now_s) {
  const std::string_view left = std::string_view(input_).substr(taken_, window_bytes_);
  since_s_ = now_s;
  std::string part;
  bool is_last;
  if (head_.is_chunked) {
    taken_ += chunks_.take(left, part);
    if (chunks_.is_bad()) {
      is_lost_ = true;
      return;
    }
    is_last = chunks_.is_done();
  } else {
    part = left.substr(0, std::min<uint64_t>(left.size(), body_left_));
    taken_ += part.size();
    body_left_ -= part.size();
    is_last = body_left_ == 0;
  }
  if (part.empty() && !is_last) return;
  window_bytes_ -= part.size();
  streamed_bytes_ += part.size();
  if (window_bytes_ == 0) waited_s_ += now_s - window_since_s_;
  is_streamed_ = !is_last;
  front_.post(Event{Event::Kind::body, id_, {}, std::move(part), is_last});
}

void Connection::dispatch(double now_s) {
  state_ = State::back;
  since_s_ = now_s;
  front_.handed_over_.fetch_add(1, std::memory_order_relaxed);
  front_.post(Event{Event::Kind::asked, id_, std::move(asked_)});
}

bool Connection::is_authorised() {
  const uint64_t version = front_.rules_.version();
  if (version != rules_version_) {
    rules_ = front_.rules_.get();
    rules_version_ = version;
    signatures_.forget();
    is_remembered_ = false;
  }
  const bool only_reads = (head_.method == "GET" || head_.method == "HEAD") && !head_.has_body();
  if (only_reads && head_.target.substr(0, front_.settings_.links.size()) == front_.settings_.links) {
    is_remembered_ = false;
    principal_ = Rules::UNPROVEN;
    find_tenant();
    return true;
  }
  // Stoker's own routes are for bearer tokens.
  const bool is_own = head_.target.substr(0, front_.settings_.gathered.size()) == front_.settings_.gathered;
  if (!is_own && is_signed(head_)) {
    is_remembered_ = false;
    principal_ = signatures_.principal(*rules_, head_, static_cast<int64_t>(::time(nullptr)));
    find_tenant();
    return true;
  }
  if (is_remembered_ && equal_in_constant_time(head_.authorization, authorization_))
    return principal_ != Rules::NOBODY || is_open();
  is_remembered_ = true;
  authorization_ = head_.authorization;
  principal_ = rules_->principal(authorization_, tls_ ? tls_->peer() : std::string());
  find_tenant();
  return principal_ != Rules::NOBODY || is_open();
}

bool Connection::is_open() const {
  const std::string_view path = head_.target.substr(0, head_.target.find('?'));
  const auto& open = front_.settings_.open_targets;
  return !head_.has_body() && std::find(open.begin(), open.end(), path) != open.end();
}

void Connection::find_tenant() {
  const std::shared_ptr<Tenant>* found = rules_->tenant(principal_);
  if (!found) found = &front_.nobody_;
  if (*found != tenant_) tenant_ = *found;
}

void Connection::refuse(int status, const char* code, const std::string& message, double now_s) {
  loop_.tally.refused(status);
  const std::string body = std::string("{\"code\":\"") + code + "\",\"message\":\"" + message + "\"}";
  put_text("HTTP/1.1 " + std::to_string(status) + " " + reason_of(status) +
               "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
               "\r\nConnection: close\r\n\r\n" + body,
           false);
  state_ = State::ending;
  since_s_ = now_s;
  taken_ = input_.size();
}

// -- what the back says -----------------------------------------------------------------------------------------

void Connection::more(uint64_t bytes, double now_s) {
  if (state_ != State::back || !is_streamed_) return;
  if (owes_continue_) put_text("HTTP/1.1 100 Continue\r\n\r\n", false);
  owes_continue_ = false;
  if (window_bytes_ == 0) window_since_s_ = now_s;
  window_bytes_ += bytes;
  since_s_ = now_s;
}

void Connection::finish(double now_s) {
  if (state_ != State::back) return;
  if (is_streamed_) closes_ = true;  // where the next request would begin is not known
  is_streamed_ = false;
  state_ = State::head;
  since_s_ = now_s;
  if (!keeps_alive_ || front_.drains_.load(std::memory_order_relaxed)) closes_ = true;
}

void Connection::notify(uint64_t unsent_bytes_max) {
  if (unsent_bytes_ <= unsent_bytes_max) front_.post(Event{Event::Kind::drained, id_, {}});
  else notify_at_ = static_cast<int64_t>(unsent_bytes_max);
}

void Connection::drain() {
  if (state_ == State::head) closes_ = true;
}

Connection::Step Connection::on_tick(double now_s) {
  const FrontSettings& limits = front_.settings_;
  double limit = 0;
  double since = since_s_;
  if (unsent_bytes_) {
    limit = limits.send_s;
    if (progress_s_ == 0 || is_throttled_ || waits_for_inflow_) progress_s_ = now_s;  // it was held back here
    since = progress_s_;
  } else if (state_ == State::ending) {
    limit = LINGER_S;
    if (shut_since_s_ > 0 && now_s - shut_since_s_ > THROW_S) since = shut_since_s_;
  } else if (state_ == State::head) {
    if (input_.empty() && rules_version_ != front_.rules_.version()) {
      rules_.reset();  // else each idle connection would keep those of its last request
      rules_version_ = 0;
      is_remembered_ = false;
    }
    limit = input_.empty() && (!tls_ || tls_->is_open()) ? limits.idle_s : limits.head_s;
  } else if (state_ == State::body) {
    limit = limits.body_s;
    if (now_s - body_since_s_ > BODY_TIMES * limit) since = body_since_s_;
  } else if (is_streaming()) {
    limit = limits.body_s;
    const double waited_s = waited_s_ + now_s - window_since_s_;
    if (waited_s > BODY_TIMES * limit + static_cast<double>(streamed_bytes_) / limits.body_bytes_per_s_min)
      since = now_s - limit - 1;
  } else {
    return Step::go_on;  // the back is at work, and has its own patience
  }
  if (now_s - since <= limit) return Step::go_on;
  if (state_ != State::ending || unsent_bytes_) front_.timed_out_.fetch_add(1, std::memory_order_relaxed);
  if (state_ == State::back) return Step::close;
  const bool is_late = state_ == State::body || (state_ == State::head && !input_.empty());
  if (unsent_bytes_ || !is_late) return Step::close;
  refuse(408, "timeout", "the request took too long to come", now_s);
  return Step::again;
}

}  // namespace stoker
