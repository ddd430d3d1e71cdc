// One thread of the front: its connections, and what the back says to them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "connection.h"
#include "peer_links.h"
#include "tally.h"

namespace stoker {

// Rendered headers of the objects that were asked for last.
class HeadCache {
 public:
  struct Entry {
    Hash128 id;
    uint64_t text_at = 0;
    uint32_t tag = 0;
    std::string headers;
    bool is_told = false;  // what the origin says of the object besides
  };
  Entry& slot(const Hash128& id) { return entries_[id.low % SIZE]; }

 private:
  static constexpr size_t SIZE = 4096;
  std::vector<Entry> entries_{SIZE};
};

// A part of an answer: bytes, and then a piece of a file, if there is one.
struct Part {
  std::string bytes;
  std::shared_ptr<File> file;
  uint64_t offset = 0;
  uint64_t size = 0;
};

struct Command {
  enum class Kind { say, file, inflow, parts, wake, charge, more, finish, drop, notify, drain } kind = Kind::say;
  uint64_t connection = 0;
  std::string bytes;
  bool is_data = false;
  bool is_last = false;  // of what is said
  std::shared_ptr<File> file;
  std::shared_ptr<Inflow> inflow;
  uint64_t offset = 0;
  uint64_t size = 0;
  std::vector<Part> parts;
  std::shared_ptr<Passing> passing;  // goes with the first byte
  std::shared_ptr<Tenant> tenant{};
};

double clock_s();
double boot_clock_s();  // goes on while the machine is suspended

class Loop {
 public:
  Loop(Front& front, uint64_t number);
  ~Loop();
  Loop(const Loop&) = delete;

  void start();
  void stop();
  bool post(Command command);
  void count_hit(uint16_t bucket, uint64_t bytes);
  void count_handed_on(uint16_t bucket, uint64_t bytes);
  std::unordered_map<uint16_t, HitFigures> take_hits();

  Tally tally;
  HeadCache heads;
  std::string scratch;  // for an answer that is being put together
  // As the back has told of it last.
  const Fleet& fleet();
  bool ask(const Peer& peer, PeerQuestion& question, double now_s) { return peers_->ask(peer, question, now_s); }

 private:
  void run();
  void accept(int listening, double now_s);
  void on_ready(uint64_t id, uint32_t events, double now_s);
  void run_commands(double now_s);
  void run_again(double now_s);
  void take_from_peers(double now_s);
  void carry_out(Command& command, double now_s);
  void settle(Connection& connection, Connection::Step step);
  void close(Connection& connection);
  void list(Connection& connection);
  void wake_throttled(double now_s);
  int wait_ms(double now_s) const;

  Front& front_;
  const uint64_t number_;
  uint64_t next_id_;
  int epoll_ = -1;
  int wake_ = -1;
  std::unique_ptr<PeerLinks> peers_;
  std::shared_ptr<const Fleet> fleet_;
  uint64_t fleet_version_ = 0;
  std::thread thread_;
  std::atomic<bool> stops_{false};
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<uint64_t> throttled_;  // who waited longest first
  double throttled_until_s_ = 0;
  std::vector<uint64_t> again_;
  double ticked_s_ = 0;

  std::mutex commands_mutex_;
  std::vector<Command> commands_;
  std::mutex hits_mutex_;
  std::unordered_map<uint16_t, HitFigures> hits_;
};

}  // namespace stoker
