#include "lockstep/comm/ordered.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/GradMode.h>

#include <bit>
#include <numeric>
#include <utility>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::comm {
namespace {

// Of 16-bit floats in float32.
at::Tensor widened(const at::Tensor& block) {
  const bool narrow = block.scalar_type() == at::kHalf || block.scalar_type() == at::kBFloat16;
  return narrow ? block.to(at::kFloat) : block;
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool is_bool = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::product:
      return a.mul(b);
    case ReduceOp::min:
      return is_bool ? a.logical_and(b) : at::minimum(a, b);
    case ReduceOp::max:
      return is_bool ? a.logical_or(b) : at::maximum(a, b);
    default:
      return is_bool ? a.logical_or(b) : a.add(b);
  }
}

// The tree of fabric::reduce over rows [begin, end), computed where they are.
at::Tensor combine_rows(const at::Tensor& blocks, int64_t begin, int64_t end, ReduceOp op) {
  if (end - begin == 1) return widened(blocks[begin]);
  const auto half = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(end - begin - 1)));
  return combine(combine_rows(blocks, begin, begin + half, op),
                 combine_rows(blocks, begin + half, end, op), op);
}

void reduce_rows(const at::Tensor& output, const at::Tensor& blocks, ReduceOp op) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor result = combine_rows(blocks, 0, blocks.size(0), op);
  if (op == ReduceOp::avg) {
    // By a tensor: CUDA multiplies by the inverse of a number, which rounds once more.
    const at::Tensor count =
        at::full({}, blocks.size(0), at::TensorOptions().dtype(result.scalar_type()))
            .to(result.device());
    result = result.is_floating_point() ? result.div(count) : result.div(count, "trunc");
  }
  at::Tensor(output).copy_(result);
}

// Whether the group takes this tensor from its device.
bool stays(const at::Tensor& tensor, const Group& group) {
  return tensor.defined() && group.impl().device_for(tensor) >= 0;
}

// Every rank sums one block of the tensor; at once it begins to bring that block from everyone.
class BlockSum {
 public:
  BlockSum(const at::Tensor& input, const std::vector<int64_t>& counts, const Group& group,
           const ReduceOptions& options)
      : op_(options.op),
        dtype_(detail::dtype_of(input, "all_to_all")),
        on_device_(stays(input, group)) {
    const int64_t mine = counts[static_cast<size_t>(group.rank())];
    blocks_ = at::empty({group.size(), mine},
                        on_device_ ? input.options() : input.options().device(at::kCPU));
    exchange_ =
        all_to_all(blocks_, input, group,
                   {.input_counts = counts,
                    .output_counts = std::vector<int64_t>(static_cast<size_t>(group.size()), mine),
                    .timeout = options.timeout,
                    .tag = options.tag});
  }

  bool on_device() const { return on_device_; }
  // `output` is contiguous, and on the CPU unless the blocks are on the device.
  void wait_and_write(const at::Tensor& output) {
    exchange_.wait();
    if (on_device_) return reduce_rows(output, blocks_, op_);
    std::vector<const std::byte*> inputs;
    for (int64_t rank = 0; rank < blocks_.size(0); ++rank)
      inputs.push_back(detail::bytes_of(blocks_[rank]).data());
    std::byte* const sum = detail::bytes_of(output).data();
    fabric::reduce(dtype_, op_, {&sum, 1}, inputs, static_cast<size_t>(output.numel()));
  }

 private:
  ReduceOp op_;
  DType dtype_;
  bool on_device_;
  at::Tensor blocks_;
  Work exchange_;
};

void copy_back(const at::Tensor& target, const at::Tensor& line) {
  if (line.is_alias_of(target)) return;
  const c10::AutoGradMode no_grad(false);
  target.copy_(line);
}

class OrderedAllReduce final : public detail::Pending {
 public:
  OrderedAllReduce(const at::Tensor& target, const Group& group, ReduceOptions options)
      : target_(target.detach()),
        line_((stays(target, group) ? target_ : target_.to(at::kCPU)).contiguous()),
        flat_(line_.view({-1})),
        group_(group),
        options_(std::move(options)),
        counts_(balanced_counts(flat_.numel(), group.size())),
        sum_(flat_, counts_, group, options_) {}

  void wait() override {
    if (done_) return;
    const auto range = layout::balanced_range(flat_.numel(), group_.size(), group_.rank());
    const at::Tensor mine = flat_.narrow(0, range.begin, range.size());
    sum_.wait_and_write(mine);
    all_gather(flat_, mine, group_,
               {.counts = counts_, .timeout = options_.timeout, .tag = options_.tag})
        .wait();
    copy_back(target_, line_);
    done_ = true;
  }
  bool done() const override { return done_; }

 private:
  static std::vector<int64_t> balanced_counts(int64_t total, int size) {
    std::vector<int64_t> counts;
    for (int rank = 0; rank < size; ++rank)
      counts.push_back(layout::balanced_range(total, size, rank).size());
    return counts;
  }

  at::Tensor target_, line_, flat_;
  Group group_;
  ReduceOptions options_;
  std::vector<int64_t> counts_;
  BlockSum sum_;
  bool done_ = false;
};

class OrderedReduceScatter final : public detail::Pending {
 public:
  OrderedReduceScatter(const at::Tensor& target, BlockSum sum)
      : target_(target.detach()), sum_(std::move(sum)) {}

  void wait() override {
    if (done_) return;
    const bool in_place = (target_.is_cpu() || sum_.on_device()) && target_.is_contiguous();
    const at::Tensor line =
        in_place ? target_ : at::empty(target_.sizes(), target_.options().device(at::kCPU));
    sum_.wait_and_write(line);
    copy_back(target_, line);
    done_ = true;
  }
  bool done() const override { return done_; }

 private:
  at::Tensor target_;
  BlockSum sum_;
  bool done_ = false;
};

// Of every rank. What all_to_all cannot know is checked here.
std::vector<int64_t> checked_counts(const at::Tensor& output, const at::Tensor& input,
                                    const Group& group, std::vector<int64_t> counts) {
  const auto refuse = [&](const std::string& rule) {
    throw ConfigError(format("[reduce_scatter_ordered] rank {}: {}", group.rank(), rule));
  };
  if (!output.defined() || !input.defined()) refuse("the tensor is undefined");
  if (output.scalar_type() != input.scalar_type()) {
    refuse(format("input is {}, output is {}; they must be the same",
                  c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
  }
  const auto size = static_cast<size_t>(group.size());
  if (counts.empty()) counts.assign(size, output.numel());
  if (counts.size() != size)
    refuse(format("{} block counts for a group of {}", counts.size(), size));
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t mine = counts[static_cast<size_t>(group.rank())];
  if (sum != input.numel() || mine != output.numel()) {
    refuse(format("input has {} elements and output {}, must have {} and {} for block counts {}",
                  input.numel(), output.numel(), sum, mine, join(counts)));
  }
  return counts;
}

bool sums_in_rank_tree(const at::Tensor& tensor, const Group& group) {
  return group.size() == 1 || (group.impl().sums_in_rank_tree() && !stays(tensor, group));
}

}  // namespace

Work all_reduce_ordered(const at::Tensor& tensor, const Group& group, ReduceOptions options) {
  if (sums_in_rank_tree(tensor, group)) return all_reduce(tensor, group, std::move(options));
  fabric::check_reducible(detail::dtype_of(tensor, "all_reduce"), options.op);
  return Work(std::make_shared<OrderedAllReduce>(tensor, group, std::move(options)));
}

Work reduce_scatter_ordered(const at::Tensor& output, const at::Tensor& input, const Group& group,
                            ReduceScatterOptions options) {
  if (sums_in_rank_tree(input, group))
    return reduce_scatter(output, input, group, std::move(options));
  const auto counts = checked_counts(output, input, group, std::move(options.counts));
  fabric::check_reducible(detail::dtype_of(input, "reduce_scatter"), options.op);
  return Work(std::make_shared<OrderedReduceScatter>(
      output, BlockSum(input, counts, group,
                       {.op = options.op, .timeout = options.timeout, .tag = options.tag})));
}

}  // namespace lockstep::comm
