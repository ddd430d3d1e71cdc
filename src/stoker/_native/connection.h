// One connection: what came in and is not understood yet, what is to go out, and who is at work in between.
#pragma once

#include <sys/types.h>

#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "front.h"
#include "http.h"
#include "sigv4.h"

namespace stoker {

class Connection {
 public:
  enum class Step { go_on, again, close };  // again: there is more to do, after the others have had their turn

  Connection(Front& front, Loop& loop, uint64_t id, int fd, bool is_near, double now_s);
  ~Connection();
  Connection(const Connection&) = delete;

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

  uint64_t id() const { return id_; }
  int fd() const { return fd_; }
  // It may send again.
  void wake();
  bool is_throttled() const { return is_throttled_; }
  // By what all connections together may send, not by its own rate.
  bool is_starved() const { return is_starved_; }
  uint64_t unsent_bytes() const { return unsent_bytes_; }
  bool is_listed = false;  // for another turn; the loop's
  bool is_queued = false;  // until it may send again; the loop's

 private:
  enum class State { head, body, back, ending };  // ending: what is unsent still goes out, what comes is thrown away
  struct Piece {
    std::string bytes;
    std::shared_ptr<File> file;
    uint64_t offset = 0;  // of what is left
    uint64_t size = 0;
    bool is_data = false;
    std::shared_ptr<Inflow> inflow{};
    std::shared_ptr<Passing> passing{};  // goes with its first byte
    bool is_text() const { return !file && !inflow; }
  };

  bool wants_bytes() const;
  bool has_work() const;
  bool receive(double now_s);
  void work(double now_s);
  void read_head(double now_s);
  void read_body(double now_s);
  void stream_body(double now_s);
  bool is_streaming() const { return state_ == State::back && is_streamed_ && window_bytes_ != 0; }
  void dispatch(double now_s);
  bool answer_hit();
  bool names_bucket_by_host() const;
  const std::string* headers_of(const Object& object, uint16_t bucket);
  bool put_piece(const Object& object, uint64_t start, uint64_t stop, std::string& head);
  void refuse(int status, const char* code, const std::string& message, double now_s);
  bool flush(double now_s);
  bool can_send() const;
  uint64_t come_in(Piece& piece, std::shared_ptr<char[]>& bytes);
  ssize_t send_piece(Piece& piece, const char* bytes, bool more, uint64_t limit);
  uint64_t allowance(uint64_t wanted, double now_s);
  void put(Piece piece);
  void put_text(std::string_view bytes, bool is_data);
  void send_text(std::string_view bytes, bool is_data);
  bool is_limited() const;
  bool is_authorised();

  Front& front_;
  Loop& loop_;
  const uint64_t id_;
  const int fd_;
  const bool is_near_;
  State state_ = State::head;
  std::string input_;
  size_t taken_ = 0;  // of `input_`
  size_t seen_ = 0;
  Head head_;
  std::string body_;
  ChunkReader chunks_;
  Asked asked_;
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
  TokenBucket rate_;
  bool is_throttled_ = false;
  bool is_starved_ = false;
  bool waits_for_inflow_ = false;

  uint64_t rules_version_ = 0;
  std::shared_ptr<const Rules> rules_;
  std::string authorization_;    // of the last bearer token
  bool is_remembered_ = false;   // that `principal_` is of that one
  int principal_ = Rules::NOBODY;
  Signatures signatures_;
  Target target_;

  double since_s_;         // of the state that it is in, or of the last byte of a body
  double body_since_s_ = 0;
  double progress_s_ = 0;  // something was sent
};

}  // namespace stoker
