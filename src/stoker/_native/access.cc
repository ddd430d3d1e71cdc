#include "access.h"

#include <algorithm>
#include <random>

#include "hash.h"
#include "http.h"

namespace stoker {

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;  // the length of a secret is none
  unsigned char differs = 0;
  for (size_t i = 0; i < a.size(); ++i) differs |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differs == 0;
}

uint64_t mark_of(std::string_view secret) {
  static const HashKey KEY = [] {
    std::random_device chance;
    const auto number = [&] { return static_cast<uint64_t>(chance()) << 32 | chance(); };
    const uint64_t first = number();
    return HashKey{first, number()};
  }();
  return siphash(KEY, secret, {}).low;
}

void Rules::add(Token token) {
  token.mark = mark_of(token.secret);
  tokens.push_back(std::make_shared<const Token>(std::move(token)));
  find_by(static_cast<int>(tokens.size()) - 1);
}

void Rules::find_by(int number) {
  const Token& token = *tokens[static_cast<size_t>(number)];
  if (!token.certificate.empty()) certificates[token.certificate] = number;
  else if (!token.access_key.empty()) keys[token.access_key] = number;
  else if (token.is_anonymous()) anonymous = number;
  else marks[token.mark] = number;
}

void Rules::remove(const std::unordered_set<int>& ids) {
  tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const auto& one) { return ids.count(one->id) > 0; }), tokens.end());
  marks.clear();
  keys.clear();
  certificates.clear();
  anonymous = NOBODY;
  for (size_t i = 0; i < tokens.size(); ++i) find_by(static_cast<int>(i));
}

int Rules::principal(std::string_view authorization, const std::string& certificate) const {
  if (is_open) return ANYBODY;
  if (authorization.empty()) {
    if (certificate.empty()) return anonymous;
    const auto found = certificates.find(certificate);
    if (found != certificates.end()) return found->second;
    return asks_of_certificates ? UNPROVEN : anonymous;
  }
  const size_t space = authorization.find(' ');
  if (space == std::string_view::npos) return NOBODY;
  std::string_view secret = authorization.substr(space + 1);
  while (!secret.empty() && secret.front() == ' ') secret.remove_prefix(1);
  if (!equals_ignoring_case(authorization.substr(0, space), "bearer")) return NOBODY;
  const auto found = marks.find(mark_of(secret));
  if (found != marks.end() && equal_in_constant_time(secret, tokens[static_cast<size_t>(found->second)]->secret)) return found->second;
  return asks_back ? UNPROVEN : NOBODY;
}

bool Token::may_read(const std::string& bucket, std::string_view key) const {
  static const std::string ANY = "*";
  const auto is_in = [&](const std::string& name) {
    const auto found = reads.find(name);
    return found != reads.end() &&
           std::any_of(found->second.begin(), found->second.end(),
                       [&](const std::string& prefix) { return key.substr(0, prefix.size()) == prefix; });
  };
  return is_in(bucket) || is_in(ANY);
}

bool Rules::may_read(int principal, const std::string& bucket, std::string_view key) const {
  if (principal == ANYBODY) return true;
  if (principal < 0 || static_cast<size_t>(principal) >= tokens.size()) return false;
  return tokens[static_cast<size_t>(principal)]->may_read(bucket, key);
}

const std::shared_ptr<Tenant>* Rules::tenant(int principal) const {
  if (principal < 0 || static_cast<size_t>(principal) >= tokens.size()) return nullptr;
  const std::shared_ptr<Tenant>& found = tokens[static_cast<size_t>(principal)]->tenant;
  return found ? &found : nullptr;
}

}  // namespace stoker
