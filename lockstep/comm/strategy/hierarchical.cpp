// SPDX-License-Identifier: Apache-2.0
// Every host has at least `places` ranks, and the first so many of each host are its carriers:
// those at one place exchange one share of the data with each other, so that all of a host's ranks
// put the network to use and every byte crosses it as often as one rank per host would need. Where
// hosts differ in size, the ranks beyond hand theirs to a carrier.
//
// all_reduce: a sum inside gives each carrier its share; carriers sum across; all gather inside.
// reduce_scatter and all_gather are in rank order for the caller, and in the order (carrier, host,
// place) here: that of what a carrier exchanges, end to end.
#include "lockstep/comm/strategy/hierarchical.h"

#include <algorithm>
#include <cstring>

#include "lockstep/layout/shard_math.h"

namespace lockstep::comm::strategy {
namespace {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;
using Counts = std::vector<int64_t>;

// Of an all_reduce.
constexpr size_t kMostPieces = 16;
constexpr size_t kSmallestPiece = 4 << 20;

class Hierarchical final : public Algorithm {
 public:
  Hierarchical(HostLayout layout, int rank, AlgorithmGroup inside, AlgorithmGroup across)
      : layout_(std::move(layout)),
        inside_(std::move(inside)),
        across_(std::move(across)),
        host_(layout_.host[static_cast<size_t>(rank)]),
        place_(layout_.place[static_cast<size_t>(rank)]),
        me_(rank) {
    for (int carrier = 0; carrier < layout_.places; ++carrier) {
      for (int host = 0; host < num_hosts(); ++host) {
        for (const int member : served(carrier, host)) order_.push_back(member);
      }
    }
  }

  layout::CommStrategy strategy() const override { return layout::CommStrategy::hierarchical; }
  bool covers(OpKind kind) const override {
    return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter ||
           kind == OpKind::all_gather || kind == OpKind::broadcast;
  }
  std::vector<GroupImpl*> groups() const override { return {inside_.group(), across_.group()}; }

  void run(CollectiveJob& job) override {
    if (job.operation.count == 0) return;
    switch (job.operation.kind) {
      case OpKind::all_reduce:
        return all_reduce(job);
      case OpKind::reduce_scatter:
        return reduce_scatter(job);
      case OpKind::all_gather:
        return all_gather(job);
      default:
        return broadcast(job);
    }
  }

 private:
  int num_hosts() const { return static_cast<int>(layout_.hosts.size()); }
  bool carries() const { return place_ < layout_.places; }
  // This host has ranks that are no carriers.
  bool has_others() const { return inside_.size() > layout_.places; }
  // The ranks of a host whose blocks a carrier exchanges.
  std::vector<int> served(int carrier, int host) const {
    const auto& ranks = layout_.hosts[static_cast<size_t>(host)];
    std::vector<int> members;
    for (auto place = static_cast<size_t>(carrier); place < ranks.size();
         place += static_cast<size_t>(layout_.places))
      members.push_back(ranks[place]);
    return members;
  }
  static int64_t sum_of(const Counts& counts, const std::vector<int>& members) {
    int64_t sum = 0;
    for (const int member : members) sum += counts[static_cast<size_t>(member)];
    return sum;
  }

  // What each rank of this host has of the whole in (carrier, host, place) order.
  Counts by_carrier(const Counts& counts) const {
    Counts shares(static_cast<size_t>(inside_.size()), 0);
    for (int carrier = 0; carrier < layout_.places; ++carrier) {
      for (int host = 0; host < num_hosts(); ++host)
        shares[static_cast<size_t>(carrier)] += sum_of(counts, served(carrier, host));
    }
    return shares;
  }
  // What this carrier exchanges with each host.
  Counts by_host(const Counts& counts) const {
    Counts shares;
    for (int host = 0; host < num_hosts(); ++host)
      shares.push_back(sum_of(counts, served(place_, host)));
    return shares;
  }
  // Between the ranks of this host and their carriers: what this rank gives or takes if it has a
  // block of its own, and what it passes on if it is a carrier.
  Counts own_block(const Counts& counts) const {
    Counts blocks(static_cast<size_t>(inside_.size()), 0);
    blocks[static_cast<size_t>(place_ % layout_.places)] = counts[static_cast<size_t>(me_)];
    return blocks;
  }
  Counts served_blocks(const Counts& counts) const {
    Counts blocks(static_cast<size_t>(inside_.size()), 0);
    if (!carries()) return blocks;
    for (const int member : served(place_, host_))
      blocks[static_cast<size_t>(layout_.place[static_cast<size_t>(member)])] =
          counts[static_cast<size_t>(member)];
    return blocks;
  }

  // Copies blocks between rank order and (carrier, host, place) order.
  template <class Copy>
  void reorder(const Counts& counts, size_t width, Copy copy) const {
    std::vector<size_t> starts{0};
    for (const int64_t count : counts)
      starts.push_back(starts.back() + static_cast<size_t>(count) * width);
    size_t at = 0;
    for (const int member : order_) {
      const auto block = static_cast<size_t>(member);
      const size_t bytes = starts[block + 1] - starts[block];
      if (bytes > 0) copy(starts[block], at, bytes);
      at += bytes;
    }
  }
  static Bytes part(Bytes whole, const Counts& counts, int index, size_t width) {
    size_t begin = 0;
    for (int i = 0; i < index; ++i) begin += static_cast<size_t>(counts[static_cast<size_t>(i)]);
    return whole.subspan(begin * width,
                         static_cast<size_t>(counts[static_cast<size_t>(index)]) * width);
  }

  // All ranks begin the steps in the same order, with two pieces on the network: one is sent while
  // the other is added up.
  void all_reduce(const CollectiveJob& job) const {
    const Bytes whole = job.operation.output;
    const Pieces pieces(whole.size(), job.width(), kMostPieces, kSmallestPiece);
    struct PieceInFlight {
      Bytes whole, mine;
      Counts shares;
      std::shared_ptr<Pending> step;
    };
    std::vector<PieceInFlight> all(pieces.count(whole.size()));
    const auto sum_inside = [&](PieceInFlight& piece, size_t i) {
      piece.whole = pieces.of(whole, i);
      piece.shares.resize(static_cast<size_t>(inside_.size()));
      const auto count = static_cast<int64_t>(piece.whole.size() / job.width());
      for (int carrier = 0; carrier < layout_.places; ++carrier)
        piece.shares[static_cast<size_t>(carrier)] =
            layout::balanced_range(count, layout_.places, carrier).size();
      piece.mine = part(piece.whole, piece.shares, place_, job.width());
      piece.step = inside_.reduce_scatter(job, piece.mine, piece.whole, piece.shares);
    };
    const auto sum_across = [&](PieceInFlight& piece) {
      piece.step->wait();
      piece.step = across_.all_reduce(job, piece.mine);
    };
    const auto gather_inside = [&](PieceInFlight& piece) {
      piece.step->wait();
      piece.step = inside_.all_gather(job, piece.whole, piece.mine, piece.shares);
    };
    for (size_t i = 0; i < all.size() + 2; ++i) {
      if (i < all.size()) sum_inside(all[i], i);
      if (i >= 1 && i <= all.size()) sum_across(all[i - 1]);
      if (i >= 2) gather_inside(all[i - 2]);
    }
    for (const PieceInFlight& piece : all) piece.step->wait();
  }

  void reduce_scatter(CollectiveJob& job) const {
    const Operation& operation = job.operation;
    const Counts& counts = operation.send_counts;
    const size_t width = job.width();
    const Bytes packed = add_scratch(job, operation.input.size());
    reorder(counts, width, [&](size_t from, size_t to, size_t bytes) {
      std::memcpy(packed.data() + to, operation.input.data() + from, bytes);
    });
    const Counts shares = by_carrier(counts);
    const Bytes mine = part(packed, shares, place_, width);
    inside_.reduce_scatter(job, mine, packed, shares)->wait();
    if (!has_others())
      return across_.reduce_scatter(job, operation.output, mine, by_host(counts))->wait();
    Bytes blocks;  // of the ranks that this one carries for
    if (carries()) {
      const Counts hosts = by_host(counts);
      // Not in `mine`: MPI wants input and output apart.
      blocks = add_scratch(job, part(mine, hosts, host_, width).size());
      across_.reduce_scatter(job, blocks, mine, hosts)->wait();
    }
    inside_.all_to_all(job, operation.output, blocks, served_blocks(counts), own_block(counts))
        ->wait();
  }

  void all_gather(CollectiveJob& job) const {
    const Operation& operation = job.operation;
    const Counts& counts = operation.recv_counts;
    const size_t width = job.width();
    const Bytes packed = add_scratch(job, operation.output.size());
    const Counts shares = by_carrier(counts);
    const Bytes mine = part(packed, shares, place_, width);
    if (!has_others()) {
      across_.all_gather(job, mine, operation.input, by_host(counts))->wait();
    } else {
      const Counts hosts = by_host(counts);
      const Bytes blocks = carries() ? part(mine, hosts, host_, width) : Bytes();
      inside_.all_to_all(job, blocks, operation.input, own_block(counts), served_blocks(counts))
          ->wait();
      if (carries()) across_.all_gather(job, mine, blocks, hosts)->wait();
    }
    inside_.all_gather(job, packed, mine, shares)->wait();
    reorder(counts, width, [&](size_t to, size_t from, size_t bytes) {
      std::memcpy(operation.output.data() + to, packed.data() + from, bytes);
    });
  }

  // Over the carriers at the first place: the network is no faster for more of them.
  void broadcast(const CollectiveJob& job) const {
    const Bytes whole = job.operation.output;
    const auto root = static_cast<size_t>(job.operation.root);
    const bool here = layout_.host[root] == host_;
    if (here) inside_.broadcast(job, whole, layout_.place[root])->wait();
    if (place_ == 0) across_.broadcast(job, whole, layout_.host[root])->wait();
    if (!here) inside_.broadcast(job, whole, 0)->wait();
  }

  HostLayout layout_;
  AlgorithmGroup inside_, across_;
  int host_, place_, me_;
  std::vector<int> order_;  // ranks by carrier, host, place
};

}  // namespace

std::unique_ptr<Algorithm> make_hierarchical(HostLayout layout, int rank, AlgorithmGroup inside,
                                             AlgorithmGroup across) {
  return std::make_unique<Hierarchical>(std::move(layout), rank, std::move(inside),
                                        std::move(across));
}

}  // namespace lockstep::comm::strategy
