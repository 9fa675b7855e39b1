// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tensor/tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/tensor/sharing.h"

namespace lockstep::parallel {

using layout::TensorSplit;
using layout::TensorStyle;

struct TensorParallel::State {
  State(comm::Group group, layout::TensorPlan plan, TensorParallelOptions options)
      : group(std::move(group)),
        plan(std::move(plan)),
        options(options),
        used(this->plan.size(), false) {}

  comm::Group group;
  layout::TensorPlan plan;
  TensorParallelOptions options;
  std::vector<bool> used;
  std::vector<optim::NamedParameter> parameters = {};
  std::map<std::string, TensorSplit> splits = {};  // of those that are not whole
  // Whole parameters whose gradients are of this rank's part of the sequence or of the heads.
  std::set<std::string> partial = {};
  std::set<const c10::TensorImpl*> multiplied = {};  // of `parameters`: those that are partial
};

namespace {

// What apply() is going to do to one module.
struct Change {
  std::string path;
  torch::nn::Module* module;
  const layout::TensorRule* rule;
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    TensorSplit split;
  };
  std::vector<Parameter> parameters = {};
};

std::string_view name_of(TensorStyle style) {
  switch (style) {
    case TensorStyle::column:
      return "column";
    case TensorStyle::row:
      return "row";
    case TensorStyle::vocab:
      return "vocab";
    case TensorStyle::sequence:
      return "sequence";
    case TensorStyle::partial:
      return "partial";
  }
  return "";
}

void require_support(const Change& change) {
  const auto* layer = dynamic_cast<const nn::SharedLayer*>(change.module);
  const TensorStyle style = change.rule->style;
  // Layers that know nothing of it, such as norms, may see a part of the sequence or of the heads.
  const bool whole = style == TensorStyle::sequence || style == TensorStyle::partial;
  if (layer == nullptr ? whole : layer->supports(style)) return;
  throw ConfigError(
      format("[tensor] '{}' is a {}, which cannot have style {}; column and row are for "
             "lockstep::nn::Linear, vocab for lockstep::nn::Embedding and Linear",
             change.path, change.module->name(), name_of(style)));
}

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

// It would be of a part of the sequence, or of all of it: that could not be told.
void require_no_parameters(const std::string& path, const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!item.value().defined() || !item.value().requires_grad()) continue;
    throw ConfigError(
        format("[tensor] no rule names '{}', which has parameter '{}'; with sequence parallelism "
               "every module with parameters must be named, one that is whole with style sequence",
               path, item.key()));
  }
}

at::Tensor part_of(const at::Tensor& whole, const TensorSplit& split) {
  std::vector<at::Tensor> parts;
  for (const layout::Range& range : split.ranges)
    parts.push_back(whole.narrow(split.dim, range.begin, range.size()));
  return parts.size() == 1 ? parts[0].clone(at::MemoryFormat::Contiguous)
                           : at::cat(parts, split.dim);
}

at::Tensor narrowed(at::Tensor tensor, const layout::Box& box) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const layout::Range range = box.ranges[static_cast<size_t>(dim)];
    tensor = tensor.narrow(dim, range.begin, range.size());
  }
  return tensor;
}

// Sums that are made as averages of multiples can be made again: the average of what is the same on
// all ranks changes nothing, whatever else was added, scaled or zeroed since.
void multiply_gradient(const at::Tensor& parameter, int factor) {
  const bool trained = parameter.requires_grad();  // a frozen one may be trained later
  if (!trained && !parameter.is_floating_point()) return;
  parameter.set_requires_grad(true);
  parameter.register_hook([factor](const at::Tensor& gradient) {
    return gradient.defined() ? gradient.mul(factor) : gradient;  // some versions call it with none
  });
  parameter.set_requires_grad(trained);
}

void broadcast_all(torch::nn::Module& model, const comm::Group& group) {
  const auto send = [&](const auto& items) {
    for (const auto& item : items) {
      if (item.value().defined())
        comm::broadcast(item.value().detach(), group, {.tag = item.key()}).wait();
    }
  };
  send(model.named_parameters());
  send(model.named_buffers());
}

}  // namespace

TensorParallel::TensorParallel(comm::Group group, layout::TensorPlan plan,
                               TensorParallelOptions options)
    : state_(std::make_shared<State>(std::move(group), std::move(plan), options)) {}

void TensorParallel::apply(torch::nn::Module& model) {
  State& state = *state_;
  const comm::Group& group = state.group;
  std::vector<std::string> paths;
  std::vector<torch::nn::Module*> modules;
  model.apply([&](const std::string& path, torch::nn::Module& module) {
    paths.push_back(path);
    modules.push_back(&module);
  });
  std::vector<Change> changes;
  std::map<const c10::TensorImpl*, std::string> planned;  // whose module has several names
  const std::vector<int> rules = layout::match(state.plan, paths);
  for (size_t i = 0; i < paths.size(); ++i) {
    if (rules[i] < 0) {
      if (state.options.sequence_parallel && group.size() > 1)
        require_no_parameters(paths[i], *modules[i]);
      continue;
    }
    const auto rule = static_cast<size_t>(rules[i]);
    state.used[rule] = true;
    Change change{paths[i], modules[i], &state.plan[rule]};
    require_support(change);
    for (const auto& item : modules[i]->named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const auto [other, is_new] =
          planned.emplace(item.value().unsafeGetTensorImpl(), joined(paths[i], item.key()));
      if (!is_new) {
        throw ConfigError(format("[tensor] '{}' and '{}' are one parameter, must be named once",
                                 other->second, joined(paths[i], item.key())));
      }
      change.parameters.push_back(
          {item.key(), item.value(),
           layout::split_of(*change.rule, paths[i], item.key(), item.value().sizes().vec(),
                            group.size(), group.rank())});
    }
    changes.push_back(std::move(change));
  }
  if (group.size() > 1) {
    const at::NoGradGuard no_grad;
    if (state.options.broadcast) broadcast_all(model, group);
    for (const Change& change : changes) {
      const TensorStyle style = change.rule->style;
      nn::Sharing sharing{group, style, state.options.sequence_parallel};
      for (const auto& [name, tensor, split] : change.parameters) {
        const std::string full = joined(change.path, name);
        if (split.is_whole()) {
          if (!state.options.sequence_parallel && style != TensorStyle::partial) continue;
          state.partial.insert(full);
          if (!state.multiplied.insert(tensor.unsafeGetTensorImpl()).second) continue;
          multiply_gradient(tensor, group.size());
          if (!tensor.requires_grad()) state.parameters.push_back({full, tensor});  // yet
          continue;
        }
        if (style == TensorStyle::vocab) sharing.rows = split.ranges[0];
        tensor.unsafeGetTensorImpl()->shallow_copy_from(part_of(tensor, split).getIntrusivePtr());
        state.splits.emplace(full, split);
      }
      if (auto* layer = dynamic_cast<nn::SharedLayer*>(change.module)) layer->sharing = sharing;
    }
  }
  for (auto& parameter : optim::named_parameters(model))
    state.parameters.push_back(std::move(parameter));
}

const std::vector<bool>& TensorParallel::used() const { return state_->used; }

void TensorParallel::reduce_gradients() const { reduce_gradients(state_->parameters); }

void TensorParallel::reduce_gradients(std::span<const optim::NamedParameter> parameters) const {
  if (state_->partial.empty()) return;
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;  // for all but a few models one
  for (const auto& [name, tensor, parts] : parameters) {
    if (tensor.grad().defined() && state_->partial.contains(name))
      by_type[tensor.grad().scalar_type()].push_back(tensor.grad());
  }
  for (const auto& [type, gradients] : by_type) {
    std::vector<at::Tensor> lines;
    std::vector<int64_t> sizes;
    for (const at::Tensor& gradient : gradients) {
      lines.push_back(gradient.reshape({-1}));
      sizes.push_back(gradient.numel());
    }
    const at::Tensor line = at::cat(lines);
    comm::all_reduce(line, state_->group,
                     {.op = comm::ReduceOp::avg, .tag = "gradients of whole parameters"})
        .wait();
    const auto sums = line.split_with_sizes(sizes);
    for (size_t i = 0; i < sums.size(); ++i) gradients[i].copy_(sums[i].view(gradients[i].sizes()));
  }
}

std::vector<optim::NamedParameter> TensorParallel::counted(
    std::vector<optim::NamedParameter> parameters) const {
  if (state_->group.rank() > 0) {
    std::erase_if(parameters, [&](const optim::NamedParameter& parameter) {
      return !state_->splits.contains(parameter.name);
    });
  }
  return parameters;
}

std::vector<optim::NamedParameter> TensorParallel::placed(
    std::vector<optim::NamedParameter> parameters) const {
  for (optim::NamedParameter& parameter : parameters) {
    auto& [name, tensor, parts] = parameter;
    if (parts.empty() && state_->splits.contains(name))
      parts = {{layout::Placement::whole(name, tensor.sizes().vec())}};
    std::vector<optim::PlacedPart> all;
    for (const optim::PlacedPart& part : parts) add_pieces(part, all);
    parts = std::move(all);
  }
  return parameters;
}

// A piece that is no run of the rank's elements is cut into rows, which are.
void TensorParallel::add_pieces(const optim::PlacedPart& part,
                                std::vector<optim::PlacedPart>& all) const {
  const layout::Box& held = part.placement.slice;
  const TensorSplit split = this->split(part.placement.name, part.placement.global_shape);
  for (const auto& [local, global] : split.pieces(held)) {
    const int64_t elements = local.numel();
    const bool is_run = split.is_whole() || split.dim == 0 || local == held;
    const int64_t most = is_run ? elements : elements / local.ranges[0].size();
    const auto locals = layout::pieces(local, most), globals = layout::pieces(global, most);
    for (size_t i = 0; i < locals.size(); ++i) {
      optim::PlacedPart piece = part;
      piece.placement.global_shape = split.global_shape;
      piece.placement.slice = globals[i];
      layout::for_each_run(locals[i], held, locals[i], [&](const layout::ContiguousRun& run) {
        piece.begin = part.begin + run.from;
      });
      all.push_back(std::move(piece));
    }
  }
}

double TensorParallel::grad_norm(optim::NormOptions options) const {
  options.group = state_->group;
  return optim::grad_norm(optim::tensors_of(counted(state_->parameters)), options);
}

double TensorParallel::clip_grad_norm_(double max_norm, optim::NormOptions options) const {
  const double norm = grad_norm(std::move(options));
  optim::clip_grad_with_norm(optim::tensors_of(state_->parameters), max_norm, norm);
  return norm;
}

TensorSplit TensorParallel::split(const std::string& parameter, const layout::Shape& local) const {
  const auto found = state_->splits.find(parameter);
  return found == state_->splits.end() ? TensorSplit{local} : found->second;
}

nn::InitializeRule TensorParallel::for_parts(nn::InitializeRule rule) const {
  if (!rule || state_->group.size() == 1) return rule;
  return [*this, rule](const at::Tensor& parameter, const nn::init::Source& source) {
    check(!source.slice, "initial values are given to a rank's whole shard");
    const layout::Shape local = parameter.sizes().vec();
    const TensorSplit split = this->split(source.name, local);
    if (split.is_whole()) return rule(parameter, source);
    bool dealt_with = true;
    for (const auto& piece : split.pieces(layout::Box::whole(local))) {
      dealt_with = rule(narrowed(parameter, piece.local),
                        {source.seed, source.name, nn::Slice{split.global_shape, piece.global}}) &&
                   dealt_with;
    }
    return dealt_with;
  };
}

const comm::Group& TensorParallel::group() const { return state_->group; }

const TensorParallelOptions& TensorParallel::options() const { return state_->options; }

TensorParallel tensor_parallel(torch::nn::Module& model, const comm::Group& group,
                               const layout::TensorPlan& plan, TensorParallelOptions options) {
  TensorParallel shared(group, plan, options);
  shared.apply(model);
  layout::require_all_used(plan, shared.used());
  return shared;
}

}  // namespace lockstep::parallel
