// Which object each large file is of: 16 bytes a file, with an eighth to a fifth of the slots free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

struct Owner {
  uint32_t container = 0;  // 0: the slot is free
  uint32_t number = 0;     // of the object, in its shard
  uint32_t used_s = 0;     // when the last of its blocks was held
  uint16_t bucket = 0;
  uint8_t shard = 0;
  bool is_seen = false;  // its file is there; for the look through the folder
};
static_assert(sizeof(Owner) == 16);

// Open addressing with slots side by side. It grows by an eighth, so that little of it is free.
class Owners {
 public:
  Owner* find(uint32_t container) {
    if (slots_.empty()) return nullptr;
    for (size_t slot = home(container);; slot = after(slot)) {
      if (slots_[slot].container == container) return &slots_[slot];
      if (slots_[slot].container == 0) return nullptr;
    }
  }
  const Owner* find(uint32_t container) const { return const_cast<Owners*>(this)->find(container); }

  // The one of this container; a new one if there is none.
  Owner& put(uint32_t container) {
    if (Owner* found = find(container)) return *found;
    if ((count_ + 1) * 8 > slots_.size() * 7) resize(slots_.size() + slots_.size() / 8 + 8);
    ++count_;
    return place(Owner{container});
  }

  void erase(uint32_t container) {
    const Owner* found = find(container);
    if (!found) return;
    auto hole = static_cast<size_t>(found - slots_.data());
    // What follows moves up, so that no search ends before it finds what it looks for (Knuth, 6.4, algorithm R).
    for (size_t slot = after(hole); slots_[slot].container; slot = after(slot)) {
      if (distance(home(slots_[slot].container), slot) < distance(hole, slot)) continue;
      slots_[hole] = slots_[slot];
      hole = slot;
    }
    slots_[hole] = Owner{};
    --count_;
  }

  size_t size() const { return count_; }
  // Free slots too.
  std::vector<Owner>& slots() { return slots_; }
  const std::vector<Owner>& slots() const { return slots_; }

 private:
  size_t home(uint32_t container) const {
    return static_cast<size_t>((uint64_t{container * 0x9E3779B1U} * slots_.size()) >> 32);
  }
  size_t after(size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
  size_t distance(size_t from, size_t to) const { return to >= from ? to - from : to + slots_.size() - from; }

  Owner& place(const Owner& owner) {
    size_t slot = home(owner.container);
    while (slots_[slot].container) slot = after(slot);
    return slots_[slot] = owner;
  }

  void resize(size_t size) {
    std::vector<Owner> before(size);
    before.swap(slots_);
    for (const Owner& owner : before)
      if (owner.container) place(owner);
  }

  std::vector<Owner> slots_;
  size_t count_ = 0;
};

}  // namespace stoker
