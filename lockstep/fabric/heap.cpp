// SPDX-License-Identifier: Apache-2.0
// How blocks share segments: a segment is a range of addresses, and only the pages under its blocks
// have memory. So a segment may be much larger than what is in it, and each new one is as large as
// all before it together: their number stays below 30, whatever the number and size of the blocks.
//
// A block that is freed while a peer may still use it keeps its memory: the table counts to how
// many peers it is lent. The owner looks at the count again whenever it is asked for something.
#include "lockstep/fabric/heap.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <iterator>
#include <optional>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"

namespace lockstep::fabric {
namespace {

constexpr uint32_t kMaxBlocks = 1 << 18;
constexpr uint32_t kMaxSegments = 1024;
constexpr size_t kSmallestSegment = size_t{64} << 20;
constexpr size_t kAlignment = 256;  // what vector instructions and device copies like best

struct Entry {
  std::atomic<uint64_t> id;  // 0: free
  uint32_t segment;
  std::atomic<int32_t> lent;  // to how many peers
  uint64_t start;             // bytes from the segment's start
};

// What a peer reads; in a reserved segment, of which only the entries in use have memory.
struct Table {
  SegmentHandle segments[kMaxSegments];
  Entry blocks[kMaxBlocks];
};

Table& table_in(const Segment& segment) { return *reinterpret_cast<Table*>(segment.data()); }

// A file that exceeds the limit would end the process by a signal; a memfd counts as one.
size_t largest_file() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return limit.rlim_cur / page_size() * page_size();
}

// A segment and which of its addresses belong to no block.
class Pool {
 public:
  Pool(Segment segment, size_t index)
      : segment_(std::move(segment)),
        index_(static_cast<uint32_t>(index)),
        free_{{0, segment_.size()}} {}

  const Segment& segment() const { return segment_; }
  uint32_t index() const { return index_; }

  std::optional<size_t> take(size_t bytes) {
    const size_t alignment = bytes >= page_size() ? page_size() : kAlignment;
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [begin, end] = *range;
      const size_t start = round_up(begin, alignment);
      if (start >= end || end - start < bytes) continue;
      free_.erase(range);
      if (begin < start) free_[begin] = start;
      if (start + bytes < end) free_[start + bytes] = end;
      return start;
    }
    return std::nullopt;
  }

  void give_back(size_t start, size_t bytes) {
    auto range = free_.emplace(start, start + bytes).first;
    if (range != free_.begin() && std::prev(range)->second == start) {
      std::prev(range)->second = range->second;
      range = std::prev(free_.erase(range));
    }
    if (const auto next = std::next(range); next != free_.end() && next->first == range->second) {
      range->second = next->second;
      free_.erase(next);
    }
    // Pages that the range shared with its neighbours, where those are free as well.
    for (const size_t at : {start, start + bytes - 1}) {
      const size_t page = at / page_size() * page_size();
      if (range->first <= page && page + page_size() <= range->second)
        segment_.discard(page, page_size());
    }
  }

 private:
  Segment segment_;
  uint32_t index_;
  std::map<size_t, size_t> free_;  // from start to end; no two touch
};

}  // namespace

struct SharedHeap::Books {
  struct Block {
    uint32_t entry;
    Pool* pool;
    size_t start, bytes;
  };

  Books() { table.commit(0, sizeof(Table::segments)); }

  // What takes long, giving pages memory and taking it away, is done without the lock: operations
  // of other threads look for blocks.
  const std::byte* allocate(size_t bytes) {
    reclaim();
    auto [pool, start] = take(bytes);
    try {
      pool->segment().commit(start, bytes);
      return enter(*pool, start, bytes);
    } catch (...) {
      pool->segment().discard(start, bytes);
      const std::lock_guard lock(mutex);
      pool->give_back(start, bytes);
      throw;
    }
  }

  void free(const std::byte* data) {
    if (table.handle().pid != getpid()) return;  // of a forked child: the block is its parent's
    {
      const std::lock_guard lock(mutex);
      const auto found = blocks.find(data);
      freed.push_back(found->second);
      blocks.erase(found);
    }
    reclaim();
  }

  // Takes the memory of freed blocks that no peer uses any more.
  void reclaim() {
    std::vector<Block> unused;
    {
      const std::lock_guard lock(mutex);
      std::erase_if(freed, [&](const Block& block) {
        Entry& entry = table_in(table).blocks[block.entry];
        if (entry.lent.load(std::memory_order_acquire) > 0) return false;
        entry.id.store(0, std::memory_order_release);
        unused.push_back(block);
        return true;
      });
      may_reclaim = !freed.empty();
    }
    for (const Block& block : unused) block.pool->segment().discard(block.start, block.bytes);
    const std::lock_guard lock(mutex);
    for (const Block& block : unused) {
      block.pool->give_back(block.start, block.bytes);
      free_entries.push_back(block.entry);
    }
  }

  std::map<const std::byte*, Block>::iterator block_with(const void* data) {
    const auto* address = static_cast<const std::byte*>(data);
    const auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) return blocks.end();
    const auto found = std::prev(next);
    return address < found->first + found->second.bytes ? found : blocks.end();
  }

  Segment table = Segment::reserve(sizeof(Table), "lockstep-heap");
  std::mutex mutex;
  std::map<const std::byte*, Block> blocks;  // by start address
  std::atomic<bool> may_reclaim = false;     // blocks were freed while they were lent

 private:
  std::pair<Pool*, size_t> take(size_t bytes) {
    const std::lock_guard lock(mutex);
    for (Pool& pool : pools) {
      if (const auto start = pool.take(bytes)) return {&pool, *start};
    }
    if (pools.size() == kMaxSegments)
      throw SystemError(format("this rank has {} segments of symmetric memory, the maximum, and no "
                               "room for {} bytes in them",
                               kMaxSegments, bytes),
                        ENFILE);
    Pool& pool = pools.emplace_back(make_segment(round_up(bytes, page_size())), pools.size());
    table_in(table).segments[pool.index()] = pool.segment().handle();
    return {&pool, *pool.take(bytes)};
  }

  Segment make_segment(size_t bytes) const {
    size_t reserved = 0;
    for (const Pool& pool : pools) reserved += pool.segment().size();
    const size_t wanted = std::min(std::max(reserved, kSmallestSegment), largest_file());
    try {
      if (wanted > bytes) return Segment::reserve(wanted, kName);
    } catch (const SystemError&) {  // addresses may be limited: then no more than is asked for
    }
    try {
      return Segment::reserve(bytes, kName);
    } catch (const SystemError& error) {
      throw SystemError(format("cannot allocate {} bytes of shared memory", bytes),
                        error.error_number());
    }
  }

  const std::byte* enter(Pool& pool, size_t start, size_t bytes) {
    const std::lock_guard lock(mutex);
    if (free_entries.empty()) {
      if (num_entries == kMaxBlocks)
        throw SystemError(
            format("this rank already has {} blocks of symmetric memory, the maximum", kMaxBlocks),
            ENFILE);
      table.commit(offsetof(Table, blocks) + num_entries * sizeof(Entry), sizeof(Entry));
      free_entries.push_back(num_entries++);
    }
    const uint32_t index = free_entries.back();
    const std::byte* data = pool.segment().data() + start;
    blocks.emplace(data, Block{index, &pool, start, bytes});
    free_entries.pop_back();
    Entry& entry = table_in(table).blocks[index];
    entry.segment = pool.index();
    entry.start = start;
    entry.lent.store(0, std::memory_order_relaxed);
    entry.id.store(next_id++, std::memory_order_release);
    return data;
  }

  static constexpr const char* kName = "lockstep-symmetric";
  std::deque<Pool> pools;    // which stay where they are
  std::vector<Block> freed;  // and not reclaimed
  std::vector<uint32_t> free_entries;
  uint32_t num_entries = 0;
  uint64_t next_id = 1;
};

SharedHeap::SharedHeap() : books_(std::make_shared<Books>()) {}

const SegmentHandle& SharedHeap::table() const { return books_->table.handle(); }

std::shared_ptr<std::byte> SharedHeap::allocate(size_t bytes) {
  auto* const data =
      const_cast<std::byte*>(books_->allocate(round_up(std::max<size_t>(bytes, 1), kAlignment)));
  return {data, [books = books_](std::byte* block) { books->free(block); }};
}

Location SharedHeap::find(const void* data, size_t bytes) const {
  if (books_->may_reclaim) books_->reclaim();
  const std::lock_guard lock(books_->mutex);
  const auto found = books_->block_with(data);
  if (found == books_->blocks.end()) return {};
  const auto& [start, block] = *found;
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - start);
  if (bytes > block.bytes - offset) return {};
  return {Location::block, block.entry,
          table_in(books_->table).blocks[block.entry].id.load(std::memory_order_relaxed), offset};
}

void SharedHeap::lend(const void* data, int peers) {
  const std::lock_guard lock(books_->mutex);
  if (const auto found = books_->block_with(data); found != books_->blocks.end())
    table_in(books_->table).blocks[found->second.entry].lent += peers;
}

std::byte* PeerHeaps::resolve(const SegmentHandle& table, const Location& location) {
  if (location.kind == Location::address) return reinterpret_cast<std::byte*>(location.offset);
  const std::lock_guard lock(mutex_);
  PeerTable& peer = peers_[{table.pid, table.inode}];
  if (peer.table.data() == nullptr) peer.table = Segment::open(table);
  const Table& theirs = table_in(peer.table);
  const Entry& entry = theirs.blocks[location.entry];
  check(entry.id.load(std::memory_order_acquire) == location.id,
        "an operation names freed symmetric memory");
  auto found = peer.mapped.find(entry.segment);
  if (found == peer.mapped.end())
    found = peer.mapped.emplace(entry.segment, Segment::open(theirs.segments[entry.segment])).first;
  return found->second.data() + entry.start + location.offset;
}

void PeerHeaps::give_back(const SegmentHandle& table, const Location& location) {
  const std::lock_guard lock(mutex_);
  --table_in(peers_.at({table.pid, table.inode}).table).blocks[location.entry].lent;
}

}  // namespace lockstep::fabric
