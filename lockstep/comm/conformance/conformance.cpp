// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/conformance/conformance.h"

#include <ATen/ATen.h>

#include <limits>
#include <numeric>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/support.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm {
namespace {

using namespace conformance;

// Size, dtype and reduction are independent of each other: the largest size needs no more than two
// dtypes and one reduction.
bool is_worthwhile(int64_t count, DType dtype, ReduceOp op = ReduceOp::sum) {
  return count < 10'000 ||
         ((dtype == DType::float32 || dtype == DType::bfloat16) && op == ReduceOp::sum);
}

bool is_valid(DType dtype, ReduceOp op) { return dtype != DType::boolean || op != ReduceOp::avg; }

void check_all_reduce(const Ranks& group) {
  for (const DType dtype : kAllTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!is_valid(dtype, op)) continue;
      for (const int64_t count : kSizes) {
        if (!is_worthwhile(count, dtype, op)) continue;
        at::Tensor data = group.contribution(group.rank(), count, dtype);
        all_reduce(data, group, {.op = op}).wait();
        verify_equal(data, expected_reduction(group.contributions(count, dtype), op),
                     label("all_reduce", dtype, count) + ", " + std::string(fabric::name_of(op)),
                     group.tolerance(op, dtype));
      }
    }
  }
  bool refused = false;
  try {
    all_reduce(group.contribution(0, 3, DType::boolean), group, {.op = ReduceOp::avg}).wait();
  } catch (const ConfigError&) {
    refused = true;
  }
  verify(refused, "avg of bool was not refused");
}

void check_reduce(const Ranks& group) {
  for (int root = 0; root < group.size(); ++root) {
    for (const DType dtype : kAllTypes) {
      const int64_t count = kSizes[2 + (root + static_cast<int>(dtype)) % 4];
      at::Tensor data = group.contribution(group.rank(), count, dtype);
      reduce(data, group, {.root = root}).wait();
      verify_equal(data,
                   group.rank() == root
                       ? expected_reduction(group.contributions(count, dtype), ReduceOp::sum)
                       : group.contribution(group.rank(), count, dtype),
                   label("reduce", dtype, count));
    }
  }
}

void check_whole_averages(const Ranks& group) {
  constexpr int64_t kCount = 500;
  for (const DType dtype : {DType::int64, DType::int32, DType::int8, DType::uint8}) {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < group.size(); ++rank)
      parts.push_back(group.near_limits(rank, kCount * group.size(), dtype));
    const at::Tensor expected = expected_reduction(parts, ReduceOp::avg);
    const at::Tensor& mine = parts[static_cast<size_t>(group.rank())];
    at::Tensor data = mine.clone();
    all_reduce(data, group, {.op = ReduceOp::avg}).wait();
    verify_equal(data, expected, label("average over all", dtype, data.numel()));
    const int root = group.size() - 1;
    data = mine.clone();
    reduce(data, group, {.root = root, .op = ReduceOp::avg}).wait();
    verify_equal(data, group.rank() == root ? expected : mine,
                 label("average at the root", dtype, data.numel()));
    at::Tensor block = at::empty({kCount}, mine.options());
    reduce_scatter(block, mine, group, {.op = ReduceOp::avg}).wait();
    verify_equal(block, expected.narrow(0, kCount * group.rank(), kCount),
                 label("average of a block", dtype, kCount));
    data = mine.clone();
    all_reduce_ordered(data, group, {.op = ReduceOp::avg}).wait();
    verify_equal(data, expected, label("average in order", dtype, data.numel()));
  }
}

void check_broadcast(const Ranks& group) {
  for (int root = 0; root < group.size(); ++root) {
    for (const DType dtype : kAllTypes) {
      for (const int64_t count : {kSizes[(root + static_cast<int>(dtype)) % 6], int64_t{5}}) {
        at::Tensor data = group.contribution(group.rank(), count, dtype);
        broadcast(data, group, {.root = root}).wait();
        verify_equal(data, group.contribution(root, count, dtype),
                     label("broadcast", dtype, count));
      }
    }
  }
}

// Blocks of unequal size; some ranks have none.
std::vector<int64_t> uneven(const Ranks& group, int64_t count) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < group.size(); ++rank)
    counts.push_back(rank % 3 == 1 ? 0 : count + 7 * rank);
  return counts;
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

void check_all_gather(const Ranks& group) {
  for (const DType dtype : kAllTypes) {
    for (const int64_t count : kSizes) {
      if (!is_worthwhile(count, dtype)) continue;
      for (const bool even : {true, false}) {
        const std::vector<int64_t> counts =
            even ? std::vector<int64_t>(static_cast<size_t>(group.size()), count)
                 : uneven(group, count);
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < group.size(); ++rank)
          parts.push_back(group.contribution(rank, counts[static_cast<size_t>(rank)], dtype));
        at::Tensor output = at::empty({total(counts)}, parts[0].options());
        all_gather(output, parts[static_cast<size_t>(group.rank())], group,
                   {.counts = even ? std::vector<int64_t>() : counts})
            .wait();
        verify_equal(output, at::cat(parts),
                     label(even ? "all_gather" : "uneven all_gather", dtype, count));
      }
    }
  }
}

void check_reduce_scatter(const Ranks& group) {
  for (const DType dtype : kAllTypes) {
    for (const ReduceOp op : kAllOps) {
      if (!is_valid(dtype, op)) continue;
      for (const int64_t count : kSizes) {
        if (!is_worthwhile(count, dtype, op)) continue;
        for (const bool even : {true, false}) {
          const std::vector<int64_t> counts =
              even ? std::vector<int64_t>(static_cast<size_t>(group.size()), count)
                   : uneven(group, count);
          const int64_t mine = counts[static_cast<size_t>(group.rank())];
          const int64_t start =
              std::accumulate(counts.begin(), counts.begin() + group.rank(), int64_t{0});
          const at::Tensor input = group.contribution(group.rank(), total(counts), dtype);
          at::Tensor output = at::empty({mine}, input.options());
          reduce_scatter(output, input, group,
                         {.op = op, .counts = even ? std::vector<int64_t>() : counts})
              .wait();
          verify_equal(output, expected_reduction(group.contributions(mine, dtype, start), op),
                       label(even ? "reduce_scatter" : "uneven reduce_scatter", dtype, count),
                       group.tolerance(op, dtype));
        }
      }
    }
  }
}

void check_all_to_all(const Ranks& group) {
  for (const DType dtype : kAllTypes) {
    for (const int64_t count : kSizes) {
      if (!is_worthwhile(count, dtype)) continue;
      for (const bool even : {true, false}) {
        // Rank s sends count elements, or count + s + 2 d of them, to rank d.
        const auto size_of_block = [&](int from, int to) {
          return even ? count : count + from + 2 * to;
        };
        std::vector<at::Tensor> sent, awaited;
        std::vector<int64_t> sends, receives;
        for (int peer = 0; peer < group.size(); ++peer) {
          sent.push_back(group.contribution(group.rank() + 5 * peer,
                                            size_of_block(group.rank(), peer), dtype));
          awaited.push_back(group.contribution(peer + 5 * group.rank(),
                                               size_of_block(peer, group.rank()), dtype));
          sends.push_back(sent.back().numel());
          receives.push_back(awaited.back().numel());
        }
        const at::Tensor input = at::cat(sent), expected = at::cat(awaited);
        at::Tensor output = at::empty_like(expected);
        AllToAllOptions options;
        if (!even) options.input_counts = sends, options.output_counts = receives;
        all_to_all(output, input, group, options).wait();
        verify_equal(output, expected,
                     label(even ? "all_to_all" : "uneven all_to_all", dtype, count));
      }
    }
  }
}

void check_gather_and_scatter(const Ranks& group) {
  for (int root = 0; root < group.size(); ++root) {
    for (const int64_t count : kSizes) {
      const DType dtype = kAllTypes[static_cast<size_t>(count + root) % std::size(kAllTypes)];
      const at::Tensor whole = at::cat(group.contributions(count, dtype)),
                       mine = group.contribution(group.rank(), count, dtype);
      at::Tensor gathered = group.rank() == root ? at::empty_like(whole) : at::Tensor();
      gather(gathered, mine, group, {.root = root}).wait();
      if (group.rank() == root) verify_equal(gathered, whole, label("gather", dtype, count));
      at::Tensor part = at::empty_like(mine);
      scatter(part, group.rank() == root ? whole : at::Tensor(), group, {.root = root}).wait();
      verify_equal(part, mine, label("scatter", dtype, count));
    }
  }
}

// Everybody sends to the right before anybody receives: sends must not need the receiver's help.
void check_messages(const Ranks& group) {
  if (group.size() == 1) return;
  const int next = (group.rank() + 1) % group.size(),
            previous = (group.rank() + group.size() - 1) % group.size();
  std::vector<Work> works;
  std::vector<at::Tensor> received;
  for (const DType dtype : kAllTypes) {
    for (const int64_t count : kSizes)
      works.push_back(send(group.contribution(group.rank(), count, dtype), next, group));
  }
  for (const DType dtype : kAllTypes) {
    for (const int64_t count : kSizes) {
      received.push_back(at::empty_like(group.contribution(0, count, dtype)));
      works.push_back(recv(received.back(), previous, group));
    }
  }
  for (Work& work : works) work.wait();
  size_t at = 0;
  for (const DType dtype : kAllTypes) {
    for (const int64_t count : kSizes)
      verify_equal(received[at++], group.contribution(previous, count, dtype),
                   label("recv", dtype, count));
  }
}

void check_non_contiguous(const Ranks& group) {
  const at::Tensor whole =
      group.contribution(group.rank(), 40 * 30, DType::float32).reshape({40, 30});
  at::Tensor sum = whole.clone();
  const at::Tensor columns = sum.t().slice(0, 0, 30, 2);  // every other column, transposed
  all_reduce(columns, group).wait();
  const at::Tensor expected =
      expected_reduction(group.contributions(40 * 30, DType::float32), ReduceOp::sum)
          .reshape({40, 30});
  verify_equal(sum.slice(1, 0, 30, 2).contiguous(), expected.slice(1, 0, 30, 2).contiguous(),
               "all_reduce of a strided view");
  verify_equal(sum.slice(1, 1, 30, 2).contiguous(), whole.slice(1, 1, 30, 2).contiguous(),
               "what lies between a strided view");

  at::Tensor gathered = at::empty({group.size() * 30, 40}, group.options()).t();
  all_gather(gathered, whole.t(), group).wait();
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : group.contributions(40 * 30, DType::float32))
    parts.push_back(part.reshape({40, 30}).t().reshape(-1));
  verify_equal(gathered.contiguous().reshape(-1), at::cat(parts),
               "all_gather between transposed tensors");
}

void check_in_place(const Ranks& group) {
  const int64_t count = 20'000;
  at::Tensor whole = at::zeros({count * group.size()}, group.options());
  at::Tensor mine = whole.narrow(0, count * group.rank(), count);
  mine.copy_(group.contribution(group.rank(), count, DType::float32));
  all_gather(whole, mine, group).wait();
  verify_equal(whole, at::cat(group.contributions(count, DType::float32)),
               "all_gather from a block of its output");
  whole = group.contribution(group.rank(), count * group.size(), DType::float32);
  mine = whole.narrow(0, count * group.rank(), count);
  reduce_scatter(mine, whole, group).wait();
  verify_equal(
      mine,
      expected_reduction(group.contributions(count * group.size(), DType::float32), ReduceOp::sum)
          .narrow(0, count * group.rank(), count),
      "reduce_scatter into a block of its input");
}

void check_symmetric_memory(const Ranks& group) {
  for (const int64_t count : kSizes) {
    const std::vector<int64_t> shape{count}, wide{count * group.size()};
    at::Tensor data = symmetric_empty(shape, DType::float32, group, group.device()),
               whole = symmetric_empty(wide, DType::float32, group, group.device());
    const at::Tensor sum =
        expected_reduction(group.contributions(count, DType::float32), ReduceOp::sum);
    data.copy_(group.contribution(group.rank(), count, DType::float32));
    all_reduce(data, group).wait();
    verify_equal(data, sum, "all_reduce in symmetric memory");
    data.copy_(group.contribution(group.rank(), count, DType::float32));
    all_gather(whole, data, group).wait();
    verify_equal(whole, at::cat(group.contributions(count, DType::float32)),
                 "all_gather in symmetric memory");
    whole.copy_(group.contribution(group.rank(), count * group.size(), DType::float32));
    reduce_scatter(data, whole, group, {.op = ReduceOp::avg}).wait();
    verify_equal(
        data,
        expected_reduction(group.contributions(count * group.size(), DType::float32), ReduceOp::avg)
            .narrow(0, count * group.rank(), count),
        "reduce_scatter in symmetric memory", group.tolerance(ReduceOp::avg, DType::float32));
    // One rank's tensor is ordinary: all must still take the same way.
    at::Tensor mixed = group.rank() == 0 ? at::empty({count}, group.options()) : data;
    mixed.copy_(group.contribution(group.rank(), count, DType::float32));
    all_reduce(mixed, group).wait();
    verify_equal(mixed, sum, "all_reduce of symmetric and ordinary memory");
  }
}

// NCCL's min and max are its own.
void check_nan(const Ranks& group) {
  if (!group.device().is_cpu()) return;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
      for (const int64_t count : {4, 20'000}) {
        if (count > 4 && type != at::kFloat) continue;
        for (int one = 0; one < group.size(); ++one) {
          // Two numbers of either sign, and a NaN on one rank, of either sign.
          const double mine = group.rank() + 1;
          const bool has_nan = group.rank() == one;
          const at::Tensor data =
              at::tensor({mine, -mine, has_nan ? kNan : mine, has_nan ? -kNan : -mine}, at::kDouble)
                  .to(type)
                  .repeat({count / 4});
          const double n = group.size();
          const at::Tensor expected =
              at::tensor(op == ReduceOp::min ? std::vector{1.0, -n} : std::vector{n, -1.0},
                         at::kDouble)
                  .to(type);
          const auto verify_result = [&](const at::Tensor& result, const char* what) {
            const at::Tensor rows = result.reshape({-1, 4});
            verify(rows.slice(1, 2, 4).isnan().all().item<bool>(),
                   format("{} of {} {} on {} ranks lost the NaN of rank {}", what, count,
                          c10::toString(type), group.size(), one));
            verify_equal(rows.slice(1, 0, 2).contiguous(),
                         expected.expand({rows.size(0), 2}).contiguous(), what);
          };
          at::Tensor all = data.clone();
          all_reduce(all, group, {.op = op}).wait();
          verify_result(all, "all_reduce");
          all = data.clone();
          reduce(all, group, {.root = one, .op = op}).wait();
          if (group.rank() == one) verify_result(all, "reduce");
          at::Tensor part = at::empty_like(data);
          reduce_scatter(part, data.repeat({group.size()}), group, {.op = op}).wait();
          verify_result(part, "reduce_scatter");
        }
      }
    }
  }
}

void check_same_bits(const Ranks& group) {
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    at::Tensor first;
    for (int run = 0; run < 3; ++run) {
      // Numbers whose sum depends on the order it is taken in.
      at::Tensor data = at::arange(30'000, group.options(at::kDouble))
                            .mul_(0.37 + group.rank())
                            .sin_()
                            .mul_(1e3)
                            .to(memory::to_scalar_type(dtype));
      all_reduce(data, group).wait();
      at::Tensor everyone = at::empty({group.size(), data.numel()}, data.options());
      all_gather(everyone, data, group).wait();
      for (int rank = 1; rank < group.size(); ++rank)
        verify_equal(everyone[rank], everyone[0], "the same sum on two ranks");
      if (run > 0) verify_equal(data, first, "the same sum in two runs");
      first = data;
    }
  }
}
void check_split(const Ranks& group) {
  // Odd and even ranks, each in reverse order.
  const Group half = group.split(group.rank() % 2, -group.rank());
  std::vector<int> members;
  for (int rank = group.size() - 1; rank >= 0; --rank) {
    if (rank % 2 == group.rank() % 2) members.push_back(group.members()[static_cast<size_t>(rank)]);
  }
  verify(std::equal(members.begin(), members.end(), half.members().begin(), half.members().end()),
         "a split has the wrong members");
  verify(half.members()[static_cast<size_t>(half.rank())] ==
             group.members()[static_cast<size_t>(group.rank())],
         "a split gives the wrong rank");
  at::Tensor data =
      at::full({1000}, half.members()[static_cast<size_t>(half.rank())], group.options(at::kLong));
  all_reduce(data, half).wait();
  verify_equal(data,
               at::full({1000}, std::accumulate(members.begin(), members.end(), int64_t{0}),
                        group.options(at::kLong)),
               "all_reduce in a split");
  barrier(group).wait();
}

void check_large(const Ranks& group) {
  const int64_t count = (int64_t{1} << 31) + 17;
  at::Tensor data = at::full({count}, group.rank() + 1, group.options(at::kByte));
  data[count - 1] = 3 * group.rank();
  all_reduce(data, group).wait();
  const int sum = group.size() * (group.size() + 1) / 2;
  verify(data.slice(0, 0, count - 1).min().item<int>() == sum &&
             data.slice(0, 0, count - 1).max().item<int>() == sum &&
             data[count - 1].item<int>() == 3 * group.size() * (group.size() - 1) / 2,
         "a sum of more than 2^31 elements");
  broadcast(data.fill_(group.rank()), group, {.root = group.size() - 1}).wait();
  verify(data.min().item<int>() == group.size() - 1 && data.max().item<int>() == group.size() - 1,
         "a broadcast of more than 2^31 elements");
  if (group.size() == 1) return;
  // Only one rank has as much as that in these: all must still take the same way.
  const int64_t block = count / group.size() + 1;
  const at::Tensor part = at::full({block}, group.rank() + 1, group.options(at::kByte));
  data = group.rank() == 0 ? at::empty({block * group.size()}, part.options()) : at::Tensor();
  gather(data, part, group).wait();
  scatter(part.zero_(), data, group).wait();
  verify(part.min().item<int>() == group.rank() + 1 && part.max().item<int>() == group.rank() + 1,
         "a gather and a scatter of more than 2^31 elements");
}

// Allowed as all_gather and reduce_scatter allow it.
void check_in_place_at_root(const Ranks& group) {
  for (const int64_t count : {3, 20'000}) {
    for (int root = 0; root < group.size(); ++root) {
      const at::Tensor mine = group.contribution(group.rank(), count, DType::float32),
                       all = at::cat(group.contributions(count, DType::float32));
      at::Tensor whole = at::zeros({count * group.size()}, group.options());
      const at::Tensor block = whole.narrow(0, count * group.rank(), count);
      block.copy_(mine);
      gather(whole, block, group, {.root = root}).wait();
      if (group.rank() == root) verify_equal(whole, all, "gather from a block of its output");
      whole.copy_(all);
      if (group.rank() != root) block.zero_();
      scatter(block, whole, group, {.root = root}).wait();
      verify_equal(block, mine, "scatter into a block of its input");
    }
  }
}

}  // namespace

std::vector<ConformanceCheck> conformance_checks(bool large, const std::string& device) {
  std::vector<std::pair<const char*, void (*)(const Ranks&)>> checks{
      {"all_reduce: 9 dtypes, 5 reductions, 0 to 70001 elements", check_all_reduce},
      {"reduce: every root", check_reduce},
      {"averages of whole numbers near their limits", check_whole_averages},
      {"broadcast: every root", check_broadcast},
      {"all_gather: even and uneven blocks", check_all_gather},
      {"reduce_scatter: even and uneven blocks", check_reduce_scatter},
      {"all_to_all: even and uneven blocks", check_all_to_all},
      {"gather and scatter: every root", check_gather_and_scatter},
      {"send and recv: all at once, in order", check_messages},
      {"non-contiguous tensors", check_non_contiguous},
      {"outputs that are part of inputs", check_in_place},
      {"the same at the root", check_in_place_at_root},
      {"symmetric memory, alone and mixed", check_symmetric_memory},
      {"a NaN in min or max is the result", check_nan},
      {"the same bits on all ranks and in every run", check_same_bits},
      {"many operations in flight", check_overlapping_calls},
      {"operations that are not waited for complete", check_unwaited},
      {"operations progress while their rank waits elsewhere", check_waiting_elsewhere},
      {"split", check_split},
      {"wrong arguments are refused", check_bad_arguments},
      {"ranks that disagree get an error, all of them", check_mismatches},
      {"so does one that makes fewer calls and leaves", check_fewer_calls},
      {"so does a message of the wrong size", check_mismatched_message},
  };
  if (large) checks.emplace_back("more than 2^31 elements", check_large);
  std::vector<ConformanceCheck> result;
  for (const auto& [name, check] : checks) {
    result.push_back({device == "cpu" ? name : format("{}, {}", name, device),
                      [check = check, where = at::Device(device)](const Group& group) {
                        check(Ranks(group, where));
                      }});
  }
  return result;
}

}  // namespace lockstep::comm
