#include "http.h"

#include <algorithm>
#include <cstring>

namespace stoker {
namespace {

constexpr size_t LINE_MAX_CHUNK = 256;
constexpr int TRAILERS_MAX = 32;
constexpr uint64_t CHUNK_MAX = uint64_t{1} << 40;

bool is_token(char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  return c != '\0' && std::strchr("!#$%&'*+-.^_`|~", c) != nullptr;
}

bool is_text(char c) { return static_cast<unsigned char>(c) >= 0x20 ? c != 0x7f : c == '\t'; }

int hex_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

constexpr uint64_t NUMBER_MAX = 1'000'000'000'000'000'000;

// Numbers beyond NUMBER_MAX become that.
bool number_of(std::string_view text, uint64_t& number) {
  number = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    number = std::min(number * 10 + static_cast<uint64_t>(c - '0'), NUMBER_MAX);
  }
  return !text.empty();
}

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (equals_ignoring_case(trimmed(list.substr(0, comma)), word)) return true;
    list.remove_prefix(std::min(list.size(), comma + 1));
  }
  return false;
}

// What lines tell beside what is in a head.
struct Seen {
  bool is_old = false;  // HTTP/1.0
  bool has_host = false;
  bool has_length = false;
};

const char* read_first_line(std::string_view line, Head& head, Seen& seen) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || last <= first + 1) return "the first line is not METHOD TARGET HTTP/1.1";
  head.method = line.substr(0, first);
  head.target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!std::all_of(head.method.begin(), head.method.end(), is_token) || head.method.empty())
    return "the method is no word";
  if (!std::all_of(head.target.begin(), head.target.end(), is_text)) return "the target has control characters";
  seen.is_old = version == "HTTP/1.0";
  if (seen.is_old) head.keeps_alive = false;
  else if (version != "HTTP/1.1") return "this is not HTTP/1.1";
  return nullptr;
}

// What the header means to this server; why it cannot be understood.
const char* read_header(const Header& header, Head& head, Seen& seen) {
  const std::string_view name = header.name, value = header.value;
  auto is = [name](std::string_view lower) { return equals_ignoring_case(name, lower); };
  switch (name.size()) {
    case 4:
      if (is("host")) {
        if (seen.has_host) return "there are two hosts";
        seen.has_host = true;
      }
      break;
    case 5:
      if (is("range")) {
        if (head.range.data()) return "there are two ranges";
        head.range = value;
      }
      break;
    case 6:
      if (is("expect")) head.expects_continue = equals_ignoring_case(value, "100-continue");
      break;
    case 7:
      if (is("upgrade")) head.is_conditional = true;
      break;
    case 8:
      if (is("if-range")) head.is_conditional = true;
      if (is("if-match")) {
        if (head.if_match.data()) head.is_conditional = true;
        head.if_match = value;
      }
      break;
    case 10:
      if (is("connection")) {
        if (has_word(value, "close")) head.keeps_alive = false;
        else if (has_word(value, "keep-alive")) head.keeps_alive = true;
      }
      break;
    case 11:
      if (is("stoker-hops")) head.is_handed_on = true;
      if (is("traceparent")) head.has_id = true;
      break;
    case 12:
      if (is("x-request-id")) head.has_id = true;
      break;
    case 13:
      if (is("stoker-origin")) {
        if (head.origin.data()) head.is_conditional = true;
        head.origin = value;
      }
      if (is("if-none-match")) head.is_conditional = true;
      if (is("cache-control") && has_word(value, "no-cache")) head.is_refreshing = true;
      if (is("authorization")) {
        if (head.authorization.data()) return "there are two authorizations";
        head.authorization = value;
      }
      break;
    case 14:
      if (is("content-length")) {
        uint64_t length;
        if (!number_of(value, length) || length == NUMBER_MAX) return "the content length is no number";
        if (seen.has_length && length != head.content_length) return "there are two content lengths";
        head.content_length = length;
        seen.has_length = true;
      }
      break;
    case 17:
      if (is("if-modified-since")) head.is_conditional = true;
      if (is("transfer-encoding")) {
        if (head.is_chunked || !equals_ignoring_case(value, "chunked")) return "the transfer encoding is not chunked";
        head.is_chunked = true;
      }
      break;
    case 19:
      if (is("if-unmodified-since")) head.is_conditional = true;
      break;
    default:
      break;
  }
  return nullptr;
}

const char* read_lines(std::string_view lines, Head& head) {
  bool is_first = true;
  Seen seen;
  while (!lines.empty()) {
    const size_t end = lines.find("\r\n");
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end + 2);
    if (is_first) {
      if (const char* why = read_first_line(line, head, seen)) return why;
      is_first = false;
      continue;
    }
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0) return "a header has no name";
    const Header header{line.substr(0, colon), trimmed(line.substr(colon + 1))};
    if (!std::all_of(header.name.begin(), header.name.end(), is_token)) return "the name of a header is no word";
    if (!std::all_of(header.value.begin(), header.value.end(), is_text)) return "a header has control characters";
    if (const char* why = read_header(header, head, seen)) return why;
    head.headers.push_back(header);
  }
  if (seen.has_length && head.is_chunked) return "the body has two lengths";
  if (seen.is_old && head.is_chunked) return "HTTP/1.0 has no chunks";
  if (!seen.is_old && !seen.has_host) return "there is no host";
  return nullptr;
}

}  // namespace

bool equals_ignoring_case(std::string_view a, std::string_view lower) {
  return a.size() == lower.size() && std::equal(a.begin(), a.end(), lower.begin(), [](char x, char y) {
           return (x >= 'A' && x <= 'Z' ? static_cast<char>(x + 32) : x) == y;
         });
}

Parsed parse_head(std::string_view input, size_t& seen, Head& head, const char*& why) {
  size_t begin = 0;  // an empty line before a request is let pass (RFC 9112, 2.2)
  while (input.size() >= begin + 2 && input[begin] == '\r' && input[begin + 1] == '\n' && begin < 4) begin += 2;
  const size_t from = std::max(begin, seen >= 3 ? seen - 3 : 0);
  const size_t end = input.find("\r\n\r\n", from);
  if (end == std::string_view::npos) {
    seen = input.size();
    return Parsed::more;
  }
  head.method = head.target = head.authorization = head.range = head.if_match = head.origin = {};
  head.headers.clear();
  head.content_length = 0;
  head.is_chunked = head.expects_continue = head.is_conditional = head.is_refreshing = false;
  head.is_handed_on = head.has_id = false;
  head.keeps_alive = true;
  head.size = end + 4;
  seen = 0;
  why = read_lines(input.substr(begin, end + 2 - begin), head);
  return why ? Parsed::bad : Parsed::done;
}

size_t ChunkReader::take(std::string_view input, std::string& body) {
  size_t at = 0;
  while (at < input.size() && state_ != State::done && state_ != State::bad) {
    if (state_ == State::data) {
      const size_t part = static_cast<size_t>(std::min<uint64_t>(left_, input.size() - at));
      body.append(input.substr(at, part));
      at += part;
      left_ -= part;
      if (left_ == 0) state_ = State::data_end;
      continue;
    }
    const char c = input[at++];
    line_.push_back(c);
    if (line_.size() > LINE_MAX_CHUNK) {
      state_ = State::bad;
    } else if (line_.size() >= 2 && line_.compare(line_.size() - 2, 2, "\r\n") == 0) {
      const std::string_view line(line_.data(), line_.size() - 2);
      if (state_ == State::data_end) {
        state_ = line.empty() ? State::size : State::bad;
      } else if (state_ == State::trailer) {
        state_ = line.empty() ? State::done : ++trailers_ > TRAILERS_MAX ? State::bad : State::trailer;
      } else {
        const std::string_view digits = trimmed(line.substr(0, line.find(';')));
        left_ = 0;
        state_ = digits.empty() || digits.size() > 10 ? State::bad : State::data;
        for (const char digit : digits) {
          const int value = hex_of(digit);
          if (value < 0) state_ = State::bad;
          left_ = left_ * 16 + static_cast<uint64_t>(std::max(value, 0));
        }
        if (left_ > CHUNK_MAX) state_ = State::bad;
        if (state_ == State::data && left_ == 0) state_ = State::trailer;
      }
      line_.clear();
    } else if (c == '\n') {
      state_ = State::bad;
    }
  }
  return at;
}

bool split_target(std::string_view target, Target& into) {
  if (target.empty() || target.front() != '/' || target.find('?') != std::string_view::npos) return false;
  target.remove_prefix(1);
  const size_t slash = target.find('/');
  if (slash == std::string_view::npos || slash == 0 || slash + 1 == target.size()) return false;
  auto decode = [](std::string_view text, std::string& out) {
    out.clear();
    if (text.find('%') == std::string_view::npos) {
      out.assign(text);
      return;
    }
    for (size_t i = 0; i < text.size(); ++i) {
      const int high = text[i] == '%' && i + 2 < text.size() ? hex_of(text[i + 1]) : -1;
      const int low = high >= 0 ? hex_of(text[i + 2]) : -1;
      if (low < 0) {
        out.push_back(text[i]);  // as Python's `unquote` does
        continue;
      }
      out.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    }
  };
  decode(target.substr(0, slash), into.bucket);
  decode(target.substr(slash + 1), into.key);
  return into.key.find('\0') == std::string::npos;
}

bool split_blob_target(std::string_view target, Target& into) {
  const size_t bucket = target.find('/', 1) + 1;
  const size_t slash = target.find('/', bucket);
  if (bucket == 0 || slash == std::string_view::npos || slash == bucket || slash + 1 == target.size()) return false;
  if (std::any_of(target.begin(), target.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; })) return false;
  into.bucket = target.substr(bucket, slash - bucket);
  into.key = target.substr(slash + 1);
  return true;
}

RangeKind parse_range(std::string_view header, uint64_t size_bytes, ByteRange& range) {
  const size_t equals = header.find('=');
  if (equals == std::string_view::npos || !equals_ignoring_case(trimmed(header.substr(0, equals)), "bytes"))
    return RangeKind::whole;
  const std::string_view spec = trimmed(header.substr(equals + 1));
  const size_t dash = spec.find('-');
  if (dash == std::string_view::npos) return RangeKind::whole;
  const std::string_view first = spec.substr(0, dash), last = spec.substr(dash + 1);
  uint64_t start = 0, stop = 0;
  if (first.empty()) {
    if (!number_of(last, stop)) return RangeKind::whole;
    if (stop == 0 || size_bytes == 0) return RangeKind::unsatisfiable;
    range = {size_bytes - std::min(stop, size_bytes), size_bytes};
    return RangeKind::part;
  }
  if (!number_of(first, start) || (!last.empty() && !number_of(last, stop))) return RangeKind::whole;
  if (!last.empty() && stop < start) return RangeKind::whole;
  if (start >= size_bytes) return RangeKind::unsatisfiable;
  range = {start, last.empty() ? size_bytes : std::min(stop + 1, size_bytes)};
  return RangeKind::part;
}

void append_etag(std::string& into, std::string_view version) {
  static constexpr char HEX[] = "0123456789ABCDEF";
  into.push_back('"');
  for (const char c : version) {
    const bool is_plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                          (c != '\0' && std::strchr("-._~:+=,@/!#$&'()*;?[]^`{|}", c) != nullptr);
    if (is_plain) {
      into.push_back(c);
    } else {
      const auto byte = static_cast<unsigned char>(c);
      into.push_back('%');
      into.push_back(HEX[byte >> 4]);
      into.push_back(HEX[byte & 15]);
    }
  }
  into.push_back('"');
}

}  // namespace stoker
