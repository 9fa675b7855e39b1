#include "lockstep/fabric/heap.h"

#include <atomic>
#include <cerrno>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::fabric {
namespace {

constexpr uint32_t kMaxBlocks = 4096;

struct Entry {
  std::atomic<uint64_t> id;  // 0: free
  SegmentHandle handle;
};

Entry* entries_of(const Segment& table) { return reinterpret_cast<Entry*>(table.data()); }

}  // namespace

struct SharedHeap::Books {
  Segment table = Segment::create(kMaxBlocks * sizeof(Entry), "lockstep-heap");
  mutable std::mutex mutex;
  std::map<const std::byte*, std::pair<uint32_t, Segment>> blocks;  // by start address
  uint64_t next_id = 1;

  void free(const std::byte* start) {
    const std::lock_guard lock(mutex);
    const auto found = blocks.find(start);
    entries_of(table)[found->second.first].id.store(0, std::memory_order_release);
    blocks.erase(found);
  }
};

SharedHeap::SharedHeap() : books_(std::make_shared<Books>()) {}

const SegmentHandle& SharedHeap::table() const { return books_->table.handle(); }

std::shared_ptr<std::byte> SharedHeap::allocate(size_t bytes) {
  Segment segment = Segment::create(bytes == 0 ? 1 : bytes, "lockstep-block");
  std::byte* start = segment.data();
  const std::lock_guard lock(books_->mutex);
  Entry* entries = entries_of(books_->table);
  uint32_t index = 0;
  while (index < kMaxBlocks && entries[index].id.load(std::memory_order_relaxed) != 0) ++index;
  if (index == kMaxBlocks) {
    throw SystemError(
        format("this rank already holds {} blocks of symmetric memory, the most there can be",
               kMaxBlocks),
        ENFILE);
  }
  entries[index].handle = segment.handle();
  entries[index].id.store(books_->next_id++, std::memory_order_release);
  books_->blocks.emplace(start, std::pair(index, std::move(segment)));
  return {start, [books = books_](std::byte* block) { books->free(block); }};
}

Location SharedHeap::find(const void* data, size_t bytes) const {
  const auto* start = static_cast<const std::byte*>(data);
  const std::lock_guard lock(books_->mutex);
  auto found = books_->blocks.upper_bound(start);
  if (found == books_->blocks.begin()) return {};
  --found;
  const auto& [index, segment] = found->second;
  const auto offset = static_cast<size_t>(start - segment.data());
  if (offset + bytes > segment.size()) return {};
  return {Location::block, index,
          entries_of(books_->table)[index].id.load(std::memory_order_relaxed), offset};
}

std::byte* PeerHeaps::resolve(const SegmentHandle& table, const Location& location) {
  if (location.kind == Location::address) return reinterpret_cast<std::byte*>(location.offset);
  const std::lock_guard lock(mutex_);
  PeerTable& peer = peers_[{table.pid, table.inode}];
  if (peer.table.data() == nullptr) peer.table = Segment::open(table);
  Entry* entries = entries_of(peer.table);
  auto found = peer.mapped.find(location.entry);
  if (found == peer.mapped.end() || found->second.first != location.id) {
    std::erase_if(peer.mapped, [&](const auto& item) {
      return entries[item.first].id.load(std::memory_order_acquire) != item.second.first;
    });
    check(entries[location.entry].id.load(std::memory_order_acquire) == location.id,
          "an operation names freed symmetric memory");
    peer.mapped[location.entry] = {location.id, Segment::open(entries[location.entry].handle)};
    found = peer.mapped.find(location.entry);
  }
  return found->second.second.data() + location.offset;
}

}  // namespace lockstep::fabric
