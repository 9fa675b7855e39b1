// SPDX-License-Identifier: Apache-2.0
// From tensors to operations: checks the arguments, makes tensors contiguous, and hands the rest to
// the group's backend.
#include "lockstep/comm/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <numeric>

#include "lockstep/comm/announce_write.h"
#include "lockstep/comm/backend.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm {
namespace {

using fabric::Operation;
using fabric::OpKind;

// On which nothing runs.
bool is_alone(const Group& group) { return group.backend() == "none"; }

// The caller's current stream, where the tensor is on a device.
std::optional<c10::Stream> stream_of(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

// One call: what it is called, for messages, and what it has gathered for its operation.
class Call {
 public:
  Call(OpKind kind, const Group& group, const std::optional<milliseconds>& timeout, std::string tag)
      : group_(group) {
    operation_.kind = kind;
    operation_.timeout = timeout.value_or(group.timeout());
    operation_.tag = std::move(tag);
  }
  Operation* operator->() { return &operation_; }

  // Whose memory the operation gets: a device's, if both tensors are there and the group takes them
  // from there.
  void place(const at::Tensor& one, const at::Tensor& other) {
    const auto device_of = [this](const at::Tensor& tensor) {
      return tensor.defined() ? detail::impl_of(group_).device_for(tensor) : -1;
    };
    operation_.device = device_of(one) == device_of(other) ? device_of(one) : -1;
  }
  void place(const at::Tensor& tensor) { place(tensor, tensor); }

  [[noreturn]] void refuse(const std::string& rule) const {
    throw ConfigError(
        format("[{}] rank {}: {}", fabric::name_of(operation_.kind), group_.rank(), rule));
  }
  void check_rank(const char* what, int rank) const {
    if (rank < 0 || rank >= group_.size())
      refuse(format("{} is {}, must be at least 0 and below the group's size {}", what, rank,
                    group_.size()));
  }

  // A tensor that the operation reads; the one it uses is contiguous and in its place.
  void input(const at::Tensor& tensor) {
    check_tensor(tensor);
    memory_[0] = usable(tensor) ? tensor : stand_in(tensor.detach(), true);
    operation_.input = memory::bytes_of(memory_[0]);
  }
  // A tensor that it writes, and reads too if `keeps_values`.
  void output(const at::Tensor& tensor, bool keeps_values) {
    check_tensor(tensor);
    if (!is_alone(group_) &&
        (at::has_internal_overlap(tensor) == at::MemOverlap::Yes || tensor._is_zerotensor()))
      refuse("elements of the output share memory (it is expanded); clone() it");
    detail::announce_write(tensor);
    memory_[1] = tensor;
    if (!usable(tensor)) {
      target_ = tensor.detach();
      memory_[1] = stand_in(target_, keeps_values);
    }
    operation_.output = memory::bytes_of(memory_[1]);
  }
  // Reads and writes the same tensor. Where `keeps_result` is false this rank only reads it, and a
  // copy that stands in for it is not written back.
  void in_place(const at::Tensor& tensor, bool keeps_result = true) {
    if (keeps_result) {
      output(tensor, true);
    } else {
      check_tensor(tensor);
      memory_[1] = usable(tensor) ? tensor : stand_in(tensor.detach(), true);
      operation_.output = memory::bytes_of(memory_[1]);
    }
    operation_.input = operation_.output;
  }
  // Backends write the output while peers still read the input, so the two lie apart. `in_place` is
  // whether they are the one overlap that an operation allows.
  void check_apart(bool in_place = false) const {
    const auto *in = operation_.input.data(), *out = operation_.output.data();
    if (in_place || is_alone(group_) || operation_.input.empty() || operation_.output.empty())
      return;
    if (in < out + operation_.output.size() && out < in + operation_.input.size())
      refuse("input and output share memory; clone() one of them");
  }
  // Where block `rank` of a tensor of such blocks begins.
  template <class Byte>
  Byte* block(std::span<Byte> whole, const std::vector<int64_t>& counts, int rank) const {
    const auto before = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
    return whole.data() + static_cast<size_t>(before) * size_of(operation_.dtype);
  }

  // Explicit block sizes, or equal ones.
  std::vector<int64_t> blocks(const char* what, std::vector<int64_t> counts, int64_t total) const {
    const auto size = static_cast<size_t>(group_.size());
    if (counts.empty()) {
      if (total % group_.size() != 0) {
        refuse(format("{} has {} elements, must be divisible by group size {} (or give the counts)",
                      what, total, group_.size()));
      }
      return std::vector<int64_t>(size, total / group_.size());
    }
    if (counts.size() != size)
      refuse(format("{} block counts for a group of {}", counts.size(), size));
    for (const int64_t count : counts) {
      if (count < 0)
        refuse(format("block counts of {} are {}, none may be negative", what, join(counts)));
    }
    const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    if (sum != total)
      refuse(format("block counts of {} add up to {}, it has {} elements", what, sum, total));
    return counts;
  }
  void check_count(const char* what, int64_t actual, int64_t expected) const {
    if (actual != expected)
      refuse(format("{} has {} elements, must have {}", what, actual, expected));
  }
  void check_same_dtype(const at::Tensor& a, const at::Tensor& b) const {
    if (a.scalar_type() != b.scalar_type())
      refuse(format("input is {}, output is {}; they must be the same",
                    c10::toString(a.scalar_type()), c10::toString(b.scalar_type())));
  }
  void check_reduction() const { fabric::check_reducible(operation_.dtype, operation_.reduce); }

  Work start() {
    const auto& blocked = detail::impl_of(group_).membership().world->blocked;
    const BlockedTime time(blocked.get());  // small operations are done in the call
    if (target_.defined()) {
      // Any thread may do this, as if the caller did: after what its stream had been given, and
      // with what it may write. Under nccl the operation's own stream comes after both.
      const auto stream = operation_.device >= 0 ? std::nullopt : stream_of(target_);
      operation_.finish = [target = target_, source = memory_[1], stream] {
        const c10::InferenceMode inference(target.is_inference());
        const c10::AutoGradMode no_grad(false);
        c10::OptionalStreamGuard on_stream;
        if (stream) on_stream.reset_stream(*stream);
        target.copy_(source);
      };
    }
    const uint64_t record = detail::impl_of(group_).record(operation_);
    const bool on_device = operation_.device >= 0;
    operation_.record = record;
    auto pending = detail::impl_of(group_).submit(
        std::move(operation_),
        std::make_shared<std::array<at::Tensor, 3>>(std::array{memory_[0], memory_[1], target_}));
    if (!on_device && (!pending || pending->done())) flight::ended_in_call(record);
    return Work(std::move(pending), blocked, on_device ? 0 : record);
  }

 private:
  void check_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) refuse("the tensor is undefined");
    if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
      refuse(format("the tensor is on {}, must be on the CPU or a CUDA device",
                    tensor.device().str()));
    }
    operation_.dtype = memory::dtype_of(tensor, fabric::name_of(operation_.kind));
  }

  // A group of one copies on the device, or not at all.
  bool usable(const at::Tensor& tensor) const {
    // The memory of a negated view, and of zeros that are not stored, is not what the tensor holds.
    return is_alone(group_) ||
           ((tensor.device().is_cpu() || operation_.device >= 0) && tensor.is_contiguous() &&
            !tensor.is_neg() && !tensor._is_zerotensor());
  }
  // Contiguous; on the CPU, and page-locked where a device reads and writes it, unless the group
  // takes it from the device.
  at::Tensor stand_in(const at::Tensor& tensor, bool keeps_values) const {
    const c10::AutoGradMode no_grad(false);
    const auto options = tensor.options().memory_format(at::MemoryFormat::Contiguous);
    const at::Tensor copy = at::empty(
        tensor.sizes(), operation_.device >= 0
                            ? options
                            : options.device(at::kCPU).pinned_memory(tensor.device().is_cuda()));
    return keeps_values ? copy.copy_(tensor) : copy;
  }

  const Group& group_;
  Operation operation_;
  std::array<at::Tensor, 2> memory_;  // what the operation reads and writes
  at::Tensor target_;  // what was passed as output, where memory_[1] stands in for it
};

// For a group of one: the result is the input.
Work copy_alone(const at::Tensor& output, const at::Tensor& input) {
  const c10::AutoGradMode no_grad(false);
  output.detach().copy_(input.detach().reshape(output.sizes()));
  return {};
}

}  // namespace

Work all_reduce(const at::Tensor& tensor, const Group& group, ReduceOptions options) {
  Call call(OpKind::all_reduce, group, options.timeout, std::move(options.tag));
  call.place(tensor);
  call.in_place(tensor);
  call->reduce = options.op;
  call->count = tensor.numel();
  call.check_reduction();
  return is_alone(group) ? Work() : call.start();
}

Work reduce(const at::Tensor& tensor, const Group& group, RootedReduceOptions options) {
  Call call(OpKind::reduce, group, options.timeout, std::move(options.tag));
  call.check_rank("root", options.root);
  call.place(tensor);
  call.in_place(tensor, group.rank() == options.root);
  call->reduce = options.op;
  call->root = options.root;
  call->count = tensor.numel();
  call.check_reduction();
  return is_alone(group) ? Work() : call.start();
}

Work broadcast(const at::Tensor& tensor, const Group& group, RootedOptions options) {
  Call call(OpKind::broadcast, group, options.timeout, std::move(options.tag));
  call.check_rank("root", options.root);
  call.place(tensor);
  call.in_place(tensor, group.rank() != options.root);
  if (group.rank() != options.root) call->input = {};
  call->root = options.root;
  call->count = tensor.numel();
  return is_alone(group) ? Work() : call.start();
}

Work all_gather(const at::Tensor& output, const at::Tensor& input, const Group& group,
                GatherOptions options) {
  Call call(OpKind::all_gather, group, options.timeout, std::move(options.tag));
  call.place(input, output);
  call.input(input);
  call.output(output, false);
  call.check_same_dtype(input, output);
  call->recv_counts = call.blocks("output", std::move(options.counts), output.numel());
  call.check_count("input", input.numel(), call->recv_counts[static_cast<size_t>(group.rank())]);
  call->count = output.numel();
  call.check_apart(call->input.data() == call.block(call->output, call->recv_counts, group.rank()));
  return is_alone(group) ? copy_alone(output, input) : call.start();
}

Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Group& group,
                    ReduceScatterOptions options) {
  Call call(OpKind::reduce_scatter, group, options.timeout, std::move(options.tag));
  call.place(input, output);
  call.input(input);
  call.output(output, false);
  call.check_same_dtype(input, output);
  call->reduce = options.op;
  call->send_counts = call.blocks("input", std::move(options.counts), input.numel());
  call.check_count("output", output.numel(), call->send_counts[static_cast<size_t>(group.rank())]);
  call->count = input.numel();
  call.check_reduction();
  call.check_apart(call->output.data() == call.block(call->input, call->send_counts, group.rank()));
  return is_alone(group) ? copy_alone(output, input) : call.start();
}

Work all_to_all(const at::Tensor& output, const at::Tensor& input, const Group& group,
                AllToAllOptions options) {
  Call call(OpKind::all_to_all, group, options.timeout, std::move(options.tag));
  call.place(input, output);
  call.input(input);
  call.output(output, false);
  call.check_same_dtype(input, output);
  call->send_counts = call.blocks("input", std::move(options.input_counts), input.numel());
  call->recv_counts = call.blocks("output", std::move(options.output_counts), output.numel());
  call.check_apart();
  return is_alone(group) ? copy_alone(output, input) : call.start();
}

Work gather(const at::Tensor& output, const at::Tensor& input, const Group& group,
            RootedOptions options) {
  Call call(OpKind::gather, group, options.timeout, std::move(options.tag));
  call.check_rank("root", options.root);
  call.place(input, group.rank() == options.root ? output : input);
  call.input(input);
  call->root = options.root;
  call->count = input.numel();
  if (group.rank() == options.root) {
    call.output(output, false);
    call.check_same_dtype(input, output);
    call.check_count("output", output.numel(), input.numel() * group.size());
    call.check_apart(call->input.data() == call->output.data() + options.root * call->input.size());
  }
  return is_alone(group) ? copy_alone(output, input) : call.start();
}

Work scatter(const at::Tensor& output, const at::Tensor& input, const Group& group,
             RootedOptions options) {
  Call call(OpKind::scatter, group, options.timeout, std::move(options.tag));
  call.check_rank("root", options.root);
  call.place(output, group.rank() == options.root ? input : output);
  if (group.rank() == options.root) {
    call.input(input);
    call.check_same_dtype(input, output);
    call.check_count("input", input.numel(), output.numel() * group.size());
  }
  call.output(output, false);
  if (group.rank() == options.root)
    call.check_apart(call->output.data() ==
                     call->input.data() + options.root * call->output.size());
  call->root = options.root;
  call->count = output.numel();
  return is_alone(group) ? copy_alone(output, input) : call.start();
}

Work send(const at::Tensor& tensor, int to, const Group& group, CollectiveOptions options) {
  Call call(OpKind::send, group, options.timeout, std::move(options.tag));
  call.check_rank("the receiver", to);
  if (to == group.rank()) call.refuse("a rank cannot send to itself");
  call.place(tensor);
  call.input(tensor);
  call->root = to;
  call->count = tensor.numel();
  return call.start();
}

Work recv(const at::Tensor& tensor, int from, const Group& group, CollectiveOptions options) {
  Call call(OpKind::recv, group, options.timeout, std::move(options.tag));
  call.check_rank("the sender", from);
  if (from == group.rank()) call.refuse("a rank cannot receive from itself");
  call.place(tensor);
  call.output(tensor, false);
  call->root = from;
  call->count = tensor.numel();
  return call.start();
}

Work barrier(const Group& group, CollectiveOptions options) {
  Call call(OpKind::barrier, group, options.timeout, std::move(options.tag));
  return is_alone(group) ? Work() : call.start();
}

}  // namespace lockstep::comm
