// Requests that are answered without the back.
#include <unistd.h>

#include "connection.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr std::string_view BLOBS = "/blob/";
constexpr size_t COPY_MAX = 2 * 1024;  // up to here a copy is cheaper than sendfile
constexpr size_t SEALED_COPY_MAX = 15 * 1024;  // one record with its head

}  // namespace

// By which rule what is asked for may be answered here; nothing if it may not, or is for the back.
const BucketRule* Connection::rule_of_target(bool is_head, uint32_t& from_s) {
  if (names_bucket_by_host()) return nullptr;
  const bool is_blob = head_.target.compare(0, BLOBS.size(), BLOBS) == 0;
  from_s = 0;
  if (is_blob) {
    // Whether all of a blob is here only the back knows without sending it.
    if (is_head || head_.if_match.data() || boot_clock_s() >= front_.blobs_until_s_.load(std::memory_order_acquire)) return nullptr;
    from_s = front_.blobs_from_s_.load(std::memory_order_acquire);
  }
  if (!(is_blob ? split_blob_target(head_.target, target_) : split_target(head_.target, target_))) return nullptr;
  if (!rules_->may_read(principal_, target_.bucket, target_.key)) return nullptr;
  const auto& rules = is_blob ? rules_->blobs : rules_->buckets;
  const auto rule = rules.find(target_.bucket);
  return rule == rules.end() ? nullptr : &rule->second;
}

bool Connection::answer_hit(double now_s) {
  const bool is_head = head_.method == "HEAD";
  if ((!is_head && head_.method != "GET") || head_.is_conditional || head_.is_refreshing) return false;
  uint32_t from_s;
  const BucketRule* rule = rule_of_target(is_head, from_s);
  if (!rule) return false;
  const uint32_t now = front_.now_s_.load(std::memory_order_relaxed);
  Object object;
  if (!front_.index_->look_up(rule->number, target_.key, now, object)) return false;
  if ((object.flags & Object::ABSENT) || object.checked_s < from_s) return false;
  if (!rule->is_fresh(object.checked_s, now)) return false;
  ByteRange range{0, object.size_bytes};
  RangeKind kind = RangeKind::whole;
  if (head_.range.data()) kind = parse_range(head_.range, object.size_bytes, range);
  if (kind == RangeKind::unsatisfiable) return false;
  const std::string* headers = headers_of(object, rule->number);
  if (headers && !agrees(*headers)) return false;
  // S3 clients are told all that the origin says of an object: if nobody knows it yet, the back asks.
  if (!headers || (!is_told(object) && is_signed(head_))) return false;
  const bool is_part = kind == RangeKind::part;
  std::string& head = loop_.scratch;
  head = is_part ? "HTTP/1.1 206 Partial Content\r\nContent-Length: " : "HTTP/1.1 200 OK\r\nContent-Length: ";
  head += std::to_string(range.stop - range.start);
  head += "\r\n";
  head += *headers;
  if (is_part)
    head += "Content-Range: bytes " + std::to_string(range.start) + "-" + std::to_string(range.stop - 1) + "/" +
            std::to_string(object.size_bytes) + "\r\n";
  head += "\r\n";
  if (is_head || range.start == range.stop) send_text(head, false);
  else if (!put_piece(object, rule->number, range.start, range.stop, head)) return hand_on(object, *rule, range, head, now_s);
  loop_.count_hit(rule->number, is_head ? 0 : range.stop - range.start);
  answered_hit(is_head, is_part, now_s);
  return true;
}

// Whether that version, and an object of that origin, are what is asked for, as far as it is asked.
bool Connection::agrees(std::string_view headers) {
  if (head_.if_match.data() && (head_.if_match.substr(0, 1) != "\"" || head_.if_match != etag_in(headers))) return false;
  // What another server's back asks for is told of in logs and traces here, too, where there are any.
  if (head_.is_handed_on && head_.has_id && loop_.fleet().tells_of_reads()) return false;
  return !head_.origin.data() || loop_.fleet().agrees(target_.bucket, head_.origin);
}

void Connection::answered_hit(bool is_head, bool is_part, double now_s) {
  loop_.tally.hit(is_signed(head_), is_head, is_part);
  tenant_->hits.fetch_add(1, std::memory_order_relaxed);
  if (hits_untold_++ == 0) hits_since_s_ = now_s;
  if (unsent_bytes_ == 0) told_first_bytes();
}

void Connection::told_first_bytes() {
  loop_.tally.answered(hits_untold_, clock_s() - hits_since_s_);
  hits_untold_ = 0;
}

bool Connection::names_bucket_by_host() const {
  if (front_.settings_.domains.empty()) return false;
  for (const Header& header : head_.headers) {
    if (!equals_ignoring_case(header.name, "host")) continue;
    const std::string_view host = header.value.substr(0, header.value.find(':'));
    for (const std::string& domain : front_.settings_.domains)
      if (host.size() > domain.size() && equals_ignoring_case(host.substr(host.size() - domain.size()), domain) &&
          host[host.size() - domain.size() - 1] == '.')
        return true;
  }
  return false;
}

// Whether who shows nothing at all asks for what only S3 has.
bool Connection::is_anonymous_s3() const {
  const std::string_view target = head_.target, blobs = "/blob/", own = front_.settings_.gathered;
  if (!head_.authorization.empty() || target.substr(0, own.size()) == own || target.substr(0, blobs.size()) == blobs)
    return false;
  if ((head_.method != "GET" && head_.method != "HEAD") || target == "/" || target.find('?') != std::string_view::npos)
    return true;
  for (const Header& header : head_.headers)
    for (const std::string_view begin : {"x-amz-", "amz-sdk-"})
      if (equals_ignoring_case(header.name.substr(0, begin.size()), begin)) return true;
  return names_bucket_by_host();
}

// Nothing if it is another version by now, or the version cannot be read.
const std::string* Connection::headers_of(const Object& object, uint16_t bucket) {
  HeadCache::Entry& cached = loop_.heads.slot(object.id);
  if (cached.id == object.id && cached.text_at == object.text_at && cached.tag == object.tag) return &cached.headers;
  cached.text_at = 0;  // whatever happens now, it is not what it was
  std::string attributes;
  try {
    const auto found = front_.index_->find(bucket, target_.key, false);
    if (!found || found->object.text_at != object.text_at || found->object.tag != object.tag) return nullptr;
    cached.headers = ETAG;
    append_etag(cached.headers, found->version);
    attributes = found->attributes;
  } catch (const FileProblem&) {
    return nullptr;
  }
  cached.is_told = !attributes.empty();
  cached.id = object.id;
  cached.text_at = object.text_at;
  cached.tag = object.tag;
  cached.headers += "\r\nAccept-Ranges: bytes\r\n" + attributes;
  if (("\n" + attributes).find("\ncontent-type: ") == std::string::npos)
    cached.headers += "Content-Type: application/octet-stream\r\n";
  return &cached.headers;
}

// Of what `headers_of` has found.
bool Connection::is_told(const Object& object) const { return loop_.heads.slot(object.id).is_told; }

bool Connection::put_piece(const Object& object, uint16_t bucket, uint64_t start, uint64_t stop, std::string& head) {
  if (object.container == 0) return false;
  int number = 0;
  // Opened first, then looked up: who gives blocks up looks first whether the file is in use (`Files::is_used`).
  std::shared_ptr<File> file = front_.files_->open(object.container, number);
  if (!file) return false;
  uint64_t offset = start;
  if (object.flags & Object::LARGE) {
    if (!front_.index_->covers(object, start, stop, front_.now_s_.load(std::memory_order_relaxed))) return false;
  } else {
    if (!front_.is_right(object, bucket, target_.key, *file)) return false;
    offset += object.offset;
  }
  if (stop - start <= (tls_ ? SEALED_COPY_MAX : COPY_MAX)) {
    char data[SEALED_COPY_MAX];
    const ssize_t got = ::pread(file->fd, data, stop - start, static_cast<off_t>(offset));
    if (got != static_cast<ssize_t>(stop - start)) return false;
    head.append(data, static_cast<size_t>(got));
    send_text(head, is_limited());
    return true;
  }
  put_text(head, false);
  send_file(std::move(file), offset, stop - start);
  return true;
}

}  // namespace stoker
