// The front: HTTP/1.1 on threads of its own. Answers hits, and hands everything else to the back, which answers through
// `say`, `send_file` and `finish` on the same connection. Never takes the interpreter's lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "access.h"
#include "files.h"
#include "fleet.h"
#include "index.h"
#include "inflow.h"
#include "limits.h"
#include "passing.h"
#include "tally.h"
#include "tls.h"

namespace stoker {

struct FrontSettings {
  size_t connections_max = 16384;
  size_t head_bytes_max = 32 * 1024;
  size_t body_bytes_max = 16 * 1024 * 1024;
  double head_s = 15;   // from a request's first byte to the end of its head
  double body_s = 60;   // without a byte of the body
  double body_bytes_per_s_min = 4096;  // of one that the back waits for, on the whole
  // Bodies of requests to these routes are gathered before the back hears of them; all others come as it asks for them.
  std::string gathered = "/-/";
  std::vector<std::string> open_targets;  // which need no token: the back hears of them as of one who is unproven
  // What is asked below this, without a body, shows no credential: the back finds out what it opens.
  std::string links = "/-/link/";
  double idle_s = 120;  // between requests
  double send_s = 60;   // without a byte taken
  double egress_bytes_per_s = 0;      // of data, all connections together; 0: no limit
  double connection_bytes_per_s = 0;  // of data, each connection
  int64_t passing_max = 1024;  // descriptors that are on their way to readers
  uint64_t handed_bytes_max = 1024 * 1024;  // of a part of an object that is asked of another server here
  uint64_t handing_bytes_max = 64 * 1024 * 1024;  // of all those that have not gone out; one tenant has at most half of it
  double peer_silence_s = 2;  // that a server may be silent which was asked here
  std::vector<std::string> domains;  // below which a host names a bucket, in lower case: for the back
  int threads = 1;
};

// A request that the front does not answer.
struct Asked {
  std::string method;
  std::string target;
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  int64_t body_bytes = 0;  // of a body that comes in parts, once the back asks for it; -1: nobody knows how many
  int principal = Rules::NOBODY;
  bool is_near = false;  // it came by a Unix socket
  std::string certificate{};  // whom the peer's certificate names, see `TlsSession::peer`
  std::string peer{};  // its address; empty: it came by a Unix socket
};

struct Event {
  // broken: a container's file, whose number stands for the connection's, is gone, cannot be read or is too short.
  // body: a part of one that the back asked for; `is_last` of them.
  enum class Kind { asked, gone, drained, broken, body } kind = Kind::asked;
  uint64_t connection = 0;
  Asked asked;
  std::string bytes{};
  bool is_last = false;
};

struct Figures {
  uint64_t accepted = 0, refused = 0, requests = 0, handed_over = 0, sent_bytes = 0, timed_out = 0;
  uint64_t connections = 0, waiting = 0;
};

// Many objects, or parts of them. `ranges`: for each part the number of its key (u32, big endian), and where it begins and
// ends (u64). `versions`: of the keys; empty ones, or none at all: whatever is there.
struct Reads {
  std::vector<std::string> keys;
  std::optional<std::string> ranges{};
  std::vector<std::string> versions{};
};

// One answer to them; see `Front::answer_batch`.
struct Batch {
  bool is_answered = false;
  uint64_t size_bytes = 0;  // of the objects or parts
  uint64_t places = 0;      // that were named instead of sent
  std::vector<uint32_t> large;  // containers of large objects among them
};

struct HitFigures {
  uint64_t hits = 0, hit_bytes = 0;
  uint64_t handed_on = 0, handed_on_bytes = 0;  // what others were asked for
};

struct TenantFigures {
  uint64_t hits = 0, sent_bytes = 0;
  double throttled_s = 0;  // of all connections together
};

struct Command;
class Loop;

class Front : public std::enable_shared_from_this<Front> {
 public:
  Front(std::shared_ptr<Index> index, std::shared_ptr<Files> files, const FrontSettings& settings);
  ~Front();
  Front(const Front&) = delete;

  // Takes over a listening socket, which does not block. Before `start`.
  void listen(int fd);
  void start();
  // Takes no more connections, ends idle ones and lets the others come to the end of what was asked.
  void drain();
  // Ends all at once.
  void stop();

  void set_rules(std::shared_ptr<const Rules> rules) { rules_.set(std::move(rules)); }
  std::shared_ptr<const Rules> rules() const { return rules_.get(); }
  // Connections by TCP speak TLS from now on, and only that; those that are there go on as they began.
  void set_tls(std::shared_ptr<const TlsContext> tls) {
    const std::lock_guard<std::mutex> lock(tls_mutex_);
    tls_ = std::move(tls);
  }
  void set_fleet(std::shared_ptr<const Fleet> fleet) { fleet_.set(std::move(fleet)); }
  // The same for each name, for ever; it has this rate from now on.
  std::shared_ptr<Tenant> tenant(const std::string& name, double bytes_per_s);
  void set_now(uint32_t now_s) { now_s_.store(now_s, std::memory_order_relaxed); }
  // Until then, by the machine's steady clock, hits of blobs are answered here; later the back has to make sure first.
  // Until then, by the clock that also goes on while the machine is suspended, blobs that were asked about since `from_s`
  // may be answered with. Who reads the one that is new reads the other one, too.
  void set_blobs_until(double until_s, uint32_t from_s) {
    blobs_from_s_.store(from_s, std::memory_order_release);
    blobs_until_s_.store(until_s, std::memory_order_release);
  }

  // -- the back's side; from any thread
  // Readable while there are events.
  int event_fd() const { return event_fd_; }
  std::vector<Event> take(size_t limit);
  // A connection that is gone hears nothing; of that the back is told by an event.
  // `is_last`: with that it is finished.
  bool say(uint64_t connection, std::string bytes, bool is_data, bool is_last = false);
  bool send_file(uint64_t connection, std::shared_ptr<File> file, uint64_t offset, uint64_t size);
  // A part of what is still coming in, as it comes; if it never does, the connection has to be dropped.
  bool send_inflow(uint64_t connection, std::shared_ptr<Inflow> inflow, uint64_t offset, uint64_t size);
  // What it waits for has come.
  bool wake(uint64_t connection);
  // Answers with all these, in frames (`wire/cache_batch.py`), if each is here, fresh, and of the version that is wanted;
  // else nothing is said. Of those that the reader can read itself the place is named; it may read all of the bucket.
  Batch answer_batch(uint64_t connection, const Reads& reads, const BucketRule& rule, const Wanted& wanted);
  // Passes a descriptor of a container of this bucket, of which the peer may read everything, with a frame that says so
  // between `before` and `after`. False, and nothing is said, if it cannot be opened, or too many are on their way.
  bool pass(uint64_t connection, uint16_t bucket, uint32_t container, std::string before, const std::string& after);
  // Tells what this front has passed from what others have, under the same numbers.
  const std::string& instance() const { return instance_; }
  // So many more bytes of the request's body may come.
  bool more(uint64_t connection, uint64_t bytes);
  bool finish(uint64_t connection);
  bool drop(uint64_t connection);
  // The back has found out who asks: on whose account the answer goes.
  bool charge(uint64_t connection, const std::string& tenant);
  // Tell the back (Kind::drained) once at most so many bytes are unsent.
  bool notify(uint64_t connection, uint64_t unsent_bytes_max);

  Figures figures() const;
  Tally::Sums tally() const;
  // By name; an empty one stands for all of whom it is not known who they are.
  std::map<std::string, TenantFigures> tenant_figures();
  // Hits since the last call, by the bucket's number.
  std::unordered_map<uint16_t, HitFigures> take_hits();

 private:
  friend class Loop;
  friend class Connection;
  void post(Event event);
  std::shared_ptr<const TlsContext> tls() const {
    const std::lock_guard<std::mutex> lock(tls_mutex_);
    return tls_;
  }
  bool order(Command command);
  bool add(Passing& passing, uint16_t bucket, uint32_t container);
  // Whether a packed object is what was written; it is read and compared where nobody has done that since the start.
  bool is_right(const Object& object, uint16_t bucket, std::string_view key, const File& file);
  bool look_up_all(const Reads& reads, const BucketRule& rule, uint32_t now, std::vector<Object>& objects) const;

  std::shared_ptr<Index> index_;
  std::shared_ptr<Files> files_;
  const FrontSettings settings_;
  RulesHolder rules_;
  FleetHolder fleet_;
  const std::shared_ptr<std::atomic<uint64_t>> handing_bytes_{std::make_shared<std::atomic<uint64_t>>(0)};
  mutable std::mutex tls_mutex_;
  std::shared_ptr<const TlsContext> tls_;
  std::atomic<uint32_t> now_s_{0};
  std::atomic<double> blobs_until_s_{0};
  std::atomic<uint32_t> blobs_from_s_{0};
  FairShare egress_;
  const std::shared_ptr<Tenant> nobody_{std::make_shared<Tenant>(0)};  // for all of whom it is not known who they are
  std::mutex tenants_mutex_;
  std::map<std::string, std::shared_ptr<Tenant>> tenants_;
  std::vector<int> listening_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<uint64_t> connections_{0}, accepted_{0}, refused_{0}, requests_{0}, handed_over_{0}, sent_bytes_{0},
      timed_out_{0};
  std::atomic<bool> drains_{false};
  const std::string instance_;
  const std::shared_ptr<Counter> passing_{std::make_shared<Counter>(0)};

  int event_fd_ = -1;
  mutable std::mutex events_mutex_;
  std::deque<Event> events_;
};

}  // namespace stoker
