// What goes out on a connection.
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "connection.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr size_t TEXT_SIZE = 64 * 1024;  // up to here what is said is put together
constexpr uint64_t TURN_BYTES = 256 * 1024;  // for one connection, before the others have their turn
constexpr uint64_t LIMITED_TURN_BYTES = 64 * 1024;  // so that none takes all that may go out

}  // namespace

void Connection::put(Piece piece) {
  if (piece.size == 0) return;
  if (unsent_bytes_ == 0) progress_s_ = 0;
  unsent_bytes_ += piece.size;
  piece.tenant = tenant_;
  out_.push_back(std::move(piece));
}

void Connection::put_text(std::string_view bytes, bool is_data) {
  const bool goes_with_last = !out_.empty() && out_.back().is_text() && out_.back().is_data == is_data &&
                              out_.back().tenant == tenant_;
  if (!goes_with_last || out_.back().bytes.size() >= TEXT_SIZE) {
    put(Piece{std::string(bytes), nullptr, 0, bytes.size(), is_data});
    return;
  }
  out_.back().bytes.append(bytes);
  out_.back().size += bytes.size();
  unsent_bytes_ += bytes.size();
}

// At once where nothing is in the way, without a queue and a copy.
void Connection::send_text(std::string_view bytes, bool is_data) {
  const bool is_last = taken_ == input_.size();  // else what follows goes with it
  if (unsent_bytes_ == 0 && is_writable_ && is_last && !is_limited()) {
    const ssize_t sent = tls_ ? tls_->write(bytes.data(), bytes.size())
                              : ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      front_.sent_bytes_.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
      tenant_->sent_bytes.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      is_writable_ = false;
    } else if (errno != EINTR) {
      is_lost_ = true;
      return;
    }
  }
  if (!bytes.empty()) put_text(bytes, is_data);
}

bool Connection::is_limited() const { return rate_.is_limited() || shares_limit(); }

bool Connection::shares_limit() const { return front_.egress_.is_limited() || tenant()->rate.is_limited(); }

void Connection::say(std::string bytes, bool is_data, std::shared_ptr<Passing> passing) {
  const uint64_t size = bytes.size();
  owes_continue_ = false;  // it would stand in the answer
  if (size < 4096 && !passing) put_text(bytes, is_data);
  else put(Piece{std::move(bytes), nullptr, 0, size, is_data, nullptr, std::move(passing)});
}

void Connection::send_file(std::shared_ptr<File> file, uint64_t offset, uint64_t size) {
  put(Piece{{}, std::move(file), offset, size, true});
}

void Connection::send_inflow(std::shared_ptr<Inflow> inflow, uint64_t offset, uint64_t size) {
  put(Piece{{}, nullptr, offset, size, true, std::move(inflow)});
}

// How much of a piece is there, and its bytes if they are still coming in. One that was kept in a file meanwhile is sent
// from there.
uint64_t Connection::come_in(Piece& piece, std::shared_ptr<char[]>& bytes) {
  while (piece.inflow) {
    Inflow::View view = piece.inflow->view();
    if (view.file) {
      piece.file = std::move(view.file);
      piece.offset += view.offset;
      piece.inflow.reset();
    } else if (view.filled > piece.offset) {
      bytes = std::move(view.bytes);
      return std::min(piece.size, view.filled - piece.offset);
    } else if (piece.inflow->wait(front_.weak_from_this(), id_, piece.offset)) {
      waits_for_inflow_ = true;
      return 0;
    }
  }
  return piece.size;
}

void Connection::wake() { is_throttled_ = false; }

uint64_t Connection::allowance(uint64_t wanted, const std::shared_ptr<Tenant>& tenant, double now_s) {
  const uint64_t own = rate_.take(wanted, now_s);
  const uint64_t shared = own ? tenant->rate.take(own, now_s) : 0;
  const uint64_t granted = shared ? front_.egress_.take(tenant, shared, now_s) : 0;
  is_starved_ = own && !granted;
  rate_.give(own - granted);
  tenant->rate.give(shared - granted);
  return granted;
}

void Connection::count_waiting(bool waits, Tenant& tenant, double now_s) {
  if (waits == (throttled_since_s_ != 0)) return;
  if (!waits) tenant.throttled_ns.fetch_add(static_cast<uint64_t>((now_s - throttled_since_s_) * 1e9), std::memory_order_relaxed);
  throttled_since_s_ = waits ? now_s : 0;
}

// One record.
ssize_t Connection::send_sealed(const Piece& piece, const char* bytes, uint64_t limit) {
  char record[TlsSession::RECORD_BYTES];
  const size_t size = static_cast<size_t>(std::min<uint64_t>({piece.size, limit, sizeof record}));
  if (!piece.file) return tls_->write((bytes ? bytes : piece.bytes.data()) + piece.offset, size);
  const ssize_t got = ::pread(piece.file->fd, record, size, static_cast<off_t>(piece.offset));
  if (got == static_cast<ssize_t>(size)) return tls_->write(record, size);
  if (got >= 0) errno = EIO;  // the file is shorter than it was
  return -1;
}

ssize_t Connection::send_piece(Piece& piece, const char* bytes, bool more, uint64_t limit) {
  if (tls_) return send_sealed(piece, bytes, limit);
  if (piece.file) {
    auto offset = static_cast<off_t>(piece.offset);
    const ssize_t sent = ::sendfile(fd_, piece.file->fd, &offset, std::min(piece.size, limit));
    if (sent == 0) errno = EIO;  // the file is shorter than it was
    return sent == 0 ? -1 : sent;
  }
  const size_t size = static_cast<size_t>(std::min(piece.size, limit));
  const char* first = (bytes ? bytes : piece.bytes.data()) + piece.offset;
  const int flags = MSG_NOSIGNAL | (more ? MSG_MORE : 0);
  if (!piece.passing) return ::send(fd_, first, size, flags);
  const ssize_t sent = piece.passing->send(fd_, first, size, flags);
  if (sent > 0) piece.passing.reset();
  return sent;
}

// False if the reader is gone.
bool Connection::flush(double now_s) {
  uint64_t turn = is_limited() ? LIMITED_TURN_BYTES : TURN_BYTES;
  if (progress_s_ == 0) progress_s_ = now_s;
  while (!out_.empty() && turn && is_writable_) {
    Piece& piece = out_.front();
    std::shared_ptr<char[]> coming;
    const uint64_t there = come_in(piece, coming);
    if (there == 0) break;
    // What was begun of a record is paid for, and is ended as it is.
    const uint64_t begun = tls_ ? tls_->begun_bytes() : 0;
    uint64_t limit = begun ? begun : std::min(there, turn);
    if (tls_) limit = std::min<uint64_t>(limit, TlsSession::RECORD_BYTES);
    if (piece.is_data && !begun) {
      limit = allowance(limit, piece.tenant, now_s);
      count_waiting(limit == 0, *piece.tenant, now_s);
      is_throttled_ = limit == 0;
      if (is_throttled_) break;
    }
    const ssize_t sent = send_piece(piece, coming.get(), out_.size() > 1 && there == piece.size, limit);
    if (piece.is_data && sent < static_cast<ssize_t>(limit)) {
      const uint64_t paid = tls_ ? tls_->begun_bytes() : 0;
      const uint64_t unused = limit - std::max(static_cast<uint64_t>(std::max<ssize_t>(sent, 0)), paid);
      rate_.give(unused);
      piece.tenant->rate.give(unused);
      front_.egress_.give(piece.tenant, unused);
    }
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) {
        if (piece.file && errno != EPIPE && errno != ECONNRESET)
          front_.post(Event{Event::Kind::broken, piece.file->container, {}});
        return false;
      }
      is_writable_ = false;
      break;
    }
    const auto bytes = static_cast<uint64_t>(sent);
    piece.offset += bytes;
    piece.size -= bytes;
    unsent_bytes_ -= bytes;
    turn -= std::min(turn, bytes);
    progress_s_ = now_s;
    front_.sent_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    piece.tenant->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
    if (hits_untold_) told_first_bytes();
    if (piece.size == 0) out_.pop_front();  // else it is tried again: only EAGAIN says that the socket is full
  }
  if (notify_at_ >= 0 && unsent_bytes_ <= static_cast<uint64_t>(notify_at_)) {
    notify_at_ = -1;
    front_.post(Event{Event::Kind::drained, id_, {}});
  }
  if (unsent_bytes_) return true;
  if (state_ == State::head && input_.empty()) since_s_ = now_s;
  return true;
}

}  // namespace stoker
