// Heads of HTTP/1.1 requests: strict, for whatever two readers could understand differently is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stoker {

struct Header {
  std::string_view name;  // as it was sent
  std::string_view value;
};

struct Head {
  std::string_view method;
  std::string_view target;
  std::vector<Header> headers;
  std::string_view authorization;
  std::string_view range;
  std::string_view if_match;
  std::string_view origin;  // what stands for the origin that another server of the fleet has the bucket from
  uint64_t content_length = 0;
  bool is_chunked = false;
  bool keeps_alive = true;
  bool expects_continue = false;
  bool is_conditional = false;  // by more than one If-Match
  bool is_refreshing = false;   // the reader wants to be sure that the origin was asked
  bool is_handed_on = false;    // by another server of the fleet
  bool has_id = false;          // it is to be told by from others, in logs or traces
  size_t size = 0;              // with the empty line

  bool has_body() const { return is_chunked || content_length != 0; }
};

enum class Parsed { done, more, bad };

// Parses the head that `input` begins with. `seen`: how much of it was looked at before in vain; is set. `why` is set
// where it is bad. Views are into `input`.
Parsed parse_head(std::string_view input, size_t& seen, Head& head, const char*& why);

// One chunk's size line, or the empty line after its data; see `ChunkReader`.
class ChunkReader {
 public:
  // Takes what it can from `input` and appends the body's bytes; returns how much it took. Throws nothing.
  size_t take(std::string_view input, std::string& body);
  bool is_done() const { return state_ == State::done; }
  bool is_bad() const { return state_ == State::bad; }

 private:
  enum class State { size, data, data_end, trailer, done, bad };
  State state_ = State::size;
  uint64_t left_ = 0;
  int trailers_ = 0;
  std::string line_;
};

// The target's bucket and key, percent-decoded. Nothing if it names no object or has a query.
struct Target {
  std::string bucket;
  std::string key;
};
bool split_target(std::string_view target, Target& into);
// The same of /blob/BUCKET/KEY, where a key is all that follows, as it stands. Nothing if it is not plain ASCII.
bool split_blob_target(std::string_view target, Target& into);

struct ByteRange {
  uint64_t start = 0;
  uint64_t stop = 0;
};
enum class RangeKind { whole, part, unsatisfiable };
// RFC 9110, section 14: what is not one valid range of bytes is the whole object.
RangeKind parse_range(std::string_view header, uint64_t size_bytes, ByteRange& range);

// A version as an entity tag, with its quotes.
void append_etag(std::string& into, std::string_view version);
// The tag in lines that begin with it.
constexpr std::string_view ETAG = "ETag: ";
inline std::string_view etag_in(std::string_view lines) {
  return lines.substr(ETAG.size(), lines.find("\r\n") - ETAG.size());
}

bool equals_ignoring_case(std::string_view a, std::string_view lower);

}  // namespace stoker
