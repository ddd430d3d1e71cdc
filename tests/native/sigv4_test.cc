// Signed heads: one that a client of Amazon's made, and that each change of it is noticed, or left to the back to refuse.
//
//   sigv4_test
#include <string>

#include "../../src/stoker/_native/sigv4.h"
#include "check.h"

using namespace stoker;

namespace {

constexpr int64_t SIGNED_S = 1795415415;
const std::string NO_BODY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const std::string SIGNATURE = "5b8a7ea64b0c6dd9dc934e22c2159257976e331bb4695f0e3907f50096a30d4a";

struct Asked {
  std::string first = "GET /data/a%20b/%C3%A9~x.bin HTTP/1.1";
  std::string host = "host: cache.example:7070\r\n";
  std::string range = "Range: bytes=5-9\r\n";
  std::string date = "X-Amz-Date: 20261123T063015Z\r\n";
  std::string hash = "X-Amz-Content-SHA256: " + NO_BODY + "\r\n";
  std::string more;
  std::string credential = "KEYID/20261123/eu-west-3/s3/aws4_request";
  std::string names = "host;range;x-amz-content-sha256;x-amz-date";
  std::string signature = SIGNATURE;
  std::string algorithm = "AWS4-HMAC-SHA256";
  int64_t now_s = SIGNED_S;
  std::string secret = "a-secret-of-one";

  std::string text() const {
    return first + "\r\n" + host + range + date + hash + more + "Authorization: " + algorithm + " Credential=" +
           credential + ", SignedHeaders=" + names + ", Signature=" + signature + "\r\n\r\n";
  }
};

Rules rules_with(const std::string& secret) {
  Rules rules;
  rules.add({5, "bearer-token", "", {{"*", {""}}}, nullptr});
  rules.add({6, secret, "KEYID", {{"data", {""}}}, nullptr});
  return rules;
}

int principal_of(const Asked& asked) {
  static Signatures signatures;  // as one connection has them, so that what is remembered is tried as well
  const std::string text = asked.text();
  Head head;
  size_t seen = 0;
  const char* why = nullptr;
  if (parse_head(text, seen, head, why) != Parsed::done) return Rules::UNPROVEN;  // refused before it is looked at
  CHECK(is_signed(head) == (asked.algorithm.substr(0, 4) == "AWS4"));
  signatures.forget();
  const int first = signatures.principal(rules_with(asked.secret), head, asked.now_s);
  CHECK(signatures.principal(rules_with(asked.secret), head, asked.now_s) == first);
  return first;
}

void what_was_signed_is_proved() {
  CHECK(principal_of(Asked{}) == 1);
  for (const int64_t skew : {-900, 900}) {
    Asked late;
    late.now_s += skew;
    CHECK(principal_of(late) == 1);
  }
  Asked spaced;
  spaced.range = "RANGE:    bytes=5-9 \r\n";
  CHECK(principal_of(spaced) == 1);
  Asked unsigned_extra;
  unsigned_extra.more = "Accept: */*\r\n";
  CHECK(principal_of(unsigned_extra) == 1);
}

template <typename Change>
void is_left_to_the_back(Change change) {
  Asked asked;
  change(asked);
  CHECK(principal_of(asked) == Rules::UNPROVEN);
}

void all_else_is_not() {
  is_left_to_the_back([](Asked& a) { a.secret = "another-secret"; });
  is_left_to_the_back([](Asked& a) { a.first = "HEAD /data/a%20b/%C3%A9~x.bin HTTP/1.1"; });
  is_left_to_the_back([](Asked& a) { a.first = "GET /data/a%20b/%c3%a9~x.bin HTTP/1.1"; });
  is_left_to_the_back([](Asked& a) { a.first = "GET /data/other HTTP/1.1"; });
  is_left_to_the_back([](Asked& a) { a.first = "GET /data/a%20b/%C3%A9~x.bin?versionId=1 HTTP/1.1"; });
  is_left_to_the_back([](Asked& a) { a.host = "host: other.example:7070\r\n"; });
  is_left_to_the_back([](Asked& a) { a.host.clear(); });
  is_left_to_the_back([](Asked& a) { a.host += a.host; });
  is_left_to_the_back([](Asked& a) { a.range = "Range: bytes=5-99\r\n"; });
  is_left_to_the_back([](Asked& a) { a.range.clear(); });
  is_left_to_the_back([](Asked& a) { a.date = "X-Amz-Date: 20261123T063016Z\r\n"; });
  is_left_to_the_back([](Asked& a) { a.date.clear(); });
  is_left_to_the_back([](Asked& a) { a.date += a.date; });
  is_left_to_the_back([](Asked& a) { a.hash = "X-Amz-Content-SHA256: UNSIGNED-PAYLOAD\r\n"; });
  is_left_to_the_back([](Asked& a) { a.hash = "X-Amz-Content-SHA256: " + std::string(64, '0') + "\r\n"; });
  is_left_to_the_back([](Asked& a) { a.hash.clear(); });
  is_left_to_the_back([](Asked& a) { a.more = "x-amz-security-token: t\r\n"; });
  is_left_to_the_back([](Asked& a) { a.more = "x-amz-meta-added: later\r\n"; });
  is_left_to_the_back([](Asked& a) { a.more = "Content-Length: 3\r\n"; });
  is_left_to_the_back([](Asked& a) { a.credential = "OTHER/20261123/eu-west-3/s3/aws4_request"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID/20261124/eu-west-3/s3/aws4_request"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID/20261123/us-east-1/s3/aws4_request"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID/20261123/eu-west-3/ec2/aws4_request"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID/20261123/eu-west-3/s3/aws4"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID/20261123//s3/aws4_request"; });
  is_left_to_the_back([](Asked& a) { a.credential = "KEYID"; });
  is_left_to_the_back([](Asked& a) { a.credential.clear(); });
  is_left_to_the_back([](Asked& a) { a.names = "host;x-amz-content-sha256;x-amz-date"; });
  is_left_to_the_back([](Asked& a) { a.names = "range;host;x-amz-content-sha256;x-amz-date"; });
  is_left_to_the_back([](Asked& a) { a.names = "host;host;range;x-amz-content-sha256;x-amz-date"; });
  is_left_to_the_back([](Asked& a) { a.names.clear(); });
  is_left_to_the_back([](Asked& a) { a.signature[0] ^= 1; });
  is_left_to_the_back([](Asked& a) { a.signature[63] ^= 1; });
  is_left_to_the_back([](Asked& a) { a.signature.pop_back(); });
  is_left_to_the_back([](Asked& a) { a.signature.clear(); });
  is_left_to_the_back([](Asked& a) { a.algorithm = "AWS4-HMAC-SHA1"; });
  is_left_to_the_back([](Asked& a) { a.now_s += 901; });
  is_left_to_the_back([](Asked& a) { a.now_s -= 901; });
}

// FIPS 180-4 and RFC 4231.
void sums_are_those_of_the_standards() {
  auto hex = [](const Digest& digest) {
    static constexpr char HEX[] = "0123456789abcdef";
    std::string text;
    for (const uint8_t byte : digest) (text += HEX[byte >> 4]) += HEX[byte & 15];
    return text;
  };
  CHECK(hex(sha256("")) == NO_BODY);
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  Sha256 many;
  for (int i = 0; i < 1000; ++i) many.take(std::string(1000, 'a'));
  CHECK(hex(many.finish()) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

}  // namespace

int main() {
  what_was_signed_is_proved();
  all_else_is_not();
  sums_are_those_of_the_standards();
  std::puts("well");
}
