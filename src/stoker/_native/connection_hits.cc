// Requests that are answered without the back.
#include <unistd.h>

#include "connection.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr size_t COPY_MAX = 2 * 1024;  // up to here a copy is cheaper than sendfile

}  // namespace

bool Connection::answer_hit() {
  const bool is_head = head_.method == "HEAD";
  if ((!is_head && head_.method != "GET") || head_.is_conditional || head_.is_refreshing) return false;
  if (names_bucket_by_host()) return false;
  if (!split_target(head_.target, target_) || !rules_->may_read(principal_, target_.bucket)) return false;
  const auto rule = rules_->buckets.find(target_.bucket);
  if (rule == rules_->buckets.end()) return false;
  const uint32_t now = front_.now_s_.load(std::memory_order_relaxed);
  Object object;
  if (!front_.index_->look_up(rule->second.number, target_.key, now, object)) return false;
  if ((object.flags & Object::ABSENT) || !rule->second.is_fresh(object.checked_s, now)) return false;
  ByteRange range{0, object.size_bytes};
  RangeKind kind = RangeKind::whole;
  if (head_.range.data()) kind = parse_range(head_.range, object.size_bytes, range);
  if (kind == RangeKind::unsatisfiable) return false;
  const std::string* headers = headers_of(object, rule->second.number);
  if (!headers) return false;
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
  else if (!put_piece(object, range.start, range.stop, head)) return false;
  loop_.count_hit(rule->second.number, is_head ? 0 : range.stop - range.start);
  return true;
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

// Nothing if it is another version by now, or the version cannot be read.
const std::string* Connection::headers_of(const Object& object, uint16_t bucket) {
  HeadCache::Entry& cached = loop_.heads.slot(object.id);
  if (cached.id == object.id && cached.text_at == object.text_at && cached.tag == object.tag) return &cached.headers;
  cached.text_at = 0;  // whatever happens now, it is not what it was
  std::string attributes;
  try {
    const auto found = front_.index_->find(bucket, target_.key, false);
    if (!found || found->object.text_at != object.text_at || found->object.tag != object.tag) return nullptr;
    cached.headers = "ETag: ";
    append_etag(cached.headers, found->version);
    attributes = found->attributes;
  } catch (const FileProblem&) {
    return nullptr;
  }
  cached.id = object.id;
  cached.text_at = object.text_at;
  cached.tag = object.tag;
  cached.headers += "\r\nAccept-Ranges: bytes\r\n" + attributes;
  if (("\n" + attributes).find("\ncontent-type: ") == std::string::npos)
    cached.headers += "Content-Type: application/octet-stream\r\n";
  return &cached.headers;
}

bool Connection::put_piece(const Object& object, uint64_t start, uint64_t stop, std::string& head) {
  if (object.container == 0) return false;
  int number = 0;
  // Opened first, then looked up: who gives blocks up looks first whether the file is in use (`Files::is_used`).
  std::shared_ptr<File> file = front_.files_->open(object.container, number);
  if (!file) return false;
  uint64_t offset = start;
  if (object.flags & Object::LARGE) {
    if (!front_.index_->covers(object, start, stop, front_.now_s_.load(std::memory_order_relaxed))) return false;
  } else {
    if (!(object.flags & Object::VERIFIED)) return false;
    offset += object.offset;
  }
  if (stop - start <= COPY_MAX) {
    char data[COPY_MAX];
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
