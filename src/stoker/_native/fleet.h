// The fleet as the back has told of it: who owns what, and how to ask them. Never changed, but replaced as a whole.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holder.h"

namespace stoker {

// Another server. Without an address it is asked by the back only.
struct Peer {
  std::string name;  // its address and port: of two fleets those are the same that have the same
  sockaddr_storage address{};
  socklen_t address_bytes = 0;
};

class Fleet {
 public:
  using PeerOf = std::pair<std::string, uint16_t>;    // its address, of digits, and its port
  // What stands for its origin; whether its objects go from front to front, without the back hearing of it.
  using BucketOf = std::pair<std::string, bool>;

  Fleet() = default;
  // `table`: who owns a name, by its hash: numbers of `peers` (u16). `me`: the number of this server. `authorization`: what
  // is shown to peers. `tells_of_reads`: of each that was asked under a name, the back tells in logs. Throws
  // std::invalid_argument.
  Fleet(const std::vector<PeerOf>& peers, const std::string& table, int me, std::string authorization,
        std::map<std::string, BucketOf> buckets, bool tells_of_reads = false);

  // The number of who owns the first block of an object; -1: nobody does.
  int owner(std::string_view bucket, std::string_view key) const;
  // Who is to be asked for an object that is not here; nothing: the back is.
  const Peer* asked_for(const std::string& bucket, std::string_view key) const;
  // Whether that server has the bucket from the same origin, as far as it is known here.
  bool agrees(const std::string& bucket, std::string_view mark) const;
  bool hands_on(const std::string& bucket) const;
  bool tells_of_reads() const { return tells_of_reads_; }
  // Lines of the head by which any peer is asked about a bucket.
  std::string headers(const std::string& bucket) const;

 private:
  std::vector<Peer> peers_;
  std::vector<uint16_t> table_;
  int me_ = -1;
  std::string authorization_;
  std::map<std::string, BucketOf> buckets_;
  bool tells_of_reads_ = true;  // until it is known
};

using FleetHolder = Holder<Fleet>;

}  // namespace stoker
