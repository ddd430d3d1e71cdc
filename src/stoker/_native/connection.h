// One connection: what came in and is not understood yet, what is to go out, and who is at work in between.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "front.h"
#include "http.h"
#include "peer_links.h"
#include "sigv4.h"
#include "tls.h"

namespace stoker {

class Connection {
 public:
  enum class Step { go_on, again, close };  // again: there is more to do, after the others have had their turn

  Connection(Front& front, Loop& loop, uint64_t id, int fd, bool is_near, double now_s);
  ~Connection();
  Connection(const Connection&) = delete;

  // All that comes and goes is sealed from now on. Before anything else.
  void seal(std::unique_ptr<TlsSession> tls) { tls_ = std::move(tls); }

  // Who is at the other end. Before anything else.
  void set_peer(const sockaddr_storage& peer);

  // What the loop calls. `close`: it is over, and is to be deleted.
  void on_ready(uint32_t events);
  Step advance(double now_s);
  Step on_tick(double now_s);
  // What the back says.
  void say(std::string bytes, bool is_data, std::shared_ptr<Passing> passing = nullptr);
  void send_file(std::shared_ptr<File> file, uint64_t offset, uint64_t size);
  void send_inflow(std::shared_ptr<Inflow> inflow, uint64_t offset, uint64_t size);
  // What it waits for has come in.
  void go_on() { waits_for_inflow_ = false; }
  void more(uint64_t bytes, double now_s);
  void finish(double now_s);
  void notify(uint64_t unsent_bytes_max);
  void drain();
  // What another server has said, or has failed to say.
  void take_from_peer(PeerAnswer& answer, double now_s);

  uint64_t id() const { return id_; }
  int fd() const { return fd_; }
  // It may send again.
  void wake();
  bool is_throttled() const { return is_throttled_; }
  // By what it may send together with others, not by its own rate.
  bool is_starved() const { return is_starved_; }
  // What it sends is counted together with what others send.
  bool shares_limit() const;
  const Tenant* tenant() const { return (out_.empty() ? tenant_ : out_.front().tenant).get(); }
  void charge(std::shared_ptr<Tenant> tenant) { tenant_ = std::move(tenant); }
  uint64_t unsent_bytes() const { return unsent_bytes_; }
  bool is_listed = false;  // for another turn; the loop's
  bool is_queued = false;  // until it may send again; the loop's

 private:
  // peer: another server is asked. ending: what is unsent still goes out, what comes is thrown away.
  enum class State { head, body, back, peer, ending };
  struct Piece {
    std::string bytes;
    std::shared_ptr<File> file;
    uint64_t offset = 0;  // of what is left
    uint64_t size = 0;
    bool is_data = false;
    std::shared_ptr<Inflow> inflow{};
    std::shared_ptr<Passing> passing{};  // goes with its first byte
    std::shared_ptr<Tenant> tenant{};    // on whose account it goes
    std::shared_ptr<Reserved> reserved{};  // what it takes of memory
    bool is_text() const { return !file && !inflow; }
  };

  bool wants_bytes() const;
  bool has_work() const;
  bool receive(double now_s);
  void work(double now_s);
  void read_head(double now_s);
  void read_body(double now_s);
  void stream_body(double now_s);
  bool is_elsewhere() const { return state_ == State::back || state_ == State::peer; }
  bool is_streaming() const { return state_ == State::back && is_streamed_ && window_bytes_ != 0; }
  void ask_back(double now_s);
  void dispatch(double now_s);
  bool answer_hit(double now_s);
  const BucketRule* rule_of_target(bool is_head, uint32_t& from_s);
  bool names_bucket_by_host() const;
  bool is_anonymous_s3() const;
  const std::string* headers_of(const Object& object, uint16_t bucket);
  bool is_told(const Object& object) const;
  bool agrees(std::string_view headers);
  bool hand_on(const Object& object, const BucketRule& rule, const ByteRange& range, const std::string& head,
               double now_s);
  bool put_piece(const Object& object, uint16_t bucket, uint64_t start, uint64_t stop, std::string& head);
  void refuse(int status, const char* code, const std::string& message, double now_s);
  bool flush(double now_s);
  bool can_send() const;
  uint64_t come_in(Piece& piece, std::shared_ptr<char[]>& bytes);
  ssize_t send_piece(Piece& piece, const char* bytes, bool more, uint64_t limit);
  ssize_t send_sealed(const Piece& piece, const char* bytes, uint64_t limit);
  uint64_t allowance(uint64_t wanted, const std::shared_ptr<Tenant>& tenant, double now_s);
  void count_waiting(bool waits, Tenant& tenant, double now_s);
  void put(Piece piece);
  void put_text(std::string_view bytes, bool is_data);
  void send_text(std::string_view bytes, bool is_data);
  bool is_limited() const;
  bool is_authorised();
  void find_tenant();
  bool is_open() const;
  void answered_hit(bool is_head, bool is_part, double now_s);
  void told_first_bytes();

  Front& front_;
  Loop& loop_;
  const uint64_t id_;
  const int fd_;
  const bool is_near_;
  std::unique_ptr<TlsSession> tls_;  // none: it is plain
  std::string peer_;                 // its address
  State state_ = State::head;
  std::string input_;
  size_t taken_ = 0;  // of `input_`
  size_t seen_ = 0;
  Head head_;
  std::string body_;
  ChunkReader chunks_;
  Asked asked_;
  std::string handed_on_;        // the head of what another server is asked for
  uint16_t handed_bucket_ = 0;   // the number of its bucket
  uint64_t handed_bytes_ = 0;    // of the part
  bool is_streamed_ = false;    // the body, to the back; it is not over
  bool owes_continue_ = false;  // the peer waits to be told that its body is wanted
  uint64_t window_bytes_ = 0;   // of the body that the back waits for
  uint64_t body_left_ = 0;      // of one whose length is known
  bool keeps_alive_ = true;
  bool closes_ = false;    // once all is sent
  bool has_ended_ = false;  // the peer sends no more
  bool ends_soon_ = false;  // it has said so, behind what is still to be read
  bool is_lost_ = false;    // the socket is broken
  bool is_readable_ = true;
  bool is_writable_ = true;
  bool is_looked_at_ = true;  // all of `input_`, and more is needed
  bool is_shut_ = false;      // it was told that nothing more comes

  std::deque<Piece> out_;
  uint64_t unsent_bytes_ = 0;
  int64_t notify_at_ = -1;
  uint64_t hits_untold_ = 0;  // of whose answers nothing has gone out
  double hits_since_s_ = 0;
  TokenBucket rate_;
  bool is_throttled_ = false;
  double throttled_since_s_ = 0;
  bool is_starved_ = false;
  bool waits_for_inflow_ = false;

  uint64_t rules_version_ = 0;
  std::shared_ptr<const Rules> rules_;
  std::string authorization_;    // of the last bearer token
  bool is_remembered_ = false;   // that `principal_` is of that one
  int principal_ = Rules::NOBODY;
  std::shared_ptr<Tenant> tenant_;  // on whose account it sends what is said from now on
  Signatures signatures_;
  Target target_;

  double since_s_;         // of the state that it is in, or of the last byte of a body
  double body_since_s_ = 0;
  double window_since_s_ = 0;    // when the back began to wait for a part of the body
  double waited_s_ = 0;          // by the back, for all parts before
  uint64_t streamed_bytes_ = 0;  // of the body
  double shut_since_s_ = 0;
  uint64_t thrown_bytes_ = 0;    // since then
  double progress_s_ = 0;  // something was sent
};

}  // namespace stoker
