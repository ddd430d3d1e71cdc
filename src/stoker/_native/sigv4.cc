#include "sigv4.h"

#include <algorithm>
#include <array>

namespace stoker {
namespace {

constexpr std::string_view ALGORITHM = "AWS4-HMAC-SHA256";
constexpr std::string_view NO_BODY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
constexpr int64_t SKEW_S = 900;
constexpr size_t SIGNED_MAX = 64;

struct Said {
  std::string_view credential;  // access key/day/region/service/aws4_request
  std::string_view names;
  std::string_view signature;
};

// The value of one field of the header; nothing if it is not there once.
std::string_view field(std::string_view list, std::string_view name) {
  std::string_view found;
  while (!list.empty()) {
    while (!list.empty() && list.front() == ' ') list.remove_prefix(1);
    const std::string_view one = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), one.size() + 1));
    if (one.substr(0, name.size()) != name || one.substr(name.size(), 1) != "=") continue;
    if (found.data()) return {};
    found = one.substr(name.size() + 1);
  }
  return found;
}

bool read_said(std::string_view authorization, Said& said) {
  if (authorization.substr(0, ALGORITHM.size() + 1) != "AWS4-HMAC-SHA256 ") return false;
  const std::string_view list = authorization.substr(ALGORITHM.size() + 1);
  said = {field(list, "Credential"), field(list, "SignedHeaders"), field(list, "Signature")};
  return !said.credential.empty() && !said.names.empty() && said.signature.size() == 64;
}

// The one header of that name; nothing if there are none or several.
const Header* header_of(const Head& head, std::string_view lower) {
  const Header* found = nullptr;
  for (const Header& header : head.headers) {
    if (!equals_ignoring_case(header.name, lower)) continue;
    if (found) return nullptr;
    found = &header;
  }
  return found;
}

bool must_be_signed(std::string_view name) {
  return equals_ignoring_case(name, "host") || (name.size() > 6 && equals_ignoring_case(name.substr(0, 6), "x-amz-"));
}

// As 20260102T030405Z; negative if it is no time.
int64_t seconds_of(std::string_view time) {
  static constexpr std::string_view SHAPE = "dddddddd-dddddd-";
  if (time.size() != SHAPE.size() || time[8] != 'T' || time[15] != 'Z') return -1;
  for (size_t i = 0; i < time.size(); ++i)
    if (SHAPE[i] == 'd' && (time[i] < '0' || time[i] > '9')) return -1;
  auto number = [time](size_t from, size_t digits) {
    int64_t sum = 0;
    for (const char c : time.substr(from, digits)) sum = sum * 10 + (c - '0');
    return sum;
  };
  const int64_t month = number(4, 2), day = number(6, 2);
  if (month < 1 || month > 12 || day < 1 || day > 31) return -1;
  // Days since 1970 of a civil date (Hinnant, "chrono-compatible low-level date algorithms").
  const int64_t year = number(0, 4) - (month <= 2);
  const int64_t era = year / 400, of_era = year - era * 400;
  const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t days = era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
  return days * 86400 + number(9, 2) * 3600 + number(11, 2) * 60 + number(13, 2);
}

void append_hex(std::string& into, const Digest& digest) {
  static constexpr char HEX[] = "0123456789abcdef";
  for (const uint8_t byte : digest) {
    into.push_back(HEX[byte >> 4]);
    into.push_back(HEX[byte & 15]);
  }
}

// Puts the canonical request together; false if the head is not one that can be told here.
bool canonical(const Head& head, std::string_view names, std::string& text) {
  std::array<const Header*, SIGNED_MAX> used;
  size_t count = 0;
  std::string_view last, left = names;
  text.assign(head.method).append("\n").append(head.target).append("\n\n");
  while (!left.empty()) {
    const std::string_view name = left.substr(0, left.find(';'));
    left.remove_prefix(std::min(left.size(), name.size() + 1));
    const Header* header = header_of(head, name);
    if (!header || name <= last || count == SIGNED_MAX) return false;
    if (header->value.find("  ") != std::string_view::npos || header->value.find('\t') != std::string_view::npos)
      return false;
    text.append(name).append(":").append(header->value).append("\n");
    used[count++] = header;
    last = name;
  }
  bool has_host = false;
  for (const Header& header : head.headers) {
    if (!must_be_signed(header.name)) continue;
    if (std::find(used.begin(), used.begin() + count, &header) == used.begin() + count) return false;
    has_host = has_host || equals_ignoring_case(header.name, "host");
  }
  const Header* hash = header_of(head, "x-amz-content-sha256");
  if (!has_host || !hash || (hash->value != NO_BODY && hash->value != "UNSIGNED-PAYLOAD")) return false;
  text.append("\n").append(names).append("\n").append(hash->value);
  return true;
}

}  // namespace

bool is_signed(const Head& head) {
  // What is signed by version 2 ("AWS KEY:SIGNATURE") the back refuses in S3's words.
  if (!head.authorization.empty()) return head.authorization.substr(0, 3) == "AWS";
  static constexpr std::string_view NAME = "X-Amz-Signature=";
  size_t at = head.target.find('?');
  while (at != std::string_view::npos) {
    if (head.target.substr(at + 1, NAME.size()) == NAME) return true;
    at = head.target.find('&', at + 1);
  }
  return false;
}

int Signatures::principal(const Rules& rules, const Head& head, int64_t now_s) {
  Said said;
  if (head.has_body() || head.target.find('?') != std::string_view::npos) return Rules::UNPROVEN;
  if (!read_said(head.authorization, said)) return Rules::UNPROVEN;
  const size_t slash = said.credential.find('/');
  if (slash == std::string_view::npos) return Rules::UNPROVEN;
  const auto found = rules.keys.find(std::string(said.credential.substr(0, slash)));
  if (found == rules.keys.end()) return Rules::UNPROVEN;
  const std::string_view scope = said.credential.substr(slash + 1);  // day/region/s3/aws4_request
  static constexpr std::string_view END = "/s3/aws4_request";
  const size_t region_end = scope.size() - std::min(scope.size(), END.size());
  const bool is_scope = scope.size() > 9 + END.size() && scope[8] == '/' && scope.substr(region_end) == END &&
                        scope.substr(9, region_end - 9).find('/') == std::string_view::npos;
  const Header* date = header_of(head, "x-amz-date");
  if (!is_scope || !date || header_of(head, "x-amz-security-token")) return Rules::UNPROVEN;
  const int64_t signed_s = seconds_of(date->value);
  if (signed_s < 0 || std::max(now_s - signed_s, signed_s - now_s) > SKEW_S) return Rules::UNPROVEN;
  if (date->value.substr(0, 8) != scope.substr(0, 8) || !canonical(head, said.names, text_)) return Rules::UNPROVEN;
  const Digest request = sha256(text_);
  text_.assign(ALGORITHM).append("\n").append(date->value).append("\n").append(scope).append("\n");
  append_hex(text_, request);
  const Token& token = *rules.tokens[static_cast<size_t>(found->second)];
  const Digest proof = hmac_sha256(view_of(key(said.credential, token.secret)), text_);
  text_.clear();
  append_hex(text_, proof);
  return equal_in_constant_time(text_, said.signature) ? found->second : Rules::UNPROVEN;
}

const Digest& Signatures::key(std::string_view credential, const std::string& secret) {
  if (credential == scope_) return key_;
  std::string_view scope = credential.substr(credential.find('/') + 1);
  const std::string first = "AWS4" + secret;
  key_ = hmac_sha256(first, scope.substr(0, 8));
  scope.remove_prefix(9);
  while (!scope.empty()) {
    const std::string_view part = scope.substr(0, scope.find('/'));
    key_ = hmac_sha256(view_of(key_), part);
    scope.remove_prefix(std::min(scope.size(), part.size() + 1));
  }
  scope_ = credential;
  return key_;
}

}  // namespace stoker
