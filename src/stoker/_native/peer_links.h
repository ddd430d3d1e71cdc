// Kept connections of one thread of the front to the other servers of the fleet, for parts of small objects that lie there.
// What goes wrong in whatever way is told, and nothing is tried again: the back knows what to do.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fleet.h"
#include "limits.h"

namespace stoker {

struct FrontSettings;

// Bytes that answers of peers take of memory until they have gone out, counted together.
class Reserved {
 public:
  Reserved(std::shared_ptr<std::atomic<uint64_t>> all, std::shared_ptr<Tenant> tenant, uint64_t size)
      : all_(std::move(all)), tenant_(std::move(tenant)), size_(size),
        all_bytes_(all_->fetch_add(size, std::memory_order_relaxed) + size),
        tenant_bytes_(tenant_->handing_bytes.fetch_add(size, std::memory_order_relaxed) + size) {}
  ~Reserved() {
    all_->fetch_sub(size_, std::memory_order_relaxed);
    tenant_->handing_bytes.fetch_sub(size_, std::memory_order_relaxed);
  }
  Reserved(const Reserved&) = delete;
  // Whether, when it came, as much was left for others as its tenant had: so there is always something left for them.
  bool is_fair(uint64_t bytes_max) const { return all_bytes_ + tenant_bytes_ <= bytes_max; }

 private:
  std::shared_ptr<std::atomic<uint64_t>> all_;
  std::shared_ptr<Tenant> tenant_;
  const uint64_t size_, all_bytes_, tenant_bytes_;
};

struct PeerQuestion {
  uint64_t connection = 0;    // for whom it is asked
  std::string bucket;
  std::string what;           // of the bucket: a key, and a part of it
  std::string request;        // a head
  std::string answer;         // the head of what the reader is told; the body follows it as it comes
  std::string etag;           // of the version that is wanted
  std::string content_range;  // of the part
  uint64_t size_bytes = 0;    // of the body
  std::shared_ptr<Reserved> reserved;
};

struct PeerAnswer {
  uint64_t connection = 0;
  bool is_whole = false;
  std::string bytes;  // a whole answer, if it is
  std::shared_ptr<Reserved> reserved;
};

class PeerLinks {
 public:
  static constexpr uint64_t LINK = uint64_t{1} << 63;  // what events of its connections are told apart by

  PeerLinks(const FrontSettings& settings, int epoll) : settings_(settings), epoll_(epoll) {}
  ~PeerLinks();
  PeerLinks(const PeerLinks&) = delete;

  // False: it cannot be asked now, and `question` is as it was.
  bool ask(const Peer& peer, PeerQuestion& question, double now_s);
  void on_ready(uint64_t id, uint32_t events, double now_s);
  // Gives up who is silent, and ends what is kept for nothing.
  void on_tick(double now_s);
  // What came since the last call.
  std::vector<PeerAnswer> take() { return std::exchange(answers_, {}); }

 private:
  struct Link {
    uint64_t id = 0;
    int fd = -1;
    std::string peer;
    bool is_open = false;  // the connection is made
    bool is_asked = false;
    bool has_head = false;
    bool has_ended = false;      // the peer sends no more
    bool is_kept_after = false;  // the peer keeps it, once it has answered
    bool is_refused = false;     // of that was told; what comes of the body is thrown away
    size_t sent = 0;             // of the request
    uint64_t left = 0;           // of the body
    double asked_s = 0;
    double progress_s = 0;
    std::string head;
    PeerQuestion question;
  };
  struct Peered {  // of one peer
    std::vector<uint64_t> idle;
    size_t count = 0;
    double progress_s = 0;  // something came from it
    double doubted_until_s = 0;
    std::unordered_map<std::string, double> refused_until_s{};  // by bucket
  };

  Link* open(const Peer& peer, double now_s);
  Link* kept(Peered& peered);
  bool send(Link& link, double now_s);
  bool receive(Link& link, double now_s);
  bool take_in(Link& link, std::string_view came, double now_s);
  bool read_head(Link& link, double now_s);
  void refuse(Link& link, bool is_of_bucket, double now_s);
  void finish(Link& link, double now_s);
  void fail(Link& link, double now_s, bool is_doubted);
  void answer(Link& link, bool is_whole);
  void doubt(const std::string& peer, double now_s);
  void close(Link& link);

  const FrontSettings& settings_;
  const int epoll_;
  uint64_t next_id_ = LINK;
  std::unordered_map<uint64_t, std::unique_ptr<Link>> links_;
  std::unordered_map<std::string, Peered> peers_;
  std::unordered_set<std::string> asked_;  // what is, by bucket and part: once, as the back joins those who ask for the same
  std::vector<PeerAnswer> answers_;
};

}  // namespace stoker
