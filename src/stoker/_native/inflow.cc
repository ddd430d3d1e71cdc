#include "inflow.h"

#include <cstring>

#include "front.h"

namespace stoker {

Inflow::Inflow(uint64_t size) : size_(size) {}

uint64_t Inflow::filled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return view_.filled;
}

Inflow::View Inflow::view() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return view_;
}

bool Inflow::take(const char* bytes, uint64_t size) {
  const View before = view();
  if (size > size_ - before.filled || before.file) return false;
  std::shared_ptr<char[]> whole = before.bytes;
  if (!whole) whole.reset(new char[size_]);
  std::memcpy(whole.get() + before.filled, bytes, size);  // behind what others see
  std::vector<std::pair<std::weak_ptr<Front>, uint64_t>> waiting;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    view_.bytes = std::move(whole);
    view_.filled += size;
    waiting.swap(waiting_);
  }
  for (const auto& [held, connection] : waiting)
    if (const std::shared_ptr<Front> front = held.lock()) front->wake(connection);
  return true;
}

void Inflow::keep(std::shared_ptr<File> file, uint64_t offset) {
  std::shared_ptr<char[]> given_back;  // which is after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  view_.file = std::move(file);
  view_.offset = offset;
  given_back.swap(view_.bytes);
}

bool Inflow::wait(std::weak_ptr<Front> front, uint64_t connection, uint64_t beyond) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (view_.filled > beyond) return false;
  waiting_.emplace_back(std::move(front), connection);
  return true;
}

}  // namespace stoker
