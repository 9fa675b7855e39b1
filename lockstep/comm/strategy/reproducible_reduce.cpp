// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/collectives.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <bit>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/comm/announce_write.h"
#include "lockstep/comm/backend.h"
#include "lockstep/comm/control/watched_operation.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/comm/serial_executor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/layout/shard_math.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm {
namespace {

using fabric::OpKind;

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
  const c10::InferenceMode any_thread;
  if (op == ReduceOp::avg && !blocks.is_floating_point()) {
    at::Tensor sum = detail::to_summand(blocks[0]);
    for (int64_t rank = 1; rank < blocks.size(0); ++rank) sum += detail::to_summand(blocks[rank]);
    at::Tensor(output).copy_(
        detail::to_average(sum, blocks.size(0), memory::dtype_of(output, "reduce_scatter")));
    return;
  }
  at::Tensor result = combine_rows(blocks, 0, blocks.size(0), op);
  if (op == ReduceOp::avg) {
    // By a tensor: CUDA multiplies by the inverse of a number, which rounds once more.
    const at::Tensor count =
        at::full({}, blocks.size(0), at::TensorOptions().dtype(result.scalar_type()))
            .to(result.device());
    result = result.div(count);
  }
  at::Tensor(output).copy_(result);
}

// Whether the group takes this tensor from its device.
bool stays(const at::Tensor& tensor, const Group& group) {
  return tensor.defined() && detail::impl_of(group).device_for(tensor) >= 0;
}

// The operation's blocks on their way; where it ends, the sum of what came.
struct Exchange {
  at::Tensor input;             // contiguous, where the group takes it from
  std::vector<int64_t> counts;  // of every rank's block
  at::Tensor blocks;            // what all ranks have for this one
  ReduceOptions options;
  bool on_device;

  Exchange(at::Tensor from, std::vector<int64_t> block_counts, const Group& group,
           ReduceOptions how)
      : input(std::move(from)),
        counts(std::move(block_counts)),
        blocks(
            at::empty({group.size(), counts[static_cast<size_t>(group.rank())]}, input.options())),
        options(std::move(how)),
        on_device(stays(input, group)) {}

  AllToAllOptions all_to_all_options() const {
    return {.input_counts = counts,
            .output_counts = std::vector<int64_t>(counts.size(), blocks.size(1)),
            .timeout = options.timeout,
            .tag = options.tag};
  }
  // `output` is contiguous, and where the blocks are.
  void sum_into(const at::Tensor& output) const {
    if (on_device) return reduce_rows(output, blocks, options.op);
    std::vector<const std::byte*> inputs;
    for (int64_t rank = 0; rank < blocks.size(0); ++rank)
      inputs.push_back(memory::bytes_of(blocks[rank]).data());
    std::byte* const sum = memory::bytes_of(output).data();
    fabric::reduce(memory::dtype_of(output, "all_to_all"), options.op, {&sum, 1}, inputs,
                   static_cast<size_t>(output.numel()));
  }
};

// Contiguous memory in which the result is made, and the way from there to the caller's tensor.
class Target {
 public:
  // `line` has the result's elements; it may be the tensor's own memory.
  Target(const at::Tensor& tensor, at::Tensor line)
      : tensor_(tensor.detach()), line_(std::move(line)), stream_(current_stream(tensor_)) {}
  const at::Tensor& line() const { return line_; }
  // On any thread, after what the caller's stream had been given.
  void copy_back() const {
    c10::OptionalStreamGuard on_stream;
    if (stream_) on_stream.reset_stream(*stream_);
    copy_back_on_device();
  }
  // On the current stream.
  void copy_back_on_device() const {
    if (line_.is_alias_of(tensor_)) return;
    const c10::InferenceMode inference(tensor_.is_inference());
    const c10::AutoGradMode no_grad(false);
    at::Tensor(tensor_).copy_(line_.view(tensor_.sizes()));
  }

 private:
  static std::optional<c10::Stream> current_stream(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return std::nullopt;
    return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  }

  at::Tensor tensor_, line_;
  std::optional<c10::Stream> stream_;
};

// Contiguous, flat, and where the group takes it from.
at::Tensor line_of(const at::Tensor& tensor, const Group& group) {
  const c10::AutoGradMode no_grad(false);
  return (stays(tensor, group) ? tensor.detach() : tensor.detach().to(at::kCPU))
      .contiguous()
      .view({tensor.numel()});
}
Target target_for(const at::Tensor& output, const Group& group) {
  if (output.is_contiguous() && (output.is_cpu() || stays(output, group)))
    return {output, output.detach().view({output.numel()})};
  return {output,
          at::empty({output.numel()},
                    stays(output, group) ? output.options() : output.options().device(at::kCPU))};
}

std::vector<int64_t> balanced_counts(int64_t total, int size) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < size; ++rank)
    counts.push_back(layout::balanced_range(total, size, rank).size());
  return counts;
}

// This rank's block of what all_reduce_ordered makes.
at::Tensor own_block(const at::Tensor& line, const Group& group) {
  const auto range = layout::balanced_range(line.numel(), group.size(), group.rank());
  return line.narrow(0, range.begin, range.size());
}

}  // namespace

// Sums of ranks that share no memory, one after the other on a thread, over a group of their own:
// they need several operations each, and no rank may have to wait for the first to begin the next.
class detail::OrderedLine {
 public:
  explicit OrderedLine(const GroupImpl& group) : membership_(group.membership()) {
    membership_.name += ":ordered";
    backend_ = group.backend() == "nccl" ? membership_.world->host_backend : group.backend();
  }

  // `body` gets the group. `announced` is over when it is.
  std::shared_ptr<Pending> post(std::shared_ptr<OrderedLine> self,
                                std::shared_ptr<Pending> announced,
                                std::function<void(const Group&)> body) {
    struct Sum final : Pending {
      Completion completion{1};
      void wait() override {
        while (!completion.wait_for(kDefaultTimeout)) continue;
        if (const auto error = completion.error()) std::rethrow_exception(error);
      }
      bool done() const override { return completion.done(); }
    };
    const auto sum = std::make_shared<Sum>();
    executor_.post([self = std::move(self), announced = std::move(announced),
                    body = std::move(body), sum]() mutable {
      std::exception_ptr error;
      try {
        if (announced) announced->wait();
        if (!self->group_)
          self->group_ = Group(make_plain_group(self->membership_, self->backend_));
        const ExcludeBlockedTime exclude;
        body(*self->group_);
      } catch (...) {
        error = std::current_exception();
      }
      body = nullptr;
      announced.reset();
      self.reset();
      sum->completion.part_done(error);
    });
    return sum;
  }

 private:
  Membership membership_;
  std::string backend_;
  std::optional<Group> group_;  // of the thread
  SerialExecutor executor_;
};

std::shared_ptr<detail::OrderedLine> detail::GroupImpl::ordered_line() {
  const std::lock_guard lock(mutex_);
  if (!ordered_line_) ordered_line_ = std::make_shared<OrderedLine>(*this);
  return ordered_line_;
}

namespace {

// On a thread, over host memory; ranks are compared where the group compares them.
Work post_sum(OpKind kind, int64_t count, const Exchange& exchange, const Group& group,
              std::function<void(const Group&)> body) {
  fabric::Operation operation{.kind = kind,
                              .reduce = exchange.options.op,
                              .dtype = memory::dtype_of(exchange.input, fabric::name_of(kind)),
                              .tag = exchange.options.tag,
                              .timeout = exchange.options.timeout.value_or(group.timeout()),
                              .count = count};
  if (kind == OpKind::reduce_scatter) operation.send_counts = exchange.counts;
  const auto line = detail::impl_of(group).ordered_line();
  return Work(
      line->post(line, detail::impl_of(group).announce(std::move(operation)), std::move(body)),
      detail::impl_of(group).membership().world->blocked);
}

// On a device all steps are in the order of its stream, so all begin at once.
std::shared_ptr<detail::Pending> exchange_on_device(const std::shared_ptr<Exchange>& exchange,
                                                    const Group& group,
                                                    std::function<void()> finish) {
  const AllToAllOptions options = exchange->all_to_all_options();
  return detail::impl_of(group).submit(
      {.kind = OpKind::all_to_all,
       .dtype = memory::dtype_of(exchange->input, "all_to_all"),
       .input = memory::bytes_of(exchange->input),
       .output = memory::bytes_of(exchange->blocks),
       .send_counts = options.input_counts,
       .recv_counts = options.output_counts,
       .tag = options.tag,
       .timeout = options.timeout.value_or(group.timeout()),
       .device = detail::impl_of(group).device_for(exchange->input),
       .finish = std::move(finish)},
      exchange);
}

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
  return group.size() == 1 || (detail::impl_of(group).sums_in_rank_tree() && !stays(tensor, group));
}

}  // namespace

Work all_reduce_ordered(const at::Tensor& tensor, const Group& group, ReduceOptions options) {
  if (sums_in_rank_tree(tensor, group)) return all_reduce(tensor, group, std::move(options));
  fabric::check_reducible(memory::dtype_of(tensor, "all_reduce"), options.op);
  detail::announce_write(tensor);
  const Target target(tensor, line_of(tensor, group));
  const auto exchange = std::make_shared<Exchange>(
      target.line(), balanced_counts(tensor.numel(), group.size()), group, std::move(options));
  const at::Tensor mine = own_block(target.line(), group);
  if (!stays(tensor, group)) {
    return post_sum(
        OpKind::all_reduce, tensor.numel(), *exchange, group,
        [exchange, target, mine](const Group& own) {
          all_to_all(exchange->blocks, exchange->input, own, exchange->all_to_all_options()).wait();
          exchange->sum_into(mine);
          all_gather(target.line(), mine, own,
                     {.counts = exchange->counts,
                      .timeout = exchange->options.timeout,
                      .tag = exchange->options.tag})
              .wait();
          target.copy_back();
        });
  }
  (void)exchange_on_device(exchange, group, [exchange, mine] { exchange->sum_into(mine); });
  const auto memory =
      std::make_shared<std::pair<std::shared_ptr<Exchange>, Target>>(exchange, target);
  return Work(
      detail::impl_of(group).submit({.kind = OpKind::all_gather,
                                     .dtype = memory::dtype_of(tensor, "all_gather"),
                                     .input = memory::bytes_of(mine),
                                     .output = memory::bytes_of(target.line()),
                                     .recv_counts = exchange->counts,
                                     .tag = exchange->options.tag,
                                     .timeout = exchange->options.timeout.value_or(group.timeout()),
                                     .count = tensor.numel(),
                                     .device = detail::impl_of(group).device_for(target.line()),
                                     .finish = [memory] { memory->second.copy_back_on_device(); }},
                                    memory),
      detail::impl_of(group).membership().world->blocked);
}

Work reduce_scatter_ordered(const at::Tensor& output, const at::Tensor& input, const Group& group,
                            ReduceScatterOptions options) {
  if (sums_in_rank_tree(input, group))
    return reduce_scatter(output, input, group, std::move(options));
  const auto counts = checked_counts(output, input, group, std::move(options.counts));
  fabric::check_reducible(memory::dtype_of(input, "reduce_scatter"), options.op);
  detail::announce_write(output);
  const Target target = target_for(output, group);
  const auto exchange = std::make_shared<Exchange>(
      line_of(input, group), counts, group,
      ReduceOptions{.op = options.op, .timeout = options.timeout, .tag = options.tag});
  if (!stays(input, group)) {
    return post_sum(
        OpKind::reduce_scatter, input.numel(), *exchange, group,
        [exchange, target](const Group& own) {
          all_to_all(exchange->blocks, exchange->input, own, exchange->all_to_all_options()).wait();
          exchange->sum_into(target.line());
          target.copy_back();
        });
  }
  return Work(exchange_on_device(exchange, group,
                                 [exchange, target] {
                                   exchange->sum_into(target.line());
                                   target.copy_back_on_device();
                                 }),
              detail::impl_of(group).membership().world->blocked);
}

}  // namespace lockstep::comm
