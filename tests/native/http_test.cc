// What a request's head means, whatever pieces it comes in; and what random bytes do to the parser: nothing.
//
//   http_test SEED ROUNDS
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "../../src/stoker/_native/access.h"
#include "../../src/stoker/_native/http.h"
#include "../../src/stoker/_native/limits.h"
#include "check.h"

using namespace stoker;

namespace {

struct Result {
  Parsed parsed = Parsed::more;
  Head head;
  std::string why;
};

// A copy in memory of its own, so that a sanitizer sees whoever reads past its end.
Result parse_as_it_is(const std::string& text) {
  static std::unique_ptr<char[]> copy;
  copy.reset(new char[text.size()]);
  std::memcpy(copy.get(), text.data(), text.size());
  Result result;
  size_t seen = 0;
  const char* why = nullptr;
  result.parsed = parse_head({copy.get(), text.size()}, seen, result.head, why);
  if (why) result.why = why;
  return result;
}

// With a host, where none is said.
Result parse(std::string text) {
  const size_t first = text.find("HTTP/1.1\r\n");
  if (first != std::string::npos && text.find("Host") == std::string::npos) text.insert(first + 10, "Host: h\r\n");
  return parse_as_it_is(text);
}

void heads_that_are_understood() {
  const Result plain = parse("GET /a/b%20c HTTP/1.1\r\nHost: x\r\nAUTHORIZATION:  Bearer t \r\nrange: bytes=1-2\r\n\r\nrest");
  CHECK(plain.parsed == Parsed::done);
  CHECK(plain.head.method == "GET" && plain.head.target == "/a/b%20c");
  CHECK(plain.head.authorization == "Bearer t" && plain.head.range == "bytes=1-2");
  CHECK(plain.head.keeps_alive && !plain.head.has_body() && !plain.head.is_conditional);
  CHECK(plain.head.headers.size() == 3 && plain.head.headers[1].name == "AUTHORIZATION");
  const std::string rest = "rest";
  CHECK(parse("\r\nGET / HTTP/1.1\r\n\r\n").parsed == Parsed::done);
  CHECK(parse("GET /a b?c HTTP/1.1\r\n\r\n").head.target == "/a b?c" && "blobs have such names");
  CHECK(!parse("GET / HTTP/1.0\r\n\r\n").head.keeps_alive);
  CHECK(parse("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").head.keeps_alive);
  CHECK(!parse("GET / HTTP/1.1\r\nConnection: upgrade, Close\r\n\r\n").head.keeps_alive);
  CHECK(parse("PUT / HTTP/1.1\r\nContent-Length: 12\r\nExpect: 100-Continue\r\n\r\n").head.expects_continue);
  CHECK(parse("PUT / HTTP/1.1\r\nContent-Length: 12\r\nContent-Length: 12\r\n\r\n").head.content_length == 12);
  CHECK(parse("PUT / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n").head.is_chunked);
  const Result matching = parse("GET / HTTP/1.1\r\nIf-Match: \"v\"\r\n\r\n");
  CHECK(matching.head.if_match == "\"v\"" && !matching.head.is_conditional);
  for (const char* name :
       {"If-Match: x\r\nIf-Match", "If-None-Match", "If-Range", "If-Modified-Since", "If-Unmodified-Since"})
    CHECK(parse("GET / HTTP/1.1\r\n" + std::string(name) + ": x\r\n\r\n").head.is_conditional);
  CHECK(parse("GET / HTTP/1.1\r\nCache-Control: max-age=0, no-cache\r\n\r\n").head.is_refreshing);
}

void heads_that_are_refused() {
  for (const char* text : {
           "GET /\r\n\r\n", "GET  HTTP/1.1\r\n\r\n", " / HTTP/1.1\r\n\r\n", "GET / HTTP/2.0\r\n\r\n", "G(T / HTTP/1.1\r\n\r\n",
           "GET /\x01 HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n", "GET / HTTP/1.1\r\n: x\r\n\r\n",
           "GET / HTTP/1.1\r\nHost : x\r\n\r\n", "GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n",
           "GET / HTTP/1.1\r\nA: b\nB: c\r\n\r\n", "GET / HTTP/1.1\r\nA: \rb\r\n\r\n",
           "GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
           "GET / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n", "GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
           "GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "GET / HTTP/1.1\r\nContent-Length:\r\n\r\n",
           "GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
           "GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
           "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
           "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
           "GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
           "GET / HTTP/1.1\r\nRange: bytes=0-1\r\nRange: bytes=2-3\r\n\r\n",
       }) {
    const Result result = parse(text);
    if (result.parsed != Parsed::bad) std::fprintf(stderr, "understood: %s\n", text);
    CHECK(result.parsed == Parsed::bad && !result.why.empty());
  }
  for (const char* text : {"GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
                           "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"})
    CHECK(parse_as_it_is(text).parsed == Parsed::bad);
  CHECK(parse_as_it_is("GET / HTTP/1.0\r\n\r\n").parsed == Parsed::done);
}

// The same in one piece and in any pieces.
void in_pieces(const std::string& text, std::mt19937_64& chance) {
  const Result whole = parse_as_it_is(text);
  std::string sofar;
  size_t seen = 0;
  Head head;
  const char* why = nullptr;
  Parsed parsed = Parsed::more;
  while (sofar.size() < text.size() && parsed == Parsed::more) {
    sofar += text.substr(sofar.size(), 1 + chance() % 20);
    parsed = parse_head(sofar, seen, head, why);
  }
  CHECK(parsed == whole.parsed);
  if (parsed == Parsed::bad) CHECK(whole.why == why);
  if (parsed != Parsed::done) return;
  CHECK(head.size == whole.head.size && head.method == whole.head.method && head.target == whole.head.target);
  CHECK(head.content_length == whole.head.content_length && head.is_chunked == whole.head.is_chunked);
  CHECK(head.keeps_alive == whole.head.keeps_alive && head.headers.size() == whole.head.headers.size());
}

void chunks() {
  auto read = [](const std::string& text, std::string& body, size_t& taken, size_t piece) {
    ChunkReader reader;
    taken = 0;
    body.clear();
    while (taken < text.size() && !reader.is_done() && !reader.is_bad()) {
      const std::string_view part = std::string_view(text).substr(taken, piece);
      const size_t took = reader.take(part, body);
      CHECK(took == part.size() || reader.is_done() || reader.is_bad());
      taken += took;
    }
    return reader;
  };
  std::string body;
  size_t taken;
  for (size_t piece = 1; piece < 30; ++piece) {
    const std::string text = "5;name=x\r\nhello\r\nA\r\n, world!!!\r\n0\r\nTrailer: x\r\n\r\nGET";
    CHECK(read(text, body, taken, piece).is_done() && body == "hello, world!!!" && text.substr(taken) == "GET");
    CHECK(read("0\r\n\r\n", body, taken, piece).is_done() && body.empty());
    for (const char* bad : {"x\r\n", "5\r\nhelloX\r\n", "\r\n", "-1\r\n", "5\nhello", "FFFFFFFFFFFF\r\n", "5 5\r\n"})
      CHECK(read(bad, body, taken, piece).is_bad());
    CHECK(read(std::string(1000, '1'), body, taken, piece).is_bad());
    std::string trailers = "0\r\n";
    for (int i = 0; i < 32; ++i) trailers += "T: x\r\n";
    CHECK(read(trailers + "\r\n", body, taken, piece).is_done());
    CHECK(read(trailers + "T: x\r\n\r\n", body, taken, piece).is_bad());
  }
}

void targets_and_ranges() {
  Target target;
  CHECK(split_target("/b/a%2Fb/c%20%zz%", target) && target.bucket == "b" && target.key == "a/b/c %zz%");
  CHECK(split_target("/b//x", target) && target.key == "/x");
  for (const char* none : {"", "b/k", "/b", "/b/", "//k", "/b/k?x=1", "/b/k%00"}) CHECK(!split_target(none, target));
  CHECK(split_blob_target("/blob/b//a b%20?c#/", target) && target.bucket == "b" && target.key == "/a b%20?c#/");
  CHECK(split_target("/b/k", target));
  for (const char* none : {"", "/blob", "/blob/", "/blob/b", "/blob/b/", "/blob//k", "/blob/b/\xc3\xa9"})
    CHECK(!split_blob_target(none, target));
  CHECK(parse("PUT /blob/b/a b//\xff?#  HTTP/1.1\r\nHost: x\r\n\r\n").head.target == "/blob/b/a b//\xff?# ");
  ByteRange range;
  auto is = [&range](const char* text, uint64_t size, uint64_t start, uint64_t stop) {
    return parse_range(text, size, range) == RangeKind::part && range.start == start && range.stop == stop;
  };
  CHECK(is("bytes=0-0", 10, 0, 1) && is("bytes=2-", 10, 2, 10) && is("Bytes = 3-99", 10, 3, 10));
  CHECK(is("bytes=-4", 10, 6, 10) && is("bytes=-40", 10, 0, 10) && is("bytes=0-99999999999999999999", 10, 0, 10));
  for (const char* text : {"bytes=10-", "bytes=-0", "bytes=99999999999999999999-"})
    CHECK(parse_range(text, 10, range) == RangeKind::unsatisfiable);
  for (const char* text : {"", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes=0-1,3-4", "items=0-1"})
    CHECK(parse_range(text, 10, range) == RangeKind::whole);
  std::string tag;
  append_etag(tag, "a\"b c/d\xC3\xA9-._~:+=,@");
  CHECK(tag == "\"a%22b%20c/d%C3%A9-._~:+=,@\"");
}

void tokens() {
  Rules rules;
  CHECK(rules.principal("") == Rules::NOBODY);
  rules.add({30, "first-token", "", {{"*", {""}}}, nullptr});
  rules.add({40, "other-token", "", {{"b", {""}}, {"c", {"x/", "y"}}}, nullptr});
  CHECK(rules.id_of(1) == 40 && rules.id_of(Rules::ANYBODY) == Rules::ANYBODY);
  CHECK(rules.principal("Bearer first-token") == 0 && rules.principal("bearer  other-token") == 1);
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer first-toke", "Bearer first-token2", "Basic first-token",
                            "first-token", "Bearer first-tokeN"})
    CHECK(rules.principal(wrong) == Rules::NOBODY);
  CHECK(rules.may_read(0, "x", "k") && rules.may_read(1, "b", "k") && !rules.may_read(1, "x", "k"));
  CHECK(!rules.may_read(Rules::NOBODY, "b", "k") && !rules.may_read(7, "b", "k"));
  CHECK(rules.may_read(1, "c", "x/1") && rules.may_read(1, "c", "y") && !rules.may_read(1, "c", "x") && !rules.may_read(1, "c", "z"));
  CHECK(rules.principal("") == Rules::NOBODY);
  rules.add({50, "", "", {{"c", {"p"}}}, nullptr});
  CHECK(rules.principal("") == 2 && rules.principal("Bearer ") == Rules::NOBODY && rules.may_read(2, "c", "p"));
  rules.asks_back = true;
  CHECK(rules.principal("Bearer unknown") == Rules::UNPROVEN && rules.principal("Basic x") == Rules::NOBODY);
  rules.add({60, "key-secret", "KEY", {{"*", {""}}}, nullptr});
  CHECK(rules.keys.at("KEY") == 3 && rules.principal("Bearer key-secret") == Rules::UNPROVEN);
  Rules fewer = rules;
  fewer.remove({30, 50});
  CHECK(fewer.principal("Bearer first-token") == Rules::UNPROVEN && fewer.principal("Bearer other-token") == 0);
  CHECK(fewer.id_of(0) == 40 && fewer.keys.at("KEY") == 1 && fewer.principal("") == Rules::NOBODY);
  CHECK(rules.principal("Bearer first-token") == 0);
  rules.is_open = true;
  CHECK(rules.principal("") == Rules::ANYBODY && rules.may_read(Rules::ANYBODY, "x", "k"));
  TokenBucket bucket(1000);
  uint64_t granted = 0;
  for (int i = 0; i <= 1000; ++i) {
    const uint64_t part = bucket.take(500, i * 0.01);
    if (i % 2) bucket.give(part);
    else granted += part;
  }
  CHECK(granted >= 9900 && granted <= 10100);
  CHECK(TokenBucket(0).take(7, 0) == 7);
}

// Each of 64 KiB turns that is asked for by so many tenants for 10 s; the first asks for little, the second comes ten times
// as often as the others.
void shares_are_fair() {
  FairShare share(1e6);
  std::vector<std::shared_ptr<Tenant>> tenants;
  for (int i = 0; i < 5; ++i) tenants.push_back(std::make_shared<Tenant>(0));
  std::vector<double> sent(tenants.size());
  for (double now_s = 100; now_s < 110; now_s += 0.001) {
    sent[0] += static_cast<double>(share.take(tenants[0], 50, now_s));
    for (size_t i = 1; i < tenants.size(); ++i)
      for (int turn = i == 1 ? 10 : 1; turn; --turn) {
        const uint64_t granted = share.take(tenants[i], 65536, now_s);
        share.give(tenants[i], granted / 2);
        sent[i] += static_cast<double>(granted - granted / 2);
      }
  }
  double all = 0;
  for (const double bytes : sent) all += bytes;
  CHECK(all > 0.97e7 && all < 1.03e7);
  CHECK(sent[0] > 0.95 * 500000);  // all that it asked for, which is less than its share
  for (size_t i = 1; i < sent.size(); ++i) CHECK(sent[i] > 0.9 * (all - sent[0]) / 4 && sent[i] < 1.1 * (all - sent[0]) / 4);
  // Alone, it has all.
  double alone = 0;
  for (double now_s = 120; now_s < 121; now_s += 0.001) alone += static_cast<double>(share.take(tenants[2], 65536, now_s));
  CHECK(alone > 0.95e6 && alone < 1.1e6);
  CHECK(FairShare(0).take(tenants[0], 7, 0) == 7);
  FairShare small(100);
  double slow = 0;
  for (double now_s = 130; now_s < 190; now_s += 0.01)
    for (const auto& tenant : tenants) slow += static_cast<double>(small.take(tenant, 65536, now_s));
  CHECK(slow > 5000 && slow < 6000 + 5 * 1024);
  TokenBucket slowest(10);
  slow = 0;
  for (double now_s = 130; now_s < 190; now_s += 0.01) slow += static_cast<double>(slowest.take(65536, now_s));
  CHECK(slow > 500 && slow < 700);
}

std::string mutated(std::string text, std::mt19937_64& chance) {
  static const std::string pieces[] = {"\r\n", "\r\n\r\n", "\n", ":", " ", "\t", "%", "Content-Length: ", "9", "chunked",
                                       "Transfer-Encoding: chunked\r\n", std::string(1, '\0'), "\xff", "HTTP/1.1"};
  for (auto count = 1 + chance() % 6; count; --count) {
    const size_t at = text.empty() ? 0 : chance() % text.size();
    switch (chance() % 4) {
      case 0: text.insert(at, pieces[chance() % std::size(pieces)]); break;
      case 1: text.erase(at, 1 + chance() % 8); break;
      case 2: if (!text.empty()) text[at] = static_cast<char>(chance()); break;
      default: text.insert(at, text.substr(chance() % (text.size() + 1), chance() % 30));
    }
  }
  return text;
}

}  // namespace

int main(int, char** argv) {
  std::mt19937_64 chance(std::strtoull(argv[1], nullptr, 10));
  heads_that_are_understood();
  heads_that_are_refused();
  chunks();
  targets_and_ranges();
  tokens();
  shares_are_fair();
  const std::string seeds[] = {
      "GET /bucket/key HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nRange: bytes=0-9\r\n\r\n",
      "PUT /b/k HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\nConnection: close\r\n\r\nhello",
      "GET /blob/b/file://a b?c#d HTTP/1.1\r\nHost: x\r\n\r\n",
      "POST /-/read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"};
  for (auto round = std::strtoull(argv[2], nullptr, 10); round; --round) {
    const std::string text = mutated(seeds[chance() % 4], chance);
    in_pieces(text, chance);
    const Result result = parse(text);
    Target target;
    ByteRange range;
    split_target(result.head.target, target);
    split_blob_target(result.head.target, target);
    parse_range(text, chance() % 100, range);
    ChunkReader reader;
    std::string body;
    reader.take(text, body);
    CHECK(body.size() <= text.size());
  }
  std::puts("well");
}
