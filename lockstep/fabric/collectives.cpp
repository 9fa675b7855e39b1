// SPDX-License-Identifier: Apache-2.0
// Every collective runs the same way. A rank enters (posts what it does) and waits until all have.
// If all inputs were small they came with the posting, and each rank takes what it needs from the
// eager buffers: one phase. Otherwise, if the memory that has to be shared is reachable, ranks read
// from and write to each other directly, and leave together: two phases. So they do in an
// all_to_all if the kernel copies large blocks for them out of memory that is not shared. Otherwise
// data goes through staging in pieces small enough to stay in cache, one phase a piece, each phase
// overlapping what the next needs.
//
// A reduction is cut into slices, one for each rank; the owner of a slice reduces it over all ranks
// in the fixed order of fabric::reduce, so every rank sees the same bits.
#include "lockstep/fabric/collectives.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/copy.h"
#include "lockstep/fabric/reduce.h"

namespace lockstep::fabric {
namespace {

constexpr size_t kHalfStaging = 2 * kStagingBytes;  // movements use the four staging pieces as two

// From this size of a block on, in an all_to_all, one copy by the kernel is faster than two through
// staging, where a block has a part of the room only. Other operations gain nothing.
#ifdef __x86_64__
constexpr size_t kKernelCopyBytes = 256 << 10;
#else
constexpr size_t kKernelCopyBytes = SIZE_MAX;  // measured on arm64: staging is twice as fast
#endif

// The parts in which a crew shares large reductions, in bytes, and copies, which copy_result()
// streams from this size on.
constexpr size_t kReducePart = 256 << 10;
constexpr size_t kCopyPart = size_t{1} << 20;

// Staging work: call step(0), step(1) ... step(count - 1), all ranks together.
struct Stages {
  int64_t count = 0;
  std::function<void(int64_t)> step;
};

// Who sends which bytes to whom, for the collectives that only move data.
class Movement {
 public:
  Movement(const Seat& seat, const Operation& operation, Crew& crew)
      : seat_(seat),
        op_(operation),
        crew_(crew),
        size_(seat.size()),
        me_(seat.rank()),
        block_(static_cast<size_t>(operation.count) * size_of(operation.dtype)) {}

  bool sends(int rank) const { return !rooted_at_source() || rank == op_.root; }
  bool receives(int rank) const { return op_.kind != OpKind::gather || rank == op_.root; }

  // Reads everything meant for this rank; source(r) is where rank r's input begins.
  template <class Source>
  void pull(Source source) const {
    std::vector<const std::byte*> sources(static_cast<size_t>(size_));
    for (int from = 0; from < size_; ++from)
      if (bytes(from, me_) > 0) sources[static_cast<size_t>(from)] = source(from);
    copy_blocks([&](int from, std::byte* to, size_t begin, size_t size) {
      copy_result(to, sources[static_cast<size_t>(from)] + begin, size);
      return true;
    });
  }
  // The same through the kernel. Returns a rank whose memory it did not read, or -1.
  int pull_through_kernel() const {
    return copy_blocks([&](int from, std::byte* to, size_t begin, size_t size) {
      if (from != me_) return seat_.read(from, seat_.posting(from).input, begin, to, size);
      copy_result(to, op_.input.data() + begin, size);
      return true;
    });
  }
  template <class Target>
  void push(Target output_of) const {
    for (int step = 0; step < size_; ++step) {
      const int to = (me_ + step) % size_;
      if (bytes(me_, to) > 0)
        copy_result(output_of(to) + target(me_, to), op_.input.data() + origin(me_, to),
                    bytes(me_, to));
    }
  }

  size_t longest_block() const {
    size_t longest = 0;
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) longest = std::max(longest, bytes(from, to));
    }
    return longest;
  }

  Stages stages() const {
    const size_t room = multicast()
                            ? kHalfStaging
                            : kHalfStaging / static_cast<size_t>(size_) / kCacheLine * kCacheLine;
    const auto pieces = static_cast<int64_t>((longest_block() + room - 1) / room);
    return {pieces + 1, [this, room, pieces](int64_t i) {
              if (i == 0)
                copy_result(op_.output.data() + target(me_, me_),
                            op_.input.data() + origin(me_, me_), bytes(me_, me_));
              if (i < pieces) fill(i, room);
              if (i > 0) drain(i - 1, room);
            }};
  }

 private:
  bool rooted_at_source() const {
    return op_.kind == OpKind::broadcast || op_.kind == OpKind::scatter;
  }
  bool multicast() const {
    return op_.kind == OpKind::broadcast || op_.kind == OpKind::all_gather ||
           op_.kind == OpKind::gather;
  }
  // copy(from, to, begin, size) of each block for this rank until one returns false; that rank or
  // -1. Large blocks are copied in parts.
  template <class Copy>
  int copy_blocks(Copy copy) const {
    struct Part {
      int from;
      size_t begin, size;
    };
    std::vector<Part> parts;
    const auto copy_part = [&](const Part& part) {
      return copy(part.from, op_.output.data() + target(part.from, me_) + part.begin,
                  origin(part.from, me_) + part.begin, part.size);
    };
    for (int step = 0; step < size_; ++step) {
      const int from = (me_ + step) % size_;  // each rank starts elsewhere, with itself
      const size_t total = bytes(from, me_);
      if (total < kCopyPart) {
        if (total > 0 && !copy_part({from, 0, total})) return from;
        continue;
      }
      for (size_t begin = 0; begin < total;) {
        const size_t size = total - begin < 2 * kCopyPart ? total - begin : kCopyPart;
        parts.push_back({from, begin, size});
        begin += size;
      }
    }
    if (parts.empty()) return -1;
    std::atomic<int> refused = -1;
    crew_.run(static_cast<int64_t>(parts.size()), [&](int64_t i) {
      const Part& part = parts[static_cast<size_t>(i)];
      if (refused.load(std::memory_order_relaxed) < 0 && !copy_part(part)) refused = part.from;
    });
    return refused;
  }
  size_t elements(int64_t count) const { return static_cast<size_t>(count) * size_of(op_.dtype); }
  const int64_t* send_counts(int rank) const {
    return seat_.board().counts(rank, seat_.sequence());
  }
  const int64_t* recv_counts(int rank) const { return send_counts(rank) + size_; }

  size_t bytes(int from, int to) const {
    if (!sends(from) || !receives(to)) return 0;
    if (op_.kind == OpKind::broadcast && from == to) return 0;
    if (op_.kind == OpKind::all_gather) return elements(op_.recv_counts[static_cast<size_t>(from)]);
    if (op_.kind == OpKind::all_to_all) return elements(send_counts(from)[to]);
    return block_;
  }
  size_t origin(int from, int to) const {  // in the sender's input
    if (op_.kind == OpKind::scatter) return static_cast<size_t>(to) * block_;
    if (op_.kind == OpKind::all_to_all)
      return elements(std::accumulate(send_counts(from), send_counts(from) + to, int64_t{0}));
    return 0;
  }
  size_t target(int from, int to) const {  // in the receiver's output
    if (op_.kind == OpKind::gather) return static_cast<size_t>(from) * block_;
    if (op_.kind == OpKind::all_gather)
      return elements(
          std::accumulate(op_.recv_counts.begin(), op_.recv_counts.begin() + from, int64_t{0}));
    if (op_.kind == OpKind::all_to_all)
      return elements(std::accumulate(recv_counts(to), recv_counts(to) + from, int64_t{0}));
    return 0;
  }

  // Piece i of a block, for staging.
  static size_t piece_bytes(size_t total, int64_t i, size_t room) {
    const size_t begin = static_cast<size_t>(i) * room;
    return begin < total ? std::min(room, total - begin) : 0;
  }
  std::byte* half(int rank, int64_t i) const {
    return seat_.board().staging(rank, static_cast<int>(i % 2) * 2);
  }

  void fill(int64_t i, size_t room) const {
    for (int to = 0; to < size_; ++to) {
      if (to == me_) continue;
      const size_t size = piece_bytes(bytes(me_, to), i, room);
      std::byte* place = half(me_, i) + (multicast() ? 0 : static_cast<size_t>(to) * room);
      copy_bytes(place, op_.input.data() + origin(me_, to) + static_cast<size_t>(i) * room, size);
      if (multicast() && size > 0) return;  // the same for all
    }
  }
  void drain(int64_t i, size_t room) const {
    for (int step = 1; step < size_; ++step) {
      const int from = (me_ + step) % size_;
      const std::byte* place = half(from, i) + (multicast() ? 0 : static_cast<size_t>(me_) * room);
      copy_bytes(op_.output.data() + target(from, me_) + static_cast<size_t>(i) * room, place,
                 piece_bytes(bytes(from, me_), i, room));
    }
  }

  const Seat& seat_;
  const Operation& op_;
  Crew& crew_;
  int size_, me_;
  size_t block_;
};

// all_reduce, reduce and reduce_scatter.
class Reduction {
 public:
  Reduction(const Seat& seat, const Operation& operation, Crew& crew)
      : seat_(seat),
        op_(operation),
        crew_(crew),
        size_(seat.size()),
        me_(seat.rank()),
        width_(size_of(operation.dtype)) {}

  bool keeps_result() const { return op_.kind != OpKind::reduce || me_ == op_.root; }

  // This rank's result from complete inputs of everybody, computed by itself.
  template <class Source>
  void take(Source source) const {
    if (!keeps_result()) return;
    if (op_.kind == OpKind::reduce_scatter) {
      reduce_range(block_start(me_), count(me_), source,
                   {op_.output.data() - block_start(me_) * width_});
    } else {
      reduce_range(0, static_cast<size_t>(op_.count), source, {op_.output.data()});
    }
  }
  // This rank's slice of everybody's result, straight into their outputs. Not for reduce_scatter.
  template <class Source, class Target>
  void share(Source source, Target output_of) const {
    std::vector<std::byte*> outputs;
    for (int rank = 0; rank < size_; ++rank) {
      if (op_.kind == OpKind::all_reduce || rank == op_.root) outputs.push_back(output_of(rank));
    }
    const auto [begin, end] = slice(me_, static_cast<size_t>(op_.count));
    reduce_range(begin, end - begin, source, outputs);
  }

  Stages stages() const {
    return op_.kind == OpKind::reduce_scatter ? scatter_stages() : vector_stages();
  }

 private:
  size_t count(int rank) const {
    return static_cast<size_t>(op_.send_counts[static_cast<size_t>(rank)]);
  }
  size_t block_start(int rank) const {
    return static_cast<size_t>(
        std::accumulate(op_.send_counts.begin(), op_.send_counts.begin() + rank, int64_t{0}));
  }
  // Elements [begin, end) of `total` that `rank` reduces; whole cache lines, so that no two ranks
  // write one.
  std::pair<size_t, size_t> slice(int rank, size_t total) const {
    const size_t line = kCacheLine / width_;
    const size_t share = (total + static_cast<size_t>(size_) * line - 1) /
                         (static_cast<size_t>(size_) * line) * line;
    const size_t begin = std::min(total, static_cast<size_t>(rank) * share);
    return {begin, std::min(total, begin + share)};
  }

  // Elements [first, first + count) of source(0), source(1) ... into the same elements of all
  // outputs.
  template <class Source>
  void reduce_range(size_t first, size_t count, Source source,
                    std::vector<std::byte*> outputs) const {
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < size_; ++rank) inputs.push_back(source(rank) + first * width_);
    for (auto& output : outputs) output += first * width_;
    const size_t most = kReducePart / width_;
    if (count <= most) return fabric::reduce(op_.dtype, op_.reduce, outputs, inputs, count);
    check_reducible(op_.dtype, op_.reduce);
    crew_.run(static_cast<int64_t>((count + most - 1) / most), [&](int64_t i) {
      const size_t begin = static_cast<size_t>(i) * most;
      const auto at_part = [&](auto pointers) {
        for (auto& pointer : pointers) pointer += begin * width_;
        return pointers;
      };
      fabric::reduce(op_.dtype, op_.reduce, at_part(outputs), at_part(inputs),
                     std::min(most, count - begin));
    });
  }

  // Piece i of the vector: everybody stages the slices of others, the owner of a slice reduces it
  // and puts the result up, everybody takes the results: three steps, all running in each phase on
  // successive pieces.
  Stages vector_stages() const {
    const size_t room = kStagingBytes / width_, total = static_cast<size_t>(op_.count);
    const auto pieces = static_cast<int64_t>((total + room - 1) / room);
    return {pieces + 2, [this, room, total, pieces](int64_t i) {
              if (i < pieces) fill(i, std::min(room, total - static_cast<size_t>(i) * room), room);
              if (i > 0 && i <= pieces)
                combine(i - 1, std::min(room, total - static_cast<size_t>(i - 1) * room), room);
              if (i > 1)
                drain(i - 2, std::min(room, total - static_cast<size_t>(i - 2) * room), room);
            }};
  }
  std::byte* raw(int rank, int64_t i) const {
    return seat_.board().staging(rank, static_cast<int>(i % 2));
  }
  std::byte* result(int rank, int64_t i) const {
    return seat_.board().staging(rank, 2 + static_cast<int>(i % 2));
  }

  void fill(int64_t i, size_t count, size_t room) const {
    const std::byte* mine = op_.input.data() + static_cast<size_t>(i) * room * width_;
    const auto [begin, end] = slice(me_, count);  // the owner reads its own slice where it is
    copy_bytes(raw(me_, i), mine, begin * width_);
    copy_bytes(raw(me_, i) + end * width_, mine + end * width_, (count - end) * width_);
  }
  void combine(int64_t i, size_t count, size_t room) const {
    const auto [begin, end] = slice(me_, count);
    const size_t offset = static_cast<size_t>(i) * room * width_;
    std::vector<std::byte*> outputs{result(me_, i)};
    if (keeps_result()) outputs.push_back(op_.output.data() + offset);
    reduce_range(
        begin, end - begin,
        [&](int rank) -> const std::byte* {
          return rank == me_ ? op_.input.data() + offset : raw(rank, i);
        },
        outputs);
  }
  void drain(int64_t i, size_t count, size_t room) const {
    if (!keeps_result()) return;
    for (int step = 1; step < size_; ++step) {
      const int owner = (me_ + step) % size_;
      const auto [begin, end] = slice(owner, count);
      copy_bytes(op_.output.data() + (static_cast<size_t>(i) * room + begin) * width_,
                 result(owner, i) + begin * width_, (end - begin) * width_);
    }
  }

  // Everybody stages a part of each block, the block's owner reduces it.
  Stages scatter_stages() const {
    const size_t room =
        kHalfStaging / static_cast<size_t>(size_) / kCacheLine * kCacheLine / width_;
    size_t longest = 0;
    for (int rank = 0; rank < size_; ++rank) longest = std::max(longest, count(rank));
    const auto pieces = static_cast<int64_t>((longest + room - 1) / room);
    return {
        pieces + 1, [this, room, pieces](int64_t i) {
          const auto half = [this](int rank, int64_t piece) {
            return seat_.board().staging(rank, static_cast<int>(piece % 2) * 2);
          };
          const auto part = [&](int rank, int64_t piece) {
            const size_t begin = static_cast<size_t>(piece) * room;
            return begin < count(rank) ? std::min(room, count(rank) - begin) : 0;
          };
          for (int to = 0; i < pieces && to < size_; ++to) {
            if (to == me_) continue;
            const size_t first = block_start(to) + static_cast<size_t>(i) * room;
            copy_bytes(half(me_, i) + static_cast<size_t>(to) * room * width_,
                       op_.input.data() + first * width_, part(to, i) * width_);
          }
          if (i == 0 || part(me_, i - 1) == 0) return;
          const size_t first = static_cast<size_t>(i - 1) * room;
          std::vector<const std::byte*> inputs;
          for (int from = 0; from < size_; ++from) {
            inputs.push_back(from == me_
                                 ? op_.input.data() + (block_start(me_) + first) * width_
                                 : half(from, i - 1) + static_cast<size_t>(me_) * room * width_);
          }
          std::byte* output = op_.output.data() + first * width_;
          fabric::reduce(op_.dtype, op_.reduce, std::span(&output, 1), inputs, part(me_, i - 1));
        }};
  }

  const Seat& seat_;
  const Operation& op_;
  Crew& crew_;
  int size_, me_;
  size_t width_;
};

bool is_reduction(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
}

template <class Predicate>
bool all_ranks(const Seat& seat, Predicate predicate) {
  for (int rank = 0; rank < seat.size(); ++rank) {
    if (!predicate(rank)) return false;
  }
  return true;
}

bool reachable(const Location& location) { return location.kind != Location::unreachable; }

}  // namespace

Task run_collective(Seat& seat, const Operation& operation, Crew& crew) {
  seat.enter(operation);
  co_await seat.everyone();
  seat.compare();
  if (operation.kind == OpKind::barrier || operation.announced) co_return;

  const bool reduces = is_reduction(operation.kind);
  const Movement movement(seat, operation, crew);
  const Reduction reduction(seat, operation, crew);
  const auto eager_input = [&seat](int rank) -> const std::byte* {
    return seat.board().eager(rank, seat.sequence());
  };
  const auto input_of = [&seat](int rank) -> const std::byte* {
    return seat.reach(rank, seat.posting(rank).input);
  };
  const auto output_of = [&seat](int rank) { return seat.reach(rank, seat.posting(rank).output); };

  if (all_ranks(seat, [&](int rank) { return seat.posting(rank).eager; })) {
    reduces ? reduction.take(eager_input) : movement.pull(eager_input);
    co_return;
  }

  const bool inputs = all_ranks(seat, [&](int rank) {
    return reachable(seat.posting(rank).input) || (!reduces && !movement.sends(rank));
  });
  const bool outputs = all_ranks(seat, [&](int rank) {
    return reachable(seat.posting(rank).output) || (!reduces && !movement.receives(rank));
  });
  if (reduces ? inputs : inputs || outputs) {
    if (operation.kind == OpKind::reduce_scatter) {
      reduction.take(input_of);
    } else if (reduces) {
      reduction.share(input_of, output_of);
    } else {
      inputs ? movement.pull(input_of) : movement.push(output_of);
    }
    seat.post();
    co_await seat.everyone();
    co_return;
  }

  if (operation.kind == OpKind::all_to_all && movement.longest_block() >= kKernelCopyBytes) {
    if (all_ranks(seat, [&](int rank) { return seat.posting(rank).reads_peers; })) {
      if (const int refused = movement.pull_through_kernel(); refused >= 0) {
        // If the process has died, this wait ends with who it was.
        co_await seat.next_phase_of(refused);
        throw CommError(format("group '{}': {} #{}: the kernel does not read rank {}'s input",
                               seat.group_name(), name_of(operation.kind), seat.sequence(),
                               refused));
      }
      seat.post();
      co_await seat.everyone();
      co_return;
    }
    seat.look_at_peers();
  }

  const Stages stages = reduces ? reduction.stages() : movement.stages();
  for (int64_t i = 0; i < stages.count; ++i) {
    co_await seat.everyone();
    stages.step(i);
    seat.post();
  }
}

}  // namespace lockstep::fabric
