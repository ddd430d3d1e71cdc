// Who may read what. Tokens are compared in constant time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace stoker {

struct Token {
  int id = 0;  // as the back calls it, 0 or more
  std::string secret;
  std::string access_key;  // that the secret signs for; empty: it is shown as it is, as a bearer token
  bool opens_all = false;
  std::unordered_set<std::string> buckets;
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

  std::vector<Token> tokens;
  std::unordered_map<std::string, BucketRule> buckets;
  std::unordered_map<std::string, int> keys;  // numbers of tokens by their access keys

  // The number of the token that an Authorization header proves; ANYBODY where none is needed.
  int principal(std::string_view authorization) const;
  // What the back calls the token of that number.
  int id_of(int principal) const { return principal < 0 ? principal : tokens[static_cast<size_t>(principal)].id; }
  bool may_read(int principal, const std::string& bucket) const;
};

class RulesHolder {
 public:
  std::shared_ptr<const Rules> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return rules_;
  }
  void set(std::shared_ptr<const Rules> rules) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rules_ = std::move(rules);
    version_.fetch_add(1);
  }
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Rules> rules_{std::make_shared<Rules>()};
  std::atomic<uint64_t> version_{1};
};

bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace stoker
