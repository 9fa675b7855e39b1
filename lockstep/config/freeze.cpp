// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/freeze.h"

#include <fnmatch.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/config/schema/option_value.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

constexpr size_t kShown = 3;

std::vector<std::string> patterns_of(const std::string& list) {
  std::vector<std::string> patterns;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    std::string pattern = list.substr(begin, end - begin);
    begin = end + 1;
    pattern.erase(0, pattern.find_first_not_of(' '));
    pattern.erase(pattern.find_last_not_of(' ') + 1);
    if (!pattern.empty()) patterns.push_back(std::move(pattern));
  }
  return patterns;
}

// Between the dots of a name.
std::vector<std::string> dotted_parts(const std::string& name) {
  std::vector<std::string> parts;
  std::istringstream text(name);
  for (std::string part; std::getline(text, part, '.');) parts.push_back(part);
  return parts;
}

size_t shared_parts(const std::string& pattern, const std::string& name) {
  std::vector<std::string> left = dotted_parts(name);
  size_t count = 0;
  for (const std::string& part : dotted_parts(pattern)) {
    const auto found = std::ranges::find(left, part);
    if (found == left.end()) continue;
    left.erase(left.begin(), found + 1);
    ++count;
  }
  return count;
}

// Other programs have other words for some parts: those that are the same say more than letters.
std::string nearest_names(const std::string& pattern, const std::vector<TensorSpec>& tensors) {
  std::vector<std::tuple<size_t, size_t, std::string>> order;
  for (const TensorSpec& tensor : tensors)
    order.emplace_back(shared_parts(pattern, tensor.name), edit_distance(pattern, tensor.name),
                       tensor.name);
  std::ranges::stable_sort(order, [](const auto& a, const auto& b) {
    return std::pair(std::get<0>(b), std::get<1>(a)) < std::pair(std::get<0>(a), std::get<1>(b));
  });
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kShown, order.size()); ++i)
    names.push_back(std::get<2>(order[i]));
  return join(names);
}

// Whether the state that the optimizer saved is what it needs now.
void require_same_optimizer(const formats::Manifest& manifest, const OptimConfig& before,
                            const OptimConfig& now, const std::string& path) {
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(
        format("{} {}; use --checkpoint.load model to keep only the weights and start at step 0",
               path, what));
  };
  const auto name = [](OptimizerKind kind) {
    return kind == OptimizerKind::adamw ? "adamw" : "sgd";
  };
  const bool has_state = std::ranges::any_of(
      manifest.tensors, [](const auto& tensor) { return tensor.first.starts_with("optim."); });
  if (before.name != now.name)
    refuse(format("was saved with optim.name {}, now it is {}", name(before.name), name(now.name)));
  if ((before.momentum > 0) != (now.momentum > 0)) {
    refuse(format("was saved with optim.momentum {}, now it is {}", before.momentum, now.momentum));
  }
  if (!has_state && now.name == OptimizerKind::adamw) refuse("has weights, but no optimizer state");
}

}  // namespace

std::set<std::string> frozen_tensors(const TrainConfig& config, const ModelSpec& model) {
  std::set<std::string> frozen;
  if (config.train.freeze.empty()) return frozen;
  const std::vector<TensorSpec> tensors = model.tensors();
  for (const std::string& pattern : patterns_of(config.train.freeze)) {
    bool matches = false;
    for (const TensorSpec& tensor : tensors) {
      if (fnmatch(pattern.c_str(), tensor.name.c_str(), 0) != 0) continue;
      matches = true;
      frozen.insert(tensor.name);
    }
    if (matches) continue;
    throw ConfigError(
        format("train.freeze: the pattern {} matches no parameter of the model; the nearest of its "
               "{} names are {}; `lockstep plan inventory --list` with the same flags prints all",
               pattern, tensors.size(), nearest_names(pattern, tensors)));
  }
  if (frozen.size() == tensors.size()) {
    throw ConfigError(
        format("train.freeze: {} matches all {} parameters of the model; leave some to train",
               config.train.freeze, tensors.size()));
  }
  return frozen;
}

void require_optimizer_state(const formats::Manifest& manifest, const TrainConfig& config,
                             const ModelSpec& model, const std::string& path) {
  const TrainConfig before = train_config_from_json(manifest.config, path);
  require_same_optimizer(manifest, before.optim, config.optim, path);
  const auto was = frozen_tensors(before, model), is = frozen_tensors(config, model);
  std::vector<std::string> thawed;
  std::ranges::set_difference(was, is, std::back_inserter(thawed));
  if (thawed.empty()) return;
  throw ConfigError(
      format("{} was written with train.freeze {}, so it has no optimizer state of {} parameters "
             "that are to be trained now, such as {}; freeze them again, begin at step 0 with "
             "--checkpoint.load model, or let their state begin at zero with --checkpoint.partial "
             "true",
             path, before.train.freeze, thawed.size(), thawed.front()));
}

}  // namespace lockstep::config
