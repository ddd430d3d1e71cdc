// Who may read what. Tokens are found by a hash that nobody outside can work out, and compared in constant time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "holder.h"
#include "limits.h"

namespace stoker {

struct Token {
  int id = 0;  // as the back calls it, 0 or more
  std::string secret;
  std::string access_key;  // that the secret signs for; empty: it is shown as it is, as a bearer token
  bool is_anonymous() const { return secret.empty() && certificate.empty(); }  // of those who show none
  // What it may read: prefixes of keys, by bucket; those of the bucket `*` are of any.
  std::unordered_map<std::string, std::vector<std::string>> reads;
  std::shared_ptr<Tenant> tenant;
  std::string certificate{};  // the name in one that stands for them
  uint64_t mark = 0;  // by which a bearer token is found: a hash of the secret, with a key of this process

  bool may_read(const std::string& bucket, std::string_view key) const;
};

struct BucketRule {
  uint16_t number = 0;
  double ttl_s = 0;
  uint32_t not_before_s = 0;  // what the origin said before that may have been overruled

  bool is_fresh(uint32_t checked_s, uint32_t now_s) const {
    return checked_s && checked_s >= not_before_s && now_s >= checked_s && now_s + 1 - checked_s <= ttl_s;
  }
};

// What the back has said of tokens and buckets; never changed, but replaced as a whole.
struct Rules {
  static constexpr int NOBODY = -1, ANYBODY = -2, UNPROVEN = -3;  // unproven: the back is to find out

  std::vector<std::shared_ptr<const Token>> tokens;
  std::unordered_map<std::string, BucketRule> buckets;
  std::unordered_map<std::string, BucketRule> blobs;  // buckets of blobs
  std::unordered_map<uint64_t, int> marks;  // numbers of bearer tokens
  std::unordered_map<std::string, int> keys;  // numbers of tokens by their access keys
  bool is_open = false;     // no token is needed
  bool asks_back = false;   // what no token here is may still be one for the back
  int anonymous = NOBODY;   // the number of the token of those who show none
  // Numbers of tokens by the names in the certificates that stand for them. One that is not there may be one for the back.
  std::unordered_map<std::string, int> certificates;
  bool asks_of_certificates = false;

  void add(Token token);
  // Tokens with these ids: all others may have other numbers then.
  void remove(const std::unordered_set<int>& ids);
  // The number of the token that an Authorization header proves, or else a certificate; ANYBODY where none is needed.
  int principal(std::string_view authorization, const std::string& certificate = {}) const;
  // What the back calls the token of that number.
  int id_of(int principal) const { return principal < 0 ? principal : tokens[static_cast<size_t>(principal)]->id; }
  bool may_read(int principal, const std::string& bucket, std::string_view key) const;
  // Nothing where it is not known who asks.
  const std::shared_ptr<Tenant>* tenant(int principal) const;

 private:
  void find_by(int number);
};

using RulesHolder = Holder<Rules>;

uint64_t mark_of(std::string_view secret);
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace stoker
