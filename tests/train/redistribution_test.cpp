// SPDX-License-Identifier: Apache-2.0
// Copies in memory that ranks of another layout, number or node continue from.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/error.h"
#include "lockstep/launch/recovery_memory.h"
#include "lockstep/train/recovery/copied_slices.h"
#include "lockstep/train/recovery/memory_copies.h"

namespace lockstep::test {
namespace {

using layout::Box;
using train::CopiedSlice;
using train::CopyId;
using train::CopyIndex;
using train::FoundCopies;
using train::MemoryCopies;

CopiedSlice slice_of(const std::string& name, const layout::Shape& shape, const Box& box,
                     int rank = -1) {
  return {.name = name, .shape = shape, .box = box, .rank = rank};
}

TEST(CopiedSlices, AreTheSameAfterTheirText) {
  std::vector<CopiedSlice> slices{slice_of("a", {4, 6}, {{{0, 2}, {3, 6}}}),
                                  slice_of("b \"c\"", {}, Box::whole({}), 3)};
  slices[1].dtype = DType::int64;
  slices[1].offset = uint64_t{1} << 40;
  EXPECT_EQ(train::slices_from(to_text(slices)), slices);
}

TEST(CopiedSlices, AreSharedByTheRanksThatHoldThem) {
  const CopiedSlice both = slice_of("both", {100}, Box::whole({100}));
  const CopiedSlice large = slice_of("large", {300}, {{{0, 150}}});
  const std::vector<std::vector<CopiedSlice>> held{{both, large}, {both}};
  const auto shares = train::share_copies(held, std::vector<int>{0, 0});
  ASSERT_EQ(shares[0].own.size(), 1U);
  ASSERT_EQ(shares[1].own.size(), 1U);
  EXPECT_EQ(shares[0].own[0].name, "large");
  EXPECT_EQ(shares[1].own[0].name, "both");
  EXPECT_EQ(train::copy_bytes(shares[1].own), 448U);
  EXPECT_EQ(shares[0].to, -1);
}

// The next node gets what no other node has.
TEST(CopiedSlices, AreSentToTheNextNode) {
  const CopiedSlice all = slice_of("all", {9}, Box::whole({9}));
  const auto part = [](int64_t i) { return slice_of("parts", {40}, {{{i, i + 1}}}); };
  const std::vector<std::vector<CopiedSlice>> held{{all, part(0)}, {all, part(1)}, {all, part(2)}};
  const auto shares = train::share_copies(held, std::vector<int>{0, 0, 2});
  const auto sent = [&](size_t rank) {
    return shares[rank].sent.size() == 1 && shares[rank].sent[0].name == "parts" &&
           shares[rank].sent[0].offset == 0;
  };
  EXPECT_TRUE(sent(0) && sent(1) && sent(2));
  EXPECT_EQ(shares[0].to, 2);
  EXPECT_EQ(shares[1].to, 2);
  EXPECT_EQ(shares[2].to, 0);
}

// Of replicas the one on this node; of values that ranks have of their own, this rank's, or the
// first's.
TEST(CopyIndex, PrefersThisNodeAndThisRank) {
  const CopyId copy{0, 5};
  const Box whole = Box::whole({8});
  const auto found = [&](int node, std::vector<CopiedSlice> slices) {
    return FoundCopies{.place = {.node = node}, .copies = {copy}, .slices = std::move(slices)};
  };
  const std::vector<FoundCopies> all{
      found(0, {slice_of("w", {8}, whole), slice_of("own", {8}, whole, 1)}),
      found(2, {slice_of("w", {8}, {{{0, 3}}}), slice_of("own", {8}, whole, 2)})};
  const CopyIndex index(all, 2);
  const auto sources = index.sources_of(slice_of("w", {8}, {{{2, 6}}}), copy).value();
  ASSERT_EQ(sources.size(), 2U);
  EXPECT_EQ(sources[0].from->place.node, 2);
  EXPECT_EQ(sources[0].part, (Box{{{2, 3}}}));
  EXPECT_EQ(sources[1].part, (Box{{{3, 6}}}));
  const auto rank_of = [&](int rank) {
    return index.sources_of(slice_of("own", {8}, whole, rank), copy).value()[0].slice->rank;
  };
  EXPECT_EQ(rank_of(1), 1);
  EXPECT_EQ(rank_of(2), 2);
  EXPECT_EQ(rank_of(7), 1);
  EXPECT_FALSE(index.sources_of(slice_of("w", {9}, Box::whole({9})), copy));
  EXPECT_FALSE(index.sources_of(slice_of("w", {8}, whole), {1, 5}));
  EXPECT_FALSE(index.sources_of(slice_of("x", {8}, whole), copy));
}

enum class Cut { rows, columns, none };

// A job whose ranks are threads, on nodes with memory of their own.
class Redistribution : public testing::Test {
 protected:
  struct Start {
    int nodes = 1, ranks = 1;  // of each node
    Cut cut = Cut::rows;
    bool verifies = false;  // keeps one copy more
  };
  struct Rank {
    const comm::Group& world;
    MemoryCopies& copies;
    const MemoryCopies::Slices& slices;
    std::optional<int64_t> restored;  // the step
  };

  Redistribution() {
    for (int i = 0; i < 3; ++i) nodes_.push_back(launch::make_recovery_memory(4));
  }

  static checkpoint::NamedSlice cut_slice(const std::string& name, const layout::Shape& shape,
                                          Cut cut, c10::ScalarType dtype,
                                          const comm::Group& world) {
    auto placement = layout::Placement::whole(name, shape);
    const size_t dim = cut == Cut::columns ? shape.size() - 1 : 0;
    if (cut != Cut::none && !shape.empty())
      placement.slice.ranges[dim] = layout::ceiling_chunk(shape[dim], world.size(), world.rank());
    return {.placement = placement, .tensor = at::zeros(placement.local_shape(), dtype)};
  }
  static MemoryCopies::Slices slices_of(Cut cut, const comm::Group& world) {
    return {cut_slice("matrix", {13, 6}, cut, at::kFloat, world),
            cut_slice("vector", {9}, cut, at::kBFloat16, world),
            cut_slice("short", {2}, cut, at::kDouble, world),
            cut_slice("shared", {3, 2}, Cut::none, at::kFloat, world),
            cut_slice("count", {}, Cut::none, at::kLong, world)};
  }
  // What the slice has after a step: other values in each element.
  static at::Tensor values_of(const checkpoint::NamedSlice& slice, int64_t step) {
    const layout::Placement& placement = slice.placement;
    at::Tensor whole = at::arange(layout::numel_of(placement.global_shape), at::kLong)
                           .add(step * 3 % 101)
                           .view(placement.global_shape);
    for (size_t dim = 0; dim < placement.global_shape.size(); ++dim) {
      const auto [begin, end] = placement.slice.ranges[dim];
      whole = whole.narrow(static_cast<int64_t>(dim), begin, end - begin);
    }
    return whole.to(slice.tensor.scalar_type());
  }
  static void train_to(const Rank& rank, int64_t step) {
    for (const auto& slice : rank.slices) slice.tensor.copy_(values_of(slice, step));
    rank.copies.begin(step, {{"step", std::to_string(step)}});
    rank.copies.wait();
    comm::barrier(rank.world).wait();
  }

  // One start of the job. The ranks restore, check what they get, and do what `body` says.
  void start(const Start& start, std::optional<int64_t> expected,
             const std::function<void(const Rank&)>& body, const std::string& identity = "one") {
    const int64_t generation = generation_++;
    comm::run_threads(start.nodes * start.ranks, [&](const comm::Group& world) {
      const auto slices = slices_of(start.cut, world);
      MemoryCopies copies(
          world,
          {.descriptor = nodes_[static_cast<size_t>(world.rank() / start.ranks)].get(),
           .local_rank = world.rank() % start.ranks,
           .local_size = start.ranks,
           .generation = generation},
          identity, [&] { return slices; }, MemoryCopies::Options{.verifies = start.verifies});
      const auto restored = copies.restore();
      const Rank rank{world, copies, slices,
                      restored ? std::optional(restored->step) : std::nullopt};
      if (rank.restored != expected)
        throw Error("restored step " + std::to_string(rank.restored.value_or(-1)));
      if (restored) {
        if (restored->state.at("step") != std::to_string(restored->step)) throw Error("state");
        for (const auto& slice : slices) {
          if (!slice.tensor.equal(values_of(slice, restored->step)))
            throw Error(slice.placement.describe() + " has other values");
        }
      }
      body(rank);
    });
  }
  uint64_t held(size_t node = 0) const {
    struct stat status {};
    EXPECT_EQ(fstat(nodes_[node].get(), &status), 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }

  std::vector<Fd> nodes_;
  int64_t generation_ = 0;
};

TEST_F(Redistribution, AnyNumberOfRanksContinuesFromTheCopiesOfAnother) {
  const std::vector<Start> starts{{1, 4, Cut::rows},   {1, 3, Cut::rows},    {1, 2, Cut::columns},
                                  {1, 4, Cut::none},   {1, 4, Cut::columns}, {1, 1, Cut::rows},
                                  {1, 3, Cut::columns}};
  std::optional<int64_t> last;
  for (const Start& each : starts) {
    start(each, last, [&](const Rank& rank) {
      const int64_t begin = last.value_or(0);
      for (int64_t step = begin; step < begin + 4; ++step) train_to(rank, step);
    });
    last = last.value_or(0) + 3;
  }
}

// Of another layout nothing is lost until all ranks have copies of their own.
TEST_F(Redistribution, ACrashDuringTheRestartLosesNothing) {
  const auto nothing = [](const Rank&) {};
  start({1, 4, Cut::rows}, {}, [&](const Rank& rank) {
    for (int64_t step = 0; step < 3; ++step) train_to(rank, step);
  });
  start({1, 3, Cut::columns}, 2, nothing);
  start({1, 2, Cut::rows}, 2, [&](const Rank& rank) {
    if (rank.world.rank() == 1) return;
    rank.copies.begin(2, {{"step", "2"}});  // the other one dies before
    rank.copies.wait();
  });
  start({1, 3, Cut::rows}, 2, [&](const Rank& rank) { train_to(rank, 2); });
  start({1, 3, Cut::rows}, 2, nothing);
  start({1, 4, Cut::columns}, 2, [&](const Rank& rank) {
    train_to(rank, 2);
    train_to(rank, 3);
    for (const auto& slice : rank.slices) slice.tensor.copy_(values_of(slice, 4));
    if (rank.world.rank() > 1) return;  // the others die before they have copies of step 4
    rank.copies.begin(4, {{"step", "4"}});
    rank.copies.wait();
  });
  start({1, 2, Cut::columns}, 3, nothing);
}

// The same slices, but room for another number of copies.
TEST_F(Redistribution, ACrashLosesNothingWhereTheNumberOfCopiesChanges) {
  const auto nothing = [](const Rank&) {};
  start({1, 2, Cut::none}, {}, [&](const Rank& rank) {
    for (int64_t step = 0; step < 3; ++step) train_to(rank, step);
  });
  start({1, 2, Cut::none, true}, 2, nothing);
  start({1, 2, Cut::none, true}, 2, [&](const Rank& rank) { train_to(rank, 3); });
  start({1, 2, Cut::none}, 3, nothing);
  start({1, 2, Cut::none}, 3, nothing);
}

// Counters of steps are the same on all ranks, whatever is sharded.
TEST_F(Redistribution, AThirdCopyIsKeptOfStateThatRanksCanCompare) {
  for (const bool shared : {false, true}) {
    comm::run_threads(2, [&](const comm::Group& world) {
      const MemoryCopies::Slices slices{
          cut_slice("matrix", {1 << 18, 2}, shared ? Cut::none : Cut::rows, at::kFloat, world),
          cut_slice("count", {}, Cut::none, at::kLong, world)};
      MemoryCopies copies(
          world, {.descriptor = nodes_[shared].get(), .local_rank = world.rank(), .local_size = 2},
          "one", [&] { return slices; }, {.verifies = true});
      copies.restore();
    });
    EXPECT_EQ(held(shared) >> 21, shared ? 3U : 2U);  // of 2 MiB
  }
}

// A step that some ranks of an earlier start had reached is not that step of a later one.
TEST_F(Redistribution, StepsOfDifferentStartsAreNotMixed) {
  start({1, 4, Cut::rows}, {}, [&](const Rank& rank) {
    train_to(rank, 5);
    if (rank.world.rank() > 2) return;  // dies before
    for (const auto& slice : rank.slices) slice.tensor.copy_(values_of(slice, 60));
    rank.copies.begin(6, {{"step", "6"}});
    rank.copies.wait();
  });
  start({1, 4, Cut::rows}, 5, [&](const Rank& rank) {
    train_to(rank, 5);
    if (rank.world.rank() < 3) return;
    for (const auto& slice : rank.slices) slice.tensor.copy_(values_of(slice, 6));
    rank.copies.begin(6, {{"step", "6"}});
    rank.copies.wait();
  });
  start({1, 3, Cut::rows}, 5, [&](const Rank& rank) { train_to(rank, 5); });
  start({1, 4, Cut::rows}, 5, [&](const Rank& rank) {
    train_to(rank, 5);
    train_to(rank, 6);
  });
  start({1, 2, Cut::columns}, 6, [](const Rank&) {});
}

TEST_F(Redistribution, CopiesOfAnotherRunAndLostOnesAreRefused) {
  const auto two = [&](const Rank& rank) {
    train_to(rank, 0);
    train_to(rank, 1);
  };
  start({1, 3, Cut::rows}, {}, two);
  start({1, 2, Cut::rows}, {}, two, "another");
  EXPECT_LT(held(), uint64_t{1} << 20);
  generation_ = 0;
}

// Ranks of three nodes whose slices are only theirs. The next node has the copies of one that is
// lost; of two neighbours nobody has those of the first.
TEST_F(Redistribution, ALostNodeLosesNothing) {
  const auto two = [&](const Rank& rank) {
    const int64_t begin = rank.restored.value_or(0);
    train_to(rank, begin);
    train_to(rank, begin + 1);
  };
  const auto lose = [&](size_t node) { nodes_[node] = launch::make_recovery_memory(4); };
  start({3, 2, Cut::rows}, {}, two);
  lose(1);
  start({3, 2, Cut::rows}, 1, two);  // a node that takes its place
  lose(0);
  std::rotate(nodes_.begin(), nodes_.begin() + 1, nodes_.end());
  start({2, 2, Cut::columns}, 2, two);  // those that are left
  lose(1);
  start({1, 3, Cut::rows}, 3, two);
  start({3, 1, Cut::rows}, 4, two);
  lose(2);
  start({3, 1, Cut::rows}, 5, two);
  lose(1);
  lose(2);
  start({3, 1, Cut::rows}, {}, two);
}

// A whole copy is on each node.
TEST_F(Redistribution, ReplicasAreNotSent) {
  const auto one = [&](const Rank& rank) { train_to(rank, 0); };
  start({1, 2, Cut::none}, {}, one);
  const uint64_t alone = held();
  generation_ = 0;
  nodes_[0] = launch::make_recovery_memory(4);
  start({2, 2, Cut::none}, {}, one);
  EXPECT_LE(held(), alone + uint64_t{8} * 4096);
}

// What one node has lost the other one sends.
TEST_F(Redistribution, SlicesComeFromOtherNodes) {
  const auto two = [&](const Rank& rank) {
    const int64_t begin = rank.restored.value_or(0);
    train_to(rank, begin);
    train_to(rank, begin + 1);
  };
  start({2, 2, Cut::rows}, {}, two);
  start({2, 2, Cut::columns}, 1, two);
  start({2, 1, Cut::rows}, 2, two);
  start({2, 2, Cut::none}, 3, two);
  nodes_[0] = launch::make_recovery_memory(4);
  start({2, 2, Cut::none}, 4, two);
  start({2, 1, Cut::columns}, 5, two);
}

TEST_F(Redistribution, OldCopiesAreFreed) {
  uint64_t usual = 0, moved = 0;
  start({1, 4, Cut::none}, {}, [&](const Rank& rank) {
    train_to(rank, 0);
    train_to(rank, 1);
  });
  start({1, 2, Cut::none}, 1, [&](const Rank& rank) {
    train_to(rank, 1);
    train_to(rank, 2);
    if (rank.world.rank() == 0) moved = held();
  });
  nodes_[0] = launch::make_recovery_memory(4);
  generation_ = 0;
  start({1, 2, Cut::none}, {}, [&](const Rank& rank) {
    train_to(rank, 0);
    if (rank.world.rank() == 0) usual = held();
  });
  EXPECT_LE(moved, usual + uint64_t{16} * 4096);
}

}  // namespace
}  // namespace lockstep::test
