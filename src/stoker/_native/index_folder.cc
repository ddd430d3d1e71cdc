// The files that are there beside what the index knows: at the start, when nothing else goes on.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "files.h"
#include "index.h"
#include "turns.h"

namespace stoker {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr size_t FOLDERS_AT_ONCE_FROM = 4;
constexpr uint64_t PAGE_BYTES = 4096;
// A file in many extents takes some pages more than its blocks do.
constexpr uint64_t EXTENTS_BYTES = 64 * 1024, EXTENTS_SHARE = 256;

struct OnDisk {
  uint32_t container;
  uint64_t size_bytes;
};

struct CloseFolder {
  void operator()(DIR* folder) const { ::closedir(folder); }
};
using Folder = std::unique_ptr<DIR, CloseFolder>;

// Nothing if it cannot be opened; `errno` is then why.
Folder open_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return nullptr;
  Folder folder(::fdopendir(fd));
  if (!folder) ::close(fd);
  return folder;
}

// False after the last, or where `number` says why there is none.
bool next_name(const Folder& folder, std::string& name, int& number) {
  errno = 0;
  const dirent* entry = ::readdir(folder.get());
  if (!entry) number = errno;
  else name = entry->d_name;
  return entry != nullptr;
}

// The containers below, and what each takes of the disk. Files of other names are let be. Returns an errno.
int files_in(const std::string& path, const std::string& name, std::vector<OnDisk>& found) {
  const Folder folder = open_folder(path + "/" + name);
  if (!folder) return errno == ENOTDIR || errno == ELOOP || errno == ENOENT ? 0 : errno;
  const Files files("", 0);  // for their names
  int number = 0;
  for (std::string file; next_name(folder, file, number);) {
    struct stat about;
    const auto container = static_cast<uint32_t>(std::strtoul(file.c_str(), nullptr, 16));
    if (container == 0 || files.path(container) != "/" + name + "/" + file) continue;
    if (::fstatat(::dirfd(folder.get()), file.c_str(), &about, AT_SYMLINK_NOFOLLOW) == 0)
      found.push_back({container, static_cast<uint64_t>(about.st_blocks) * 512});
  }
  return number;
}

uint64_t pages_bytes(uint64_t size_bytes) { return (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

}  // namespace

Survey Index::survey(const std::string& path) {
  std::vector<std::string> names;
  int problem = 0;
  const Folder folder = open_folder(path);
  if (!folder) problem = errno;
  else
    for (std::string name; next_name(folder, name, problem);)
      if (name[0] != '.') names.push_back(name);
  {
    const Lock lock(counts_mutex_);
    for (Owner& owner : owners_.slots()) owner.is_seen = false;
  }
  Survey survey;
  std::mutex mutex;
  Turns turns(names.size() < FOLDERS_AT_ONCE_FROM ? 0 : Turns::threads());
  turns.begin(problem ? 0 : names.size(), [&](size_t i) {
    std::vector<OnDisk> found;
    const int number = files_in(path, names[i], found);
    Survey part;
    for (const OnDisk& file : found) look_at(file.container, file.size_bytes, part);
    const Lock lock(mutex);
    if (number) problem = number;
    survey.add(part);
  });
  turns.wait();
  if (problem) throw FileProblem("cannot look through " + path + ": " + std::strerror(problem), problem);
  const Lock lock(counts_mutex_);
  for (const auto& [number, _] : segments_)
    if (survey.segments.count(number) == 0) survey.missing.push_back(number);
  for (const Owner& owner : owners_.slots())
    if (owner.container && !owner.is_seen) survey.missing.push_back(owner.container);
  return survey;
}

// A container's file is there.
void Index::look_at(uint32_t number, uint64_t size_bytes, Survey& survey) {
  Owner owner;
  {
    const Lock lock(counts_mutex_);
    const auto segment = segments_.find(number);
    if (segment != segments_.end()) survey.segments[number] = {segment->second, size_bytes};
    Owner* found = owners_.find(number);
    if (!found && segment == segments_.end()) survey.unknown.push_back(number);
    if (!found) return;
    found->is_seen = true;
    owner = *found;
  }
  at_owner(owner, [&](Shard& shard, uint32_t object) {
    const uint64_t held_bytes = held_of(shard, shard.at(object)).size_bytes;
    const uint64_t full = held_bytes / block_size_bytes_;  // all but the last are
    const uint64_t counted_bytes = full * pages_bytes(block_size_bytes_) + pages_bytes(held_bytes % block_size_bytes_);
    survey.large_bytes[owner.bucket] += counted_bytes;
    if (size_bytes > counted_bytes + std::max(EXTENTS_BYTES, counted_bytes / EXTENTS_SHARE))
      survey.too_long.push_back(number);
  });
}

void Survey::add(const Survey& other) {
  unknown.insert(unknown.end(), other.unknown.begin(), other.unknown.end());
  too_long.insert(too_long.end(), other.too_long.begin(), other.too_long.end());
  segments.insert(other.segments.begin(), other.segments.end());
  for (const auto& [bucket, size_bytes] : other.large_bytes) large_bytes[bucket] += size_bytes;
}

}  // namespace stoker
