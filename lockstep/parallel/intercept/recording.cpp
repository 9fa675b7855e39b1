// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/recording.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/infer_shapes.h"
#include "lockstep/parallel/intercept/replay.h"

namespace lockstep::parallel::detail {
namespace {

// Constants of a constructor are mostly smaller than this, and weights larger. Vectors are always
// real: at::tensor() writes to one by pointer.
constexpr size_t kRealBytes = 64 * 1024;

Arguments arguments_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return {stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end()};
}

bool any_meta(const Arguments& arguments) {
  bool any = false;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) { any = any || tensor.is_meta(); });
  return any;
}

bool is_large(const torch::jit::Stack& outlines) {
  bool any = false;
  for_each_tensor(outlines, [&](const at::Tensor& tensor) {
    any = any || (tensor.dim() != 1 && tensor.nbytes() > kRealBytes);
  });
  return any;
}

// Memory whose values are not known must not pass for memory whose values are.
void spoil(const at::Tensor& tensor) {
  if (tensor.is_meta() || !tensor.is_floating_point() || tensor.nbytes() > kRealBytes) return;
  const at::NoGradGuard no_grad;
  tensor.fill_(std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

void Recording::call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments = arguments_of(op, *stack);
  bool deferred = false;
  for_each_tensor(arguments, [&](const at::Tensor& t) { deferred = deferred || knows(t); });
  const auto draw = draw_of(op, arguments);
  if (deferred && !draw && needs_values(op)) {
    throw ConfigError(
        format("[deferred] operator {} needs the values of a tensor that has none while the model "
               "is built; compute it from constants, or outside deferred()",
               name_of(op)));
  }
  if (draw || (deferred && any_meta(arguments))) return note(op, stack, /*run=*/false);
  if (deferred) return note(op, stack, /*run=*/true);
  if (is_factory(op, arguments)) {
    const auto device = device_of(op, arguments);
    const bool meta = device && device->is_meta();
    if (meta || is_large(outline(op, arguments))) return note(op, stack, /*run=*/false);
  }
  op.callBoxed(stack);
  if (is_uninitialised(op)) for_tensors(stack->back(), [](const at::Tensor& t) { t.zero_(); });
}

void Recording::note(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool run) {
  const Arguments arguments = arguments_of(op, *stack);
  torch::jit::drop(*stack, arguments.size());
  Step step{.op = op, .draw = draw_of(op, arguments)};
  auto beginnings = take_arguments(step, arguments);
  torch::jit::Stack results;
  if (run) {
    results = arguments;
    op.callBoxed(&results);
  } else {
    results = outline(op, arguments);
  }
  if (step.draw) for_each_tensor(results, spoil);
  take_results(step, arguments, results);
  for (Step& beginning : beginnings) add(std::move(beginning));
  if (!step.writes.empty()) add(std::move(step));
  stack->insert(stack->end(), results.begin(), results.end());
}

// Notes arguments down as they are before the call. Returns what else must be recorded first.
std::vector<Step> Recording::take_arguments(Step& step, const Arguments& arguments) const {
  const at::NoGradGuard no_grad;
  std::set<StorageKey> read, written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& storages = is_written(*step.op, i) ? written : read;
    for_tensors(arguments[i], [&](const at::Tensor& t) { storages.insert(storage_of(t)); });
  }
  std::vector<Step> beginnings;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    const StorageKey storage = storage_of(tensor);
    if (storage == nullptr || !written.contains(storage)) return;
    const bool whole = fills_storage(*step.op, tensor) && !read.contains(storage);
    step.writes.push_back({storage, whole});
    if (!whole) read.insert(storage);
    if (whole || deferred_.contains(storage)) return;
    const at::Tensor bytes = bytes_of(tensor);
    beginnings.push_back(
        {.arguments = {bytes.clone()}, .results = {bytes}, .writes = {{storage, true}}});
  });
  step.arguments = with_tensors(arguments, [&](const at::Tensor& tensor) {
    if (knows(tensor) || written.contains(storage_of(tensor))) return tensor.detach();
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.detach().clone();
  });
  step.reads.assign(read.begin(), read.end());
  return beginnings;
}

void Recording::take_results(Step& step, const Arguments& arguments,
                             const torch::jit::Stack& results) {
  const at::NoGradGuard no_grad;
  std::set<StorageKey> before;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) { before.insert(storage_of(tensor)); });
  for_each_tensor(results, [&](const at::Tensor& result) {
    const StorageKey storage = storage_of(result);
    if (storage == nullptr) {
      throw ConfigError(
          format("[deferred] operator {} makes a tensor that is not dense, which is not supported",
                 name_of(*step.op)));
    }
    if (!before.contains(storage)) step.writes.push_back({storage, true});
    step.results.push_back(result.detach());
    seen_.emplace_back(result.getIntrusivePtr());
  });
}

void Recording::add(Step step) {
  for (const Step::Write& write : step.writes) {
    deferred_.insert(write.storage);
    auto& writers = writers_[write.storage];
    if (writers.empty() || writers.back() != steps_.size()) writers.push_back(steps_.size());
  }
  steps_.push_back(std::move(step));
}

void Recording::finish(const std::vector<NamedTensor>& registered) {
  std::set<const c10::TensorImpl*> listed;
  const auto own = [&](const NamedTensor& named) {
    if (!knows(named.tensor)) return;
    listed.insert(named.tensor.unsafeGetTensorImpl());
    const StorageKey storage = storage_of(named.tensor);
    if (!names_.emplace(storage, named.name).second) return;
    int draws = 0;
    for (const size_t index : steps_to(storage)) {
      Step& step = steps_[index];
      if (!step.draw || !step.owner.empty()) continue;
      step.owner = named.name;
      step.number = ++draws;
    }
  };
  for (const NamedTensor& named : registered) own(named);
  for (const WeakTensor& weak : seen_) {
    const at::Tensor tensor(weak.lock());
    if (!tensor.defined() || !knows(tensor)) continue;
    if (listed.contains(tensor.unsafeGetTensorImpl())) continue;
    unregistered_.push_back({format("unregistered.{}", unregistered_.size()), tensor});
    own(unregistered_.back());
  }
  seen_.clear();
}

// Backwards from the last one that wrote to the storage, as far as what was there before matters.
std::set<size_t> Recording::steps_to(StorageKey storage) const {
  struct Wanted {
    StorageKey storage;
    size_t before;  // as it was when this step came
  };
  std::set<size_t> found;
  std::vector<Wanted> wanted{{storage, steps_.size()}};
  while (!wanted.empty()) {
    const Wanted next = wanted.back();
    wanted.pop_back();
    const auto writers = writers_.find(next.storage);
    if (writers == writers_.end()) continue;
    const auto& indices = writers->second;
    for (auto end = std::ranges::lower_bound(indices, next.before); end != indices.begin();) {
      const size_t index = *--end;
      if (!found.insert(index).second) break;  // then what it depends on is found, or wanted
      const Step& step = steps_[index];
      for (const StorageKey read : step.reads) {
        if (read != next.storage) wanted.push_back({read, index});
      }
      const bool whole = std::ranges::any_of(step.writes, [&](const Step::Write& write) {
        return write.storage == next.storage && write.whole;
      });
      if (whole) break;
    }
  }
  return found;
}

at::Tensor Recording::value(const at::Tensor& tensor, const std::string& name, uint64_t seed,
                            c10::Device device) const {
  check(knows(tensor), "a recording is asked for a tensor that it knows");
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard exclude(kDispatchKey);
  const StorageKey storage = storage_of(tensor);
  const auto registered = names_.find(storage);
  Replay replay(deferred_, device);
  int unowned = 0;  // draws that lead to nothing that the model holds
  for (const size_t index : steps_to(storage)) {
    const Step& step = steps_[index];
    if (!step.draw) {
      replay.run(step);
      continue;
    }
    const bool own = registered != names_.end() && step.owner == registered->second;
    std::string source = own || step.owner.empty() ? name : step.owner;
    const int number = step.owner.empty() ? ++unowned : step.number;
    if (number > 1) source += format("#{}", number);
    if (step.draw->kind == Draw::Kind::other) {
      throw ConfigError(
          format("[deferred] '{}' depends on random operator {}, must be drawn by uniform or "
                 "normal operators, or dealt with by a rule",
                 name, name_of(*step.op)));
    }
    replay.draw(step, {.seed = seed, .name = source});
  }
  return replay.real(tensor);
}

void give_memory(const at::Tensor& tensor, const at::Tensor& real) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(real.getIntrusivePtr());
}

}  // namespace lockstep::parallel::detail
