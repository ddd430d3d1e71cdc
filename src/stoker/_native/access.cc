#include "access.h"

#include "http.h"

namespace stoker {

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;  // the length of a secret is none
  unsigned char differs = 0;
  for (size_t i = 0; i < a.size(); ++i) differs |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differs == 0;
}

int Rules::principal(std::string_view authorization) const {
  if (tokens.empty()) return ANYBODY;
  const size_t space = authorization.find(' ');
  if (space == std::string_view::npos) return NOBODY;
  std::string_view secret = authorization.substr(space + 1);
  while (!secret.empty() && secret.front() == ' ') secret.remove_prefix(1);
  int found = NOBODY;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (equal_in_constant_time(secret, tokens[i].secret) && tokens[i].access_key.empty()) found = static_cast<int>(i);
  return equals_ignoring_case(authorization.substr(0, space), "bearer") ? found : NOBODY;
}

bool Rules::may_read(int principal, const std::string& bucket) const {
  if (principal == ANYBODY) return true;
  if (principal < 0 || static_cast<size_t>(principal) >= tokens.size()) return false;
  const Token& token = tokens[static_cast<size_t>(principal)];
  return token.opens_all || token.buckets.count(bucket) != 0;
}

}  // namespace stoker
