// SPDX-License-Identifier: Apache-2.0
// What happens to an operator that is given a parameter, a shard or a gradient of a sharded model.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/intercept/dispatch.h"
#include "lockstep/parallel/intercept/tag.h"
#include "lockstep/parallel/shard/engine.h"

namespace lockstep::parallel::detail {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Calls `visit` for every tensor in an argument.
template <class Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {  // of optional tensors
    for (const IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The result shows the memory of an argument and nothing of it is read, or if it is (reshape may
// copy), then by operators inside, which are looked at in turn.
bool only_views(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return std::any_of(results.begin(), results.end(),
                     [](const c10::Argument& result) {
                       return result.alias_info() != nullptr && !result.alias_info()->isWrite();
                     }) &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), writes);
}

bool is_one_of(const std::string& name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What model->to() is made of.
bool is_conversion(const std::string& name) {
  return is_one_of(name, {"aten::to", "aten::_to_copy"});
}

// What set_data() asks first.
bool is_replacement(const std::string& name) {
  return name == "aten::_has_compatible_shallow_copy_type";
}

// In-place operators that leave the values alone.
bool changes_no_values(const std::string& name) {
  return is_one_of(name, {"aten::requires_grad_", "aten::detach_", "aten::retain_grad",
                          "aten::_backward", "aten::rename_"});
}

// Operators that look at sizes and types only.
bool reads_no_values(const std::string& name) {
  return is_one_of(
      name, {"aten::_has_compatible_shallow_copy_type", "aten::is_same_size", "aten::size",
             "aten::sym_size", "aten::stride", "aten::_version", "aten::is_leaf", "aten::output_nr",
             "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::rand_like",
             "aten::randn_like", "aten::full_like", "aten::new_empty", "aten::new_zeros",
             "aten::new_ones", "aten::new_full"});
}

// What of an operator's arguments is ours.
struct Found {
  struct Used {
    std::shared_ptr<ShardEngine> engine;
    std::vector<size_t> flats = {};
  };
  std::vector<Used> models = {};  // whose parameters they are; hardly ever more than one
  at::ScalarType cast_to = at::ScalarType::Undefined;
};

[[noreturn]] void refuse_gone(const Tag& tag, const at::Tensor& view) {
  throw Error(format(
      "[fully_shard] parameter {} is used, but the sharded model that had its values is gone; "
      "keep what fully_shard returned as long as the model",
      tag.name_of(view)));
}

void look_at_gradient(const Tag& tag, const at::Tensor& view, const std::string& name) {
  if (is_one_of(name, {"aten::detach", "aten::detach_", "aten::zero_"})) return;
  if (tag.kind == Tag::Kind::unreduced) {
    throw Error(
        format("[fully_shard] the gradient of the shard of parameter {} is used by {}, but the "
               "last backward was under no_sync() and reduced nothing; run one without it first",
               tag.name_of(view), name));
  }
  throw Error(
      format("[fully_shard] the gradient of parameter {} is used by {}, but it has gone into the "
             "shards; give the optimizer the parameters() of what fully_shard returned, not the "
             "model's, and clip with its clip_grad_norm_()",
             tag.name_of(view), name));
}

void look_at_parameter(const Tag& tag, const at::Tensor& view, bool is_write,
                       const std::string& name, Found& found) {
  const auto engine = tag.engine.lock();
  if (!engine) refuse_gone(tag, view);
  if (is_write && !engine->window().is_summoned_to_write() && !changes_no_values(name)) {
    throw Error(
        format("[fully_shard] {} writes into parameter {}, of which this is a copy that will be "
               "dropped; give an optimizer the parameters() of what fully_shard returned; to write "
               "or load values yourself, do it under summon({{.write_back = true}})",
               name, tag.name_of(view)));
  }
  auto used = std::find_if(found.models.begin(), found.models.end(),
                           [&](const Found::Used& each) { return each.engine == engine; });
  if (used == found.models.end()) used = found.models.insert(used, {.engine = engine});
  if (std::find(used->flats.begin(), used->flats.end(), tag.flat) == used->flats.end())
    used->flats.push_back(tag.flat);
  const FlatPlan& plan = engine->flats()[tag.flat]->plan();
  if (plan.casts_inputs()) found.cast_to = plan.compute_dtype;
  if (is_conversion(name)) engine->on_replacement(tag, view);
}

bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && at::isFloatingType(tensor.scalar_type()) &&
         tensor.scalar_type() != dtype && find_tag(tensor) == nullptr;
}

// Parameters are computed in a type that the model's inputs need not have.
void cast_inputs(IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    if (needs_cast(value.toTensor(), dtype)) value = value.toTensor().to(dtype);
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    if (std::none_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& each) { return needs_cast(each, dtype); }))
      return;
    for (at::Tensor& tensor : tensors) {
      if (needs_cast(tensor, dtype)) tensor = tensor.to(dtype);
    }
    value = IValue(std::move(tensors));
  }
}

}  // namespace

void on_sharded_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const bool views = only_views(schema) || reads_no_values(schema.name());
  Found found;
  bool drops = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_write = writes(arguments[i]);
    visit_tensors((*stack)[first + i], [&](const at::Tensor& tensor) {
      const Tag* const tag = find_tag(tensor);
      if (tag == nullptr) return;
      switch (tag->kind) {
        case Tag::Kind::gradient:
        case Tag::Kind::unreduced:
          look_at_gradient(*tag, tensor, schema.name());
          if (schema.name() == "aten::zero_") {
            drops = true;
            if (const auto engine = tag->engine.lock())
              engine->flats()[tag->flat]->gradients->on_zero(*tag, tensor);
          }
          break;
        case Tag::Kind::packed:
          if (const auto engine = tag->engine.lock(); engine && !views) {
            OffloadedGradients& gradients = *engine->flats()[tag->flat]->offloaded;
            // What optim::announce_done() says.
            const bool is_done = tensor.numel() == 0 && schema.name() == "aten::any";
            is_done ? gradients.settle() : gradients.open();
          }
          break;
        case Tag::Kind::shard:
          if (const auto engine = tag->engine.lock(); engine && !views) {
            const FlatShard& shard = engine->flats()[tag->flat]->shard;
            const bool changes = is_write && !changes_no_values(schema.name());
            shard.wait_updated();
            if (changes) {
              engine->window().before_write(*tag, tensor);
              engine->gradients().before_step();
            }
            shard.open(changes);
          }
          break;
        case Tag::Kind::parameter:
          if (!views || is_conversion(schema.name())) {
            look_at_parameter(*tag, tensor, is_write, schema.name(), found);
          } else if (is_replacement(schema.name())) {
            if (const auto engine = tag->engine.lock()) engine->on_replacement(*tag, tensor);
          }
          break;
      }
    });
  }
  if (drops) return;  // its argument is the result
  if (views) {
    // Inner operators are intercepted again, so this one reads nothing.
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kShardKey),
                       stack);
    return;
  }
  const bool in_backward = torch::autograd::get_current_graph_task_exec_info() != nullptr;
  if (found.cast_to != at::ScalarType::Undefined && (!in_backward || at::GradMode::is_enabled())) {
    for (size_t i = first; i < stack->size(); ++i) cast_inputs((*stack)[i], found.cast_to);
  }
  for (const auto& [engine, flats] : found.models) engine->before_operator(flats);
  {
    const c10::impl::ExcludeDispatchKeyGuard pass_on(kShardKey);
    op.callBoxed(stack);
  }
  for (const auto& [engine, flats] : found.models) engine->after_operator();
}

}  // namespace lockstep::parallel::detail
