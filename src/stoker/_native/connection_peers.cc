// Requests that another server of the fleet is asked for without the back.
#include "connection.h"
#include "loop.h"

namespace stoker {

// What is not here of a small object, of its owner. All of it is taken in before anything goes out, so that whatever goes
// wrong there, the back can still answer. False: it is for the back at once.
bool Connection::hand_on(const Object& object, const BucketRule& rule, const ByteRange& range, const std::string& head,
                         double now_s) {
  const FrontSettings& settings = front_.settings_;
  const uint64_t size = range.stop - range.start;
  // Of what is held in part, or is to be verified, and of what has to be told of in logs the back knows more.
  if (object.container != 0 || head_.is_handed_on || head_.has_id || size > settings.handed_bytes_max) return false;
  if (object.size_bytes > front_.index_->block_size_bytes()) return false;
  const Fleet& fleet = loop_.fleet();  // once: asked again, it may be another, and this one gone
  const Peer* owner = fleet.asked_for(target_.bucket, target_.key);
  if (!owner) return false;
  // Who takes nothing, or little at a time, would have all the memory for what it asked for next.
  if (unsent_bytes_ >= settings.handed_bytes_max || (unsent_bytes_ && is_limited())) return false;
  auto reserved = std::make_shared<Reserved>(front_.handing_bytes_, tenant_, size);
  if (!reserved->is_fair(settings.handing_bytes_max)) return false;
  const std::string part = std::to_string(range.start) + "-" + std::to_string(range.stop - 1);
  PeerQuestion question;
  question.connection = id_;
  question.bucket = target_.bucket;
  question.what = target_.key + " " + part;
  question.etag = etag_in(std::string_view(head).substr(head.find(ETAG)));
  question.content_range = "bytes " + part + "/" + std::to_string(object.size_bytes);
  question.size_bytes = size;
  question.answer = head;
  question.reserved = std::move(reserved);
  std::string& request = question.request;
  request.append("GET ").append(head_.target).append(" HTTP/1.1\r\n").append(fleet.headers(target_.bucket));
  request.append("Range: bytes=").append(part).append("\r\nIf-Match: ").append(question.etag).append("\r\n\r\n");
  if (!loop_.ask(*owner, question, now_s)) return false;
  handed_on_.assign(input_, taken_ - head_.size, head_.size);
  handed_bucket_ = rule.number;
  handed_bytes_ = size;
  state_ = State::peer;
  since_s_ = now_s;
  return true;
}

void Connection::take_from_peer(PeerAnswer& answer, double now_s) {
  if (state_ != State::peer) return;
  size_t seen = 0;
  const char* why = nullptr;
  (void)parse_head(handed_on_, seen, head_, why);  // what it was said in may be gone
  if (!answer.is_whole) return ask_back(now_s);
  loop_.count_handed_on(handed_bucket_, handed_bytes_);
  loop_.tally.handed_on(is_signed(head_), head_.range.data() && answer.bytes.compare(9, 3, "206") == 0, clock_s() - since_s_);
  tenant_->hits.fetch_add(1, std::memory_order_relaxed);
  const uint64_t size = answer.bytes.size();
  put(Piece{std::move(answer.bytes), nullptr, 0, size, is_limited(), nullptr, nullptr, nullptr, std::move(answer.reserved)});
  state_ = State::head;
  since_s_ = now_s;
  if (!keeps_alive_ || front_.drains_.load(std::memory_order_relaxed)) closes_ = true;
}

}  // namespace stoker
