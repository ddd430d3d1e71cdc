// What this server holds: for each key its version, and for each version where its bytes are. Durable by a journal.
//
// Safe to use from several threads. Names live in the journal's file only; memory holds 64 bytes for an object.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "index_owners.h"
#include "journal.h"

namespace stoker {

constexpr uint32_t WHOLE = UINT32_MAX;  // in place of a block's number: the object lies packed in a segment

struct alignas(64) Object {
  static constexpr uint8_t VERIFIED = 1, LARGE = 2, ABSENT = 4;
  Hash128 id;
  uint64_t text_at;    // of its body in the journal
  uint64_t size_bytes;
  uint32_t checked_s;  // when the origin last said so, seconds since 1970; 0: it must be asked
  uint32_t used_s;
  uint32_t container;  // 0: nothing is held
  uint32_t offset;     // in the container, if it is a segment; else see `block_flags`
  uint32_t crc;
  uint32_t tag;        // of its version
  uint16_t bucket;
  uint16_t version_size;  // with the attributes that follow it
  uint16_t key_size;
  uint8_t flags;
  uint8_t block_flags;  // of a large one: those of its only block, whose `used_s` is `offset`; 0: `offset` is its list
};
static_assert(sizeof(Object) == 64);

struct Block {
  static constexpr uint8_t HELD = 1, VERIFIED = 2;
  uint32_t crc = 0;
  uint32_t used_s = 0;
  uint8_t flags = 0;
};

// A block where it is kept.
struct BlockAt {
  uint32_t& crc;
  uint32_t& used_s;
  uint8_t& flags;
};

// The blocks of a large object that can have more than one.
struct BlockList {
  std::unique_ptr<Block[]> blocks;
  uint32_t size = 0;
  uint32_t held = 0;
};

// An object as it was when it was looked up.
struct Found {
  Object object;
  std::string version;
  std::vector<Block> blocks;  // of a large one, if asked for
  std::string attributes;     // what the origin says of it besides: lines of headers
};

// A place where bytes lie that are held.
struct Piece {
  uint16_t bucket = 0;
  Hash128 id;
  uint32_t block = WHOLE;
  uint32_t container = 0;
  uint32_t used_s = 0;
  uint64_t size_bytes = 0;
  uint64_t offset = 0;
  uint32_t crc = 0;
  bool is_verified = false;
};

struct NamedPiece {
  Piece piece;
  std::string key;  // empty unless asked for
};

struct Container {
  uint16_t bucket = 0;
  bool is_large = false;  // it holds blocks of one large object
  uint32_t pieces = 0;
  uint64_t size_bytes = 0;  // of the pieces
  uint32_t used_s = 0;      // when the last of them was held

  void add(const Container& other) {
    bucket = other.bucket;
    is_large = other.is_large;
    pieces += other.pieces;
    size_bytes += other.size_bytes;
    used_s = std::max(used_s, other.used_s);
  }
};

struct BucketFigures {
  uint64_t objects = 0;
  uint64_t pieces = 0;
  uint64_t size_bytes = 0;
};

// What a look through the folder found.
struct Survey {
  std::vector<uint32_t> unknown;  // files that the index does not know
  std::vector<uint32_t> missing;  // containers that have no file
  std::vector<uint32_t> too_long;  // files of large objects that take more than is held of them
  std::map<uint32_t, std::pair<Container, uint64_t>> segments;  // and what their files take of the disk
  std::map<uint16_t, uint64_t> large_bytes;  // by bucket: what is held of large objects takes, in whole pages

  void add(const Survey& other);
};

enum class Packing { any, packed, large };

struct Name {
  std::string key;
  std::string version;
  Object object;
};

class Index {
 public:
  static constexpr size_t SHARDS = 64;

  // Opens or makes the file. Throws FileProblem.
  // `now_s`: what the file says of later is taken for just now, and was checked before; the clock was set back.
  explicit Index(const std::string& path, uint32_t block_size_bytes, uint32_t now_s = UINT32_MAX);
  Index(const Index&) = delete;

  uint32_t block_size_bytes() const { return block_size_bytes_; }
  Replay replay() const { return replay_; }
  // Whether the file told of times that are still to come.
  bool is_of_later() const { return is_of_later_; }
  std::string path() const;
  uint64_t file_bytes() const;
  uint64_t memory_bytes() const;
  uint64_t objects() const { return objects_.load(std::memory_order_relaxed); }

  // The number of a bucket; a new one if there is none of that name. `note` is kept with it. Throws FileProblem.
  uint16_t bucket(const std::string& name, const std::string& note);
  std::map<std::string, std::pair<uint16_t, std::string>> buckets() const;

  std::optional<Found> find(uint16_t bucket, std::string_view key, bool with_blocks) const;
  // The same for who serves it: without its version, and it counts as a use.
  bool look_up(uint16_t bucket, std::string_view key, uint32_t now_s, Object& object) const;
  // Whether all of these blocks are held and verified; counts as a use of them.
  bool covers(const Object& object, uint64_t start, uint64_t stop, uint32_t now_s) const;
  // Where a block of that version is held; counts as a use. An object that is packed whole is its block 0.
  std::optional<Piece> held(uint16_t bucket, std::string_view key, uint32_t tag, uint32_t block, uint32_t now_s) const;
  // What the origin says; whether that is another version, whose pieces are gone. Attributes that are not empty replace
  // those that were known of the same version. Throws FileProblem: what was known before is known no more then, unless it
  // `stays_true`.
  bool learn(uint16_t bucket, std::string_view key, std::string_view version, uint64_t size_bytes, bool absent,
             uint32_t now_s, std::string_view attributes = {}, bool stays_true = false);
  bool forget(uint16_t bucket, std::string_view key);
  // Of all that there is not, what nobody has asked about since; how many those were.
  uint64_t forget_absent(uint32_t before_s);
  // Have the origin asked before anything under the prefix is served again; returns how many keys.
  uint64_t refresh(uint16_t bucket, std::string_view prefix);
  void clear(uint16_t bucket);

  // A piece was written. False if the key has another version by now. Throws FileProblem.
  bool hold(uint16_t bucket, std::string_view key, std::string_view version, uint32_t block, uint32_t container,
            uint32_t offset, uint32_t crc, uint32_t now_s);
  bool verified(uint16_t bucket, std::string_view key, uint32_t block, uint32_t container);
  bool lose(const Piece& piece);
  // Have what is held of a container verified before it is served again.
  void doubt(uint32_t container);
  // The last eight bytes of each key's id, one after the other.
  std::string ids(uint16_t bucket, const std::vector<std::string>& keys) const;
  // Which of these keys are not held whole, or of which nobody has asked the origin since then; not of those that are
  // known not to be there. Counts as no use.
  std::vector<uint32_t> lacking(uint16_t bucket, const std::vector<std::string>& keys, uint32_t checked_from_s) const;
  // The key that a piece belongs to; empty if it is known no more.
  std::string key_of(const Piece& piece) const;
  // A packed object was written anew elsewhere. False if it does not lie where the piece says. Throws FileProblem.
  bool move(const Piece& piece, uint32_t container, uint32_t offset);
  // Its number is never used again.
  void lose_container(uint32_t container);
  void lose_containers(const std::unordered_set<uint32_t>& containers);
  void use(uint16_t bucket, std::string_view key, uint32_t block, uint32_t now_s);

  std::map<uint32_t, Container> containers() const;
  // Those that are no files of large objects.
  std::map<uint32_t, Container> segments() const;
  std::optional<Container> container(uint32_t number) const;
  // The largest number that was ever used, as far as the file tells.
  uint32_t container_max() const;
  // What is held of a container.
  std::vector<NamedPiece> pieces(uint32_t container, bool with_keys) const;
  // The key of some object of each container.
  std::map<uint32_t, std::string> container_keys() const;
  std::map<uint16_t, BucketFigures> figures() const;
  // Some pieces that are held, drawn by chance; no buckets: of any.
  std::vector<Piece> sample(size_t count, const std::unordered_set<uint16_t>& buckets, Packing packing,
                            uint64_t seed) const;
  // Of each of these segments the ids of some of its objects, drawn by chance: all, if they are no more than `count`.
  std::unordered_map<uint32_t, std::vector<Hash128>> sample_ids(const std::vector<uint32_t>& segments, size_t count,
                                                               uint64_t seed) const;
  // Objects of a bucket in no order, from `cursor` (0 at first) on; sets it to 0 after the last.
  std::vector<Name> scan(uint16_t bucket, std::string_view prefix, uint64_t& cursor, size_t limit) const;

  // Looks through the folder of the containers' files. Throws FileProblem.
  Survey survey(const std::string& path);

  // Writes the journal anew when most of it is of the past; returns whether it did. Throws FileProblem.
  bool compact(bool anyway);
  void sync();

 private:
  static constexpr size_t CHUNK = 1024;
  static constexpr uint32_t AT_ONCE = 256;

  struct Met {  // by a replay, in one shard
    uint32_t container_max = 0;
    uint16_t bucket_max = 0;
    bool is_of_later = false;
  };

  class Replaying;

  struct Shard {
    mutable std::mutex mutex;
    std::vector<uint32_t> table;  // numbers of objects + 1; its size is a power of two
    std::vector<std::unique_ptr<Object[]>> chunks;
    std::vector<uint32_t> spare;
    uint32_t used = 0;   // numbers that were given
    uint32_t count = 0;  // objects
    std::vector<BlockList> lists;
    std::vector<uint32_t> spare_lists;
    std::vector<BucketFigures> figures;  // by the bucket's number
    std::vector<uint64_t> moved;  // while the journal is written anew: where texts are in the new file
    uint8_t file = 0;             // which of the two files texts are in
    Met met;

    Object& at(uint32_t number) const { return chunks[number / CHUNK][number % CHUNK]; }
    bool is_live(uint32_t number) const { return at(number).key_size != 0; }
    const uint32_t* slot_of(uint64_t id_low) const { return &table[id_low & (table.size() - 1)]; }
    uint32_t find(const Hash128& id) const;
    uint32_t add(const Hash128& id);
    void remove(uint32_t number);
    void grow(size_t size);
    BucketFigures& figures_of(uint16_t bucket);
    // How many blocks there is room for, and one of them if it is held.
    uint32_t blocks(const Object& object) const;
    std::optional<BlockAt> block(Object& object, uint32_t block) const;
    void put_block(Object& object, uint32_t block, const Block& value, uint64_t blocks_max);
    bool drop_block(Object& object, uint32_t block);
    void drop_blocks(Object& object);
  };
  static constexpr uint32_t NONE = UINT32_MAX;

  struct Places {  // of a record in each of the two files
    uint64_t in[2] = {0, 0};
  };

  // Every live object; a shard's lock is held for no more than `at_once` of them.
  template <typename Then>
  void each(uint32_t at_once, Then then) const {
    for (size_t i = 0; i < SHARDS; ++i) {
      Shard& shard = shards_[i];
      for (uint32_t number = 0;;) {
        const std::lock_guard<std::mutex> lock(shard.mutex);
        const uint32_t end = std::min(shard.used, number + at_once);
        if (number >= end) break;
        for (; number < end; ++number)
          if (shard.is_live(number)) then(shard, number);
      }
    }
  }
  bool draw(const Shard& shard, const std::unordered_set<uint16_t>& buckets, Packing packing, uint64_t chance,
            std::vector<Piece>& drawn) const;
  bool draw_large(const std::unordered_set<uint16_t>& buckets, uint64_t chance, std::vector<Piece>& drawn) const;
  uint32_t block_from(const Shard& shard, uint32_t number, uint64_t chance) const;
  Piece piece_of(const Shard& shard, uint32_t number, uint32_t block) const;
  Hash128 identity(uint16_t bucket, std::string_view key) const;
  Shard& shard_of(const Hash128& id) const { return shards_[id.high >> 58]; }
  uint32_t tag_of(std::string_view version, uint64_t size_bytes) const;
  uint64_t blocks_max(const Object& object) const {
    return (object.size_bytes + block_size_bytes_ - 1) / block_size_bytes_;
  }
  uint64_t piece_bytes(const Object& object, uint32_t block) const;
  // What follows the version in its text, which is cut to the version.
  static std::string cut_attributes(std::string& said);
  bool has_version(const Shard& shard, const Object& object, std::string_view version,
                   std::string* attributes = nullptr) const;
  bool tell_anew(Shard& shard, uint32_t number, std::string_view key, std::string_view said, uint32_t now_s);
  void set_piece(Shard& shard, uint32_t number, uint32_t block, uint32_t container, uint32_t offset, uint32_t crc,
                 uint32_t now_s, bool is_verified);
  bool drop_piece(Shard& shard, uint32_t number, uint32_t block);
  bool drop_pieces(Shard& shard, uint32_t number);
  void drop_object(Shard& shard, uint32_t number);
  void drop_large();
  void drop_containers(const std::unordered_set<uint32_t>& containers);
  void count(Shard& shard, const Object& object, int pieces, int64_t size_bytes, uint32_t used_s);
  void own(const Shard& shard, uint32_t number, uint32_t used_s);
  void disown(const Object& object);
  Container held_of(const Shard& shard, Object& object) const;
  std::optional<Owner> owner(uint32_t container) const;
  // The object that a large file is of, under its shard's lock; false if the file is of none by now.
  template <typename Then>
  bool at_owner(const Owner& owner, Then then) const {
    Shard& shard = shards_[owner.shard];
    const std::lock_guard<std::mutex> lock(shard.mutex);
    if (owner.number >= shard.used) return false;
    const Object& object = shard.at(owner.number);
    if (object.container != owner.container || !(object.flags & Object::LARGE)) return false;
    then(shard, owner.number);
    return true;
  }
  void look_at(uint32_t container, uint64_t size_bytes, Survey& survey);
  static uint64_t record_bytes(const Object& object);
  void count_object(Shard& shard, const Object& object, int objects);
  std::string text(const Shard& shard, uint64_t at, size_t size) const;
  Places append(Kind kind, std::string_view body);
  void expect(uint64_t file_bytes);
  void append_gone(Kind kind, std::string_view body) noexcept;
  void place(Shard& shard, uint32_t number, Places places);

  void write_anew();
  void copy_all();
  void begin_switch();
  void copy(Shard& shard, uint32_t number, Journal& next);
  void switch_over();

  uint32_t block_size_bytes_;
  uint32_t container_max_ = 0;
  uint16_t bucket_max_ = 0;  // of all that were ever named in the file, or had objects
  std::atomic<bool> owes_{false};  // the file lacks a removal: it is to be written anew
  bool replays_ = false;  // what is held is counted once it is over
  mutable std::unique_ptr<Shard[]> shards_{new Shard[SHARDS]};
  std::atomic<uint64_t> objects_{0};
  std::atomic<uint64_t> live_bytes_{0};  // what a journal of the present would take

  mutable std::shared_mutex file_mutex_;  // taken last
  std::unique_ptr<Journal> files_[2];
  uint8_t current_ = 0;
  bool next_failed_ = false;
  bool switches_ = false;  // some shards' texts are in one file already, some still in the other
  std::string path_;
  uint32_t opened_s_;
  bool is_of_later_ = false;
  HashKey key_;
  Replay replay_;
  mutable std::mutex compaction_mutex_;  // taken before a shard's

  mutable std::mutex counts_mutex_;  // taken after a shard's
  std::unordered_map<uint32_t, Container> segments_;
  Owners owners_;
  std::map<std::string, std::pair<uint16_t, std::string>> buckets_;
};

}  // namespace stoker
