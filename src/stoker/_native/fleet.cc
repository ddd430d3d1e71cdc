#include "fleet.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "hash.h"

namespace stoker {
namespace {

Peer peer_of(const std::string& host, uint16_t port) {
  Peer peer{host + " " + std::to_string(port)};
  auto& four = reinterpret_cast<sockaddr_in&>(peer.address);
  auto& six = reinterpret_cast<sockaddr_in6&>(peer.address);
  if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    peer.address_bytes = sizeof four;
  } else if (::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    peer.address_bytes = sizeof six;
  } else if (!host.empty()) {
    throw std::invalid_argument("an address of a peer is of digits, not " + host);
  }
  return peer;
}

}  // namespace

Fleet::Fleet(const std::vector<PeerOf>& peers, const std::string& table, int me, std::string authorization,
             std::map<std::string, BucketOf> buckets, bool tells_of_reads)
    : table_(table.size() / sizeof(uint16_t)), me_(me), authorization_(std::move(authorization)),
      buckets_(std::move(buckets)), tells_of_reads_(tells_of_reads) {
  for (const auto& [host, port] : peers) peers_.push_back(peer_of(host, port));
  std::memcpy(table_.data(), table.data(), table_.size() * sizeof(uint16_t));
  if (std::any_of(table_.begin(), table_.end(), [&](uint16_t number) { return number >= peers_.size(); }))
    throw std::invalid_argument("the table of a fleet names a peer that there is not");
}

int Fleet::owner(std::string_view bucket, std::string_view key) const {
  if (table_.empty()) return -1;
  std::string name;
  name.reserve(bucket.size() + 1 + key.size());
  name.append(bucket).append("/").append(key);
  return table_[xxhash64(name) % table_.size()];
}

const Peer* Fleet::asked_for(const std::string& bucket, std::string_view key) const {
  if (!hands_on(bucket)) return nullptr;
  const int number = owner(bucket, key);
  if (number < 0 || number == me_) return nullptr;
  const Peer& peer = peers_[static_cast<size_t>(number)];
  return peer.address_bytes ? &peer : nullptr;
}

bool Fleet::hands_on(const std::string& bucket) const {
  const auto found = buckets_.find(bucket);
  return found != buckets_.end() && found->second.second;
}

bool Fleet::agrees(const std::string& bucket, std::string_view mark) const {
  const auto found = buckets_.find(bucket);
  return found != buckets_.end() && found->second.first == mark;
}

std::string Fleet::headers(const std::string& bucket) const {
  std::string lines = "Host: peer\r\nStoker-Hops: 1\r\n";
  if (!authorization_.empty()) lines += "Authorization: " + authorization_ + "\r\n";
  const auto found = buckets_.find(bucket);
  if (found != buckets_.end() && !found->second.first.empty()) lines += "Stoker-Origin: " + found->second.first + "\r\n";
  return lines;
}

}  // namespace stoker
