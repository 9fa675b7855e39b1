// SPDX-License-Identifier: Apache-2.0
// An operation completes whether it is waited for, looked at, or left alone.
#include <ATen/ATen.h>

#include <functional>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/support.h"
#include "lockstep/comm/control/host_groups.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::conformance {
namespace {

// An operation that has more to do when its data has arrived: a division, a cast, a local sum, a
// copy to where the result belongs.
struct Unwaited {
  const char* name;
  // Begins it on new tensors; the result is `output`, to be compared with `expected`.
  std::function<Work(at::Tensor& output, at::Tensor& expected)> begin;
};

std::vector<Unwaited> cases(const Ranks& group, int64_t count) {
  const int me = group.rank(), size = group.size();
  const int64_t block = count / size + 1;  // of one rank, where all have many
  const auto sum = [&group](int64_t n, DType dtype, ReduceOp op) {
    return expected_reduction(group.contributions(n, dtype), op);
  };
  // Every other element of its memory; no view of another tensor, which would hold that.
  const auto strided = [&group](int64_t n) {
    return at::empty_strided({n}, {2}, group.options()).zero_();
  };
  std::vector<Unwaited> all;
  for (const DType dtype : {DType::float32, DType::int32, DType::int64, DType::bfloat16}) {
    all.push_back({"all_reduce, avg", [=](at::Tensor& output, at::Tensor& expected) {
                     output = group.contribution(me, count, dtype);
                     expected = sum(count, dtype, ReduceOp::avg);
                     return all_reduce(output, group, {.op = ReduceOp::avg});
                   }});
  }
  all.push_back({"reduce, avg", [=](at::Tensor& output, at::Tensor& expected) {
                   output = group.contribution(me, count, DType::bfloat16);
                   expected = me == 0 ? sum(count, DType::bfloat16, ReduceOp::avg) : output.clone();
                   return reduce(output, group, {.op = ReduceOp::avg});
                 }});
  all.push_back(
      {"reduce_scatter", [=](at::Tensor& output, at::Tensor& expected) {
         output = at::empty({block}, group.options());
         expected = sum(block * size, DType::float32, ReduceOp::sum).narrow(0, block * me, block);
         return reduce_scatter(output, group.contribution(me, block * size, DType::float32), group);
       }});
  all.push_back({"a strided all_reduce", [=](at::Tensor& output, at::Tensor& expected) {
                   output = strided(count).copy_(group.contribution(me, count, DType::float32));
                   expected = sum(count, DType::float32, ReduceOp::sum);
                   return all_reduce(output, group);
                 }});
  all.push_back({"a strided all_gather", [=](at::Tensor& output, at::Tensor& expected) {
                   output = strided(block * size);
                   expected = at::cat(group.contributions(block, DType::float32));
                   return all_gather(output, group.contribution(me, block, DType::float32), group);
                 }});
  all.push_back({"an uneven all_gather", [=](at::Tensor& output, at::Tensor& expected) {
                   std::vector<int64_t> counts;
                   std::vector<at::Tensor> parts;
                   for (int rank = 0; rank < size; ++rank) {
                     counts.push_back(block + rank);
                     parts.push_back(group.contribution(rank, counts.back(), DType::float32));
                   }
                   expected = at::cat(parts);
                   output = strided(expected.numel());
                   return all_gather(output, parts[static_cast<size_t>(me)], group,
                                     {.counts = counts});
                 }});
  all.push_back({"a sum in order", [=](at::Tensor& output, at::Tensor& expected) {
                   output = strided(count).copy_(group.contribution(me, count, DType::float32));
                   expected = sum(count, DType::float32, ReduceOp::sum);
                   return all_reduce_ordered(output, group);
                 }});
  all.push_back(
      {"a block's sum in order", [=](at::Tensor& output, at::Tensor& expected) {
         output = strided(block);
         expected = sum(block * size, DType::float32, ReduceOp::sum).narrow(0, block * me, block);
         return reduce_scatter_ordered(output, group.contribution(me, block * size, DType::float32),
                                       group);
       }});
  if (size > 1) {
    all.push_back({"a strided message", [=](at::Tensor& output, at::Tensor& expected) {
                     const int next = (me + 1) % size, previous = (me + size - 1) % size;
                     (void)send(group.contribution(me, count, DType::float32), next, group);
                     output = strided(count);
                     expected = group.contribution(previous, count, DType::float32);
                     return recv(output, previous, group);
                   }});
  }
  return all;
}

}  // namespace

void check_unwaited(const Ranks& group) {
  const auto until = [](const std::function<bool()>& happened) {
    for (const Deadline deadline(milliseconds{20'000}); !happened() && !deadline.passed();)
      std::this_thread::yield();
    return happened();
  };
  for (const int64_t count : {int64_t{5}, int64_t{70'001}}) {
    const std::vector<Unwaited> all = cases(group, count);
    // What is large goes another way, which needs no more than some of them.
    const size_t step = count > 1000 ? 3 : 1;
    for (size_t index = 0; index < all.size(); index += step) {
      const auto& [name, begin] = all[index];
      at::Tensor output, expected;
      const double tolerance = group.tolerance(ReduceOp::avg, DType::bfloat16);
      {
        const Work work = begin(output, expected);
        verify(until([&] { return work.done(); }),
               format("{} of {} elements is never done without wait()", name, count));
        verify_equal(output.contiguous(), expected, format("{}, not waited for", name), tolerance);
      }
      // What an operation still needs it holds: when there is no other reference to the tensor, it
      // is over.
      (void)begin(output, expected);
      verify(until([&] { return output.use_count() == 1 && output.storage().use_count() == 1; }),
             format("{} of {} elements: the tensor is never released", name, count));
      verify_equal(output.contiguous(), expected, format("{}, its handle dropped", name),
                   tolerance);
      barrier(group).wait();
    }
  }
}

void check_overlapping_calls(const Ranks& group) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int k = 0; k < 24; ++k) {
    tensors.push_back(group.contribution(group.rank(), kSizes[k % 6], kAllTypes[k % 9]));
    works.push_back(all_reduce(tensors.back(), group, {.tag = format("bucket{}", k)}));
  }
  for (size_t k = works.size(); k-- > 0;) {
    works[k].wait();
    verify_equal(tensors[k],
                 expected_reduction(group.contributions(tensors[k].numel(), kAllTypes[k % 9]),
                                    ReduceOp::sum),
                 "one of many in flight");
  }
  Work last = barrier(group);
  last.wait();
  last.wait();
  verify(last.done(), "a work that was waited for is not done");
}

// An operation needs no thread that waits for it: rank 0 waits for the others in another group,
// which they come to when the operation is over.
void check_waiting_elsewhere(const Ranks& group) {
  const Group inside = split_by_host(group).inside;
  for (const int64_t count : {3, 2000, 70'001}) {
    const at::Tensor data = group.contribution(group.rank(), count, DType::float32);
    Work work = all_reduce(data, group);
    if (group.rank() != 0) work.wait();
    barrier(inside).wait();
    work.wait();
    verify_equal(data,
                 expected_reduction(group.contributions(count, DType::float32), ReduceOp::sum),
                 "an operation that was not waited for at first");
  }
}

}  // namespace lockstep::comm::conformance
