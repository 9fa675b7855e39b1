// SPDX-License-Identifier: Apache-2.0
// What every backend must refuse: wrong arguments, and ranks that disagree.
#include <ATen/ATen.h>

#include <functional>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/conformance/support.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::conformance {
namespace {

template <class Body>
void require_refused(const char* what, Body body) {
  try {
    body();
  } catch (const ConfigError&) {
    return;
  }
  throw Error(format("{} was not refused", what));
}

// Whether the backend compares what ranks call.
bool compares(const Ranks& group) {
  return group.backend() == "thread" || group.backend() == "shm" ||
         detail::impl_of(group).membership().world->check;
}

// Peers read an input while the output is written: only what collectives.h allows may overlap.
void check_shared_memory(const Ranks& group) {
  const at::Tensor whole = at::zeros({3 * group.size()}, group.options());
  const int other = (group.rank() + 1) % group.size();
  const at::Tensor not_mine = whole.narrow(0, 3 * other, 3);
  const at::Tensor expanded = at::zeros({1}, group.options()).expand({3});
  require_refused("all_to_all in place", [&] { all_to_all(whole, whole, group).wait(); });
  require_refused("all_gather from another rank's block",
                  [&] { all_gather(whole, not_mine, group).wait(); });
  require_refused("reduce_scatter into another rank's block",
                  [&] { reduce_scatter(not_mine, whole, group).wait(); });
  require_refused("gather from another rank's block",
                  [&] { gather(whole, not_mine, group, {.root = group.rank()}).wait(); });
  require_refused("scatter into another rank's block",
                  [&] { scatter(not_mine, whole, group, {.root = group.rank()}).wait(); });
  require_refused("an expanded output", [&] { all_reduce(expanded, group).wait(); });
}

}  // namespace

void check_bad_arguments(const Ranks& group) {
  const at::Tensor data = at::zeros({group.size() * 2 + 1}, group.options());
  at::Tensor part = at::zeros({2}, group.options());
  require_refused("a root outside the group",
                  [&] { broadcast(data, group, {.root = group.size()}).wait(); });
  require_refused("an undefined tensor", [&] { all_reduce(at::Tensor(), group).wait(); });
  require_refused("a complex tensor", [&] {
    all_reduce(at::zeros({2}, group.options(at::kComplexFloat)), group).wait();
  });
  require_refused("an output of the wrong size", [&] {
    all_gather(data, at::zeros({data.numel() + 1}, group.options()), group).wait();
  });
  require_refused("different dtypes", [&] {
    all_gather(at::zeros({group.size()}, group.options(at::kLong)), at::zeros({1}, group.options()),
               group)
        .wait();
  });
  require_refused("a message to oneself", [&] { send(part, group.rank(), group).wait(); });
  require_refused("a negative colour", [&] { (void)group.split(-1, 0); });
  if (group.size() > 1) {
    require_refused("blocks that are not equal", [&] { reduce_scatter(part, data, group).wait(); });
    check_shared_memory(group);
  }
  barrier(group).wait();
}

// Each on a group of its own, because a mismatch breaks the group. Only where the backend compares.
void check_mismatches(const Ranks& group) {
  if (group.size() == 1 || !compares(group)) return;
  const bool odd_one = group.rank() == group.size() - 1;
  const std::pair<const char*, std::function<void(const Group&)>> cases[] = {
      {"different operations",
       [&](const Group& g) {
         at::Tensor data = at::zeros({8}, group.options());
         (odd_one ? broadcast(data, g) : all_reduce(data, g)).wait();
       }},
      {"different sizes",
       [&](const Group& g) {
         all_reduce(at::zeros({odd_one ? 8 : 9}, group.options()), g).wait();
       }},
      {"different dtypes",
       [&](const Group& g) {
         all_reduce(at::zeros({8}, group.options(odd_one ? at::kInt : at::kFloat)), g).wait();
       }},
      {"different reductions",
       [&](const Group& g) {
         all_reduce(at::zeros({8}, group.options()), g,
                    {.op = odd_one ? ReduceOp::min : ReduceOp::max})
             .wait();
       }},
      {"different roots",
       [&](const Group& g) {
         broadcast(at::zeros({8}, group.options()), g, {.root = odd_one ? 1 : 0}).wait();
       }},
      {"tensors in another order",
       [&](const Group& g) {
         at::Tensor first = at::zeros({8}, group.options()),
                    second = at::zeros({9}, group.options());
         Work works[] = {all_reduce(odd_one ? second : first, g),
                         all_reduce(odd_one ? first : second, g)};
         for (Work& work : works) work.wait();
       }},
      {"a call that one rank leaves out",
       [&](const Group& g) {
         at::Tensor data = at::zeros({8}, group.options());
         if (!odd_one) all_reduce(data, g).wait();
         all_gather(at::zeros({8 * g.size()}, group.options()), data, g).wait();
       }},
      {"blocks of different sizes",
       [&](const Group& g) {
         std::vector<int64_t> counts(static_cast<size_t>(g.size()), 4);
         counts.front() += odd_one ? 1 : 0;
         counts.back() += odd_one ? 0 : 1;
         at::Tensor all = at::zeros({4 * g.size() + 1}, group.options());
         const int64_t mine = counts[static_cast<size_t>(g.rank())];
         all_gather(all, at::zeros({mine}, group.options()), g, {.counts = counts}).wait();
       }},
      {"calls whose handles were dropped",
       [&](const Group& g) {
         (void)all_reduce(at::zeros({odd_one ? 8 : 9}, group.options()), g);
         barrier(g).wait();
       }},
      {"different tags",
       [&](const Group& g) {
         all_reduce(at::zeros({8}, group.options()), g, {.tag = odd_one ? "a" : "b"}).wait();
       }},
  };
  for (const auto& [what, body] : cases) {
    const Group victim = group.split(0, group.rank());
    std::string message;
    try {
      body(victim);
    } catch (const MismatchError& error) {
      message = error.what();
    }
    verify(message.find(format("rank {} called", group.size() - 1)) != std::string::npos &&
               message.find("; rank") != std::string::npos,
           format("{}: no error that shows both sides, but '{}'", what, message));
    bool still_broken = false;
    try {
      barrier(victim).wait();
    } catch (const CommError&) {
      still_broken = true;
    }
    verify(still_broken, format("{}: the group still worked afterwards", what));
  }
}

// One rank makes fewer calls than the others and leaves: they do not wait for it.
void check_fewer_calls(const Ranks& group) {
  // Across hosts an engine may notice only at the deadline.
  if (group.size() == 1 || group.local_size() < group.size() || !compares(group)) return;
  Group victim = group.split(0, group.rank());
  const int leaver = group.size() - 1;
  at::Tensor data = at::ones({8}, group.options());
  all_reduce(data, victim).wait();
  std::string message;
  if (group.rank() != leaver) {
    try {
      all_reduce(data, victim).wait();
    } catch (const PeerLost& error) {
      verify(error.rank() == leaver, format("the wrong rank is named: {}", error.what()));
      message = error.what();
    }
    verify(!message.empty(), "fewer calls of one rank: no error that names it");
  }
  victim = Group();
  barrier(group).wait();
}

// The receiver finds out; the sender, and everybody else, with the next thing they do in that
// group.
void check_mismatched_message(const Ranks& group) {
  if (group.size() == 1 || !compares(group)) return;
  const Group victim = group.split(0, group.rank());
  std::string message;
  try {
    if (group.rank() == 0) send(at::zeros({80}, group.options()), 1, victim).wait();
    if (group.rank() == 1) recv(at::zeros({40}, group.options()), 0, victim).wait();
    barrier(victim).wait();
  } catch (const MismatchError& error) {
    message = error.what();
  }
  verify(
      message.find(
          "rank 1 called recv(float32[40], from 0), but rank 0 called send(float32[80], to 1)") !=
          std::string::npos,
      format("a message of the wrong size: no error that shows both sides, but '{}'", message));
}

}  // namespace lockstep::comm::conformance
