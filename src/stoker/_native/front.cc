#include "front.h"

#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "frames.h"
#include "hash.h"
#include "loop.h"

namespace stoker {
namespace {

constexpr size_t CHECKED_AT_ONCE_BYTES = 64 * 1024;

std::string random_bytes() {
  std::random_device chance;
  std::string bytes;
  append_number(bytes, chance(), 4);
  append_number(bytes, chance(), 4);
  return bytes;
}

Command command_of(Command::Kind kind, uint64_t connection) {
  Command command;
  command.kind = kind;
  command.connection = connection;
  return command;
}

}  // namespace

Front::Front(std::shared_ptr<Index> index, std::shared_ptr<Files> files, const FrontSettings& settings)
    : index_(std::move(index)), files_(std::move(files)), settings_(settings), egress_(settings.egress_bytes_per_s),
      instance_(random_bytes()), event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Front::~Front() {
  stop();
  ::close(event_fd_);
}

void Front::listen(int fd) { listening_.push_back(fd); }

void Front::start() {
  for (int number = 0; number < settings_.threads; ++number)
    loops_.push_back(std::make_unique<Loop>(*this, static_cast<uint64_t>(number)));
  for (const auto& loop : loops_) loop->start();
}

void Front::drain() {
  drains_ = true;
  for (const auto& loop : loops_) loop->post(command_of(Command::Kind::drain, 0));
}

void Front::stop() {
  for (const auto& loop : loops_) loop->stop();  // they stay, for who speaks to them at this moment
  for (const int fd : listening_) ::close(fd);
  listening_.clear();
}

void Front::post(Event event) {
  bool is_first;
  {
    const std::lock_guard<std::mutex> lock(events_mutex_);
    is_first = events_.empty();
    events_.push_back(std::move(event));
  }
  const uint64_t one = 1;
  if (is_first) (void)!::write(event_fd_, &one, sizeof one);
}

std::vector<Event> Front::take(size_t limit) {
  std::vector<Event> taken;
  const std::lock_guard<std::mutex> lock(events_mutex_);
  while (!events_.empty() && taken.size() < limit) {
    taken.push_back(std::move(events_.front()));
    events_.pop_front();
  }
  uint64_t count;
  if (events_.empty()) (void)!::read(event_fd_, &count, sizeof count);
  return taken;
}

bool Front::order(Command command) {
  const size_t number = command.connection & 0xFF;
  return number < loops_.size() && loops_[number]->post(std::move(command));
}

bool Front::say(uint64_t connection, std::string bytes, bool is_data, bool is_last) {
  Command command = command_of(Command::Kind::say, connection);
  command.bytes = std::move(bytes);
  command.is_data = is_data;
  command.is_last = is_last;
  return order(std::move(command));
}

bool Front::send_file(uint64_t connection, std::shared_ptr<File> file, uint64_t offset, uint64_t size) {
  Command command = command_of(Command::Kind::file, connection);
  command.file = std::move(file);
  command.offset = offset;
  command.size = size;
  return order(std::move(command));
}

bool Front::add(Passing& passing, uint16_t bucket, uint32_t container) {
  errno = 0;
  if (passing.add(*index_, *files_, bucket, container)) return true;
  if (errno == ENOENT) post(Event{Event::Kind::broken, container, {}});
  return false;
}

bool Front::pass(uint64_t connection, uint16_t bucket, uint32_t container, std::string before,
                 const std::string& after) {
  auto passing = std::make_shared<Passing>(passing_, settings_.passing_max);
  if (!add(*passing, bucket, container)) return false;
  Command command = command_of(Command::Kind::say, connection);
  command.bytes = std::move(before) + passing->frame(instance_) + after;
  command.is_data = true;
  command.passing = std::move(passing);
  return order(std::move(command));
}

bool Front::send_inflow(uint64_t connection, std::shared_ptr<Inflow> inflow, uint64_t offset, uint64_t size) {
  Command command = command_of(Command::Kind::inflow, connection);
  command.inflow = std::move(inflow);
  command.offset = offset;
  command.size = size;
  return order(std::move(command));
}

bool Front::wake(uint64_t connection) { return order(command_of(Command::Kind::wake, connection)); }

bool Front::more(uint64_t connection, uint64_t bytes) {
  Command command = command_of(Command::Kind::more, connection);
  command.size = bytes;
  return order(std::move(command));
}

bool Front::finish(uint64_t connection) { return order(command_of(Command::Kind::finish, connection)); }

bool Front::drop(uint64_t connection) { return order(command_of(Command::Kind::drop, connection)); }

std::shared_ptr<Tenant> Front::tenant(const std::string& name, double bytes_per_s) {
  const std::lock_guard<std::mutex> lock(tenants_mutex_);
  std::shared_ptr<Tenant>& tenant = tenants_[name];
  if (tenant) tenant->rate.set_rate(bytes_per_s);
  else tenant = std::make_shared<Tenant>(bytes_per_s);
  return tenant;
}

bool Front::charge(uint64_t connection, const std::string& tenant) {
  Command command = command_of(Command::Kind::charge, connection);
  {
    const std::lock_guard<std::mutex> lock(tenants_mutex_);
    const auto found = tenants_.find(tenant);
    if (found == tenants_.end()) return false;
    command.tenant = found->second;
  }
  return order(std::move(command));
}

bool Front::notify(uint64_t connection, uint64_t unsent_bytes_max) {
  Command command = command_of(Command::Kind::notify, connection);
  command.size = unsent_bytes_max;
  return order(std::move(command));
}

bool Front::is_right(const Object& object, uint16_t bucket, std::string_view key, const File& file) {
  if (object.flags & Object::VERIFIED) return true;
  struct stat now;
  if (::fstat(file.fd, &now) != 0 || now.st_nlink == 0) return false;  // somebody has removed it
  char data[CHECKED_AT_ONCE_BYTES];
  uint32_t crc = 0;
  for (uint64_t at = 0; at < object.size_bytes;) {
    const size_t part = std::min<uint64_t>(object.size_bytes - at, sizeof data);
    const ssize_t got = ::pread(file.fd, data, part, static_cast<off_t>(object.offset + at));
    if (got <= 0) return false;
    crc = crc32c(data, static_cast<size_t>(got), crc);
    at += static_cast<uint64_t>(got);
  }
  // Where it is not, the back finds the same, and gives it up.
  if (crc != object.crc) return false;
  index_->verified(bucket, key, WHOLE, object.container);
  return true;
}

Figures Front::figures() const {
  const std::lock_guard<std::mutex> lock(events_mutex_);
  return {accepted_, refused_, requests_, handed_over_, sent_bytes_, timed_out_, connections_, events_.size()};
}

Tally::Sums Front::tally() const {
  Tally::Sums sums;
  for (const auto& loop : loops_) loop->tally.add_to(sums);
  return sums;
}

std::map<std::string, TenantFigures> Front::tenant_figures() {
  const auto of = [](const Tenant& tenant) {
    return TenantFigures{tenant.hits, tenant.sent_bytes, static_cast<double>(tenant.throttled_ns) / 1e9};
  };
  std::map<std::string, TenantFigures> figures{{"", of(*nobody_)}};
  const std::lock_guard<std::mutex> lock(tenants_mutex_);
  for (const auto& [name, tenant] : tenants_) figures[name] = of(*tenant);
  return figures;
}

std::unordered_map<uint16_t, HitFigures> Front::take_hits() {
  std::unordered_map<uint16_t, HitFigures> sums;
  for (const auto& loop : loops_) {
    for (const auto& [bucket, figures] : loop->take_hits()) {
      sums[bucket].hits += figures.hits;
      sums[bucket].hit_bytes += figures.hit_bytes;
      sums[bucket].handed_on += figures.handed_on;
      sums[bucket].handed_on_bytes += figures.handed_on_bytes;
    }
  }
  return sums;
}

}  // namespace stoker
