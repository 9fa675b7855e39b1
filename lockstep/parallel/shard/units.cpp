// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/shard/units.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

using torch::nn::Module;

class Planner {
 public:
  Planner(const UnitPolicy& policy, const KnownUnits& known) : policy_(policy), known_(known) {}

  // Gives the modules below their units, and returns the parameters that are left for those above.
  std::vector<optim::NamedParameter> walk(Module& module, const std::string& path) {
    if (!visited_.insert(&module).second) return {};
    if (const auto known = known_.find(&module); known != known_.end())
      return take_known(module, path, known->second);
    const std::string prefix = path.empty() ? "" : path + ".";
    std::vector<optim::NamedParameter> left;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      if (tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second)
        left.push_back({prefix + item.key(), tensor});
    }
    for (const auto& child : module.named_children()) {
      for (auto& parameter : walk(*child.value(), prefix + child.key()))
        left.push_back(std::move(parameter));
    }
    if (!path.empty() && !left.empty() && is_unit(path, module, left)) {
      units_.push_back({path, std::move(left), path});
      return {};
    }
    return left;
  }

  std::vector<UnitPlan> take(std::vector<optim::NamedParameter> left) {
    if (!left.empty()) {
      const bool taken = std::any_of(units_.begin(), units_.end(),
                                     [](const UnitPlan& unit) { return unit.name == "model"; });
      units_.push_back({taken ? "model itself" : "model", std::move(left)});
    }
    if (const auto* by_type = std::get_if<ByType>(&policy_)) {
      for (const std::string& name : by_type->names) {
        if (!found_.contains(name)) {
          throw ConfigError(
              format("[fully_shard] units by type: the model has no module of type '{}'; its types "
                     "are {}",
                     name, join(types_)));
        }
      }
    }
    return std::move(units_);
  }

 private:
  // Units of an inner model as they were. What it did not have then belongs to those above.
  std::vector<optim::NamedParameter> take_known(Module& module, const std::string& path,
                                                const std::vector<KnownUnit>& units) {
    for (const auto& inside : module.modules()) {
      visited_.insert(inside.get());
      is_of_type(*inside);  // a name that only inner models have is no mistake
    }
    const auto parameters = module.named_parameters();
    const auto take = [&](const std::string& name, const at::Tensor& tensor,
                          std::vector<optim::NamedParameter>& taken) {
      if (tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second)
        taken.push_back({path + "." + name, tensor});
    };
    for (const KnownUnit& unit : units) {
      const std::string place = unit.path.empty() ? path : path + "." + unit.path;
      UnitPlan plan{.name = place, .parameters = {}, .path = place, .options = unit.options};
      for (const std::string& name : unit.parameters) {
        if (const at::Tensor* tensor = parameters.find(name)) take(name, *tensor, plan.parameters);
      }
      if (!plan.parameters.empty()) units_.push_back(std::move(plan));
    }
    std::vector<optim::NamedParameter> left;
    for (const auto& item : parameters) take(item.key(), item.value(), left);
    return left;
  }

  bool is_unit(const std::string& path, Module& module,
               const std::vector<optim::NamedParameter>& left) {
    if (const auto* by_size = std::get_if<BySize>(&policy_)) {
      int64_t count = 0;
      for (const auto& parameter : left) count += parameter.tensor.numel();
      return count >= by_size->min_num_params;
    }
    if (const auto* predicate = std::get_if<ByPredicate>(&policy_))
      return (*predicate)(path, module);
    return is_of_type(module);
  }

  bool is_of_type(const Module& module) {
    const auto* by_type = std::get_if<ByType>(&policy_);
    if (by_type == nullptr) return false;
    const std::string type = module.name();
    types_.insert(type);
    bool is = false;
    for (const std::string& name : by_type->names) {
      if (!is_called(type, name)) continue;
      found_.insert(name);
      is = true;
    }
    return is;
  }

  const UnitPolicy& policy_;
  const KnownUnits& known_;
  std::set<const Module*> visited_;
  std::set<const c10::TensorImpl*> seen_;
  std::set<std::string> types_, found_;
  std::vector<UnitPlan> units_;
};

}  // namespace

bool is_called(const std::string& type, const std::string& name) {
  const size_t colon = type.rfind("::");
  std::string last = colon == std::string::npos ? type : type.substr(colon + 2);
  if (type == name || last == name) return true;
  return last.ends_with("Impl") && last.substr(0, last.size() - 4) == name;
}

std::optional<size_t> place_among(const std::vector<std::string>& first_tensors,
                                  const std::string& parameter) {
  for (size_t i = 0; i < first_tensors.size(); ++i) {
    if (parameter == first_tensors[i] || parameter.starts_with(first_tensors[i] + ".")) return i;
  }
  return std::nullopt;
}

std::vector<UnitPlan> plan_units(Module& model, const UnitPolicy& policy, const KnownUnits& known) {
  Planner planner(policy, known);
  std::vector<UnitPlan> units = planner.take(planner.walk(model, ""));
  // The walk meets inner units first; sort by the place of the first parameter in the model.
  std::map<const c10::TensorImpl*, size_t> place;
  for (const auto& item : model.named_parameters())
    place.emplace(item.value().unsafeGetTensorImpl(), place.size());
  std::stable_sort(units.begin(), units.end(), [&](const UnitPlan& a, const UnitPlan& b) {
    return place[a.parameters[0].tensor.unsafeGetTensorImpl()] <
           place[b.parameters[0].tensor.unsafeGetTensorImpl()];
  });
  return units;
}

}  // namespace lockstep::parallel::detail
