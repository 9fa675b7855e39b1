// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/intercept/operator_facts.h"

#include <map>
#include <set>
#include <string_view>

#include "lockstep/parallel/intercept/recorded_op.h"

namespace lockstep::parallel::detail {
namespace {

using Names = std::set<std::string_view>;

// Null where the operator has no argument of this name.
const c10::IValue* find(const c10::OperatorHandle& op, const Arguments& arguments,
                        const char* name) {
  const auto index = op.schema().argumentIndexWithName(name);
  return index ? &arguments.at(static_cast<size_t>(*index)) : nullptr;
}

// at::normal takes a mean or a deviation for each element too.
Draw make_draw(Draw::Kind kind, const c10::IValue* first, const c10::IValue* second) {
  if ((first && !first->isDouble()) || (second && !second->isDouble())) return {};
  return {kind, first ? first->toDouble() : 0, second ? second->toDouble() : 1};
}

}  // namespace

std::string name_of(const c10::OperatorHandle& op) { return op.operator_name().name; }

std::optional<Draw> draw_of(const c10::OperatorHandle& op, const Arguments& arguments) {
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded) ||
                      op.schema().argumentIndexWithName("generator").has_value();
  if (!random) return std::nullopt;
  static const Names uniform{"aten::rand", "aten::rand_like", "aten::uniform_"};
  static const Names normal{"aten::normal", "aten::normal_", "aten::randn", "aten::randn_like"};
  const std::string name = name_of(op);
  if (uniform.contains(name)) {
    return make_draw(Draw::Kind::uniform, find(op, arguments, "from"), find(op, arguments, "to"));
  }
  if (normal.contains(name)) {
    return make_draw(Draw::Kind::normal, find(op, arguments, "mean"), find(op, arguments, "std"));
  }
  return Draw{};
}

bool is_written(const c10::OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool fills_storage(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  static const Names names{"aten::copy_", "aten::fill_", "aten::normal_", "aten::uniform_",
                           "aten::zero_"};
  return names.contains(name_of(op)) && tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool needs_values(const c10::OperatorHandle& op) {
  static const Names names{"aten::_local_scalar_dense", "aten::allclose", "aten::equal",
                           "aten::is_nonzero", "aten::item"};
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
         names.contains(name_of(op));
}

bool is_factory(const c10::OperatorHandle& op, const Arguments& arguments) {
  if (!op.schema().argumentIndexWithName("device")) return false;
  if (name_of(op).starts_with("aten::new_")) return true;
  bool has_tensors = false;
  for_each_tensor(arguments, [&](const at::Tensor&) { has_tensors = true; });
  return !has_tensors;
}

bool is_uninitialised(const c10::OperatorHandle& op) {
  const std::string name = name_of(op);
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

std::optional<c10::Device> device_of(const c10::OperatorHandle& op, const Arguments& arguments) {
  const c10::IValue* device = find(op, arguments, "device");
  if (device == nullptr || !device->isDevice()) return std::nullopt;
  return device->toDevice();
}

void set_device(const c10::OperatorHandle& op, Arguments& arguments, c10::Device device) {
  if (const auto index = op.schema().argumentIndexWithName("device")) {
    arguments.at(static_cast<size_t>(*index)) = device;
  }
  // Only memory of the CPU can be pinned.
  if (const auto index = op.schema().argumentIndexWithName("pin_memory")) {
    arguments.at(static_cast<size_t>(*index)) = c10::IValue();
  }
}

}  // namespace lockstep::parallel::detail
