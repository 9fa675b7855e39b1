// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/freeze.h"

#include <fnmatch.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "lockstep/config/option_value.h"
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

std::string nearest_names(const std::string& pattern, const std::vector<TensorSpec>& tensors) {
  std::vector<std::pair<size_t, std::string>> order;
  for (const TensorSpec& tensor : tensors)
    order.emplace_back(edit_distance(pattern, tensor.name), tensor.name);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kShown, order.size()); ++i) names.push_back(order[i].second);
  return join(names);
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
               "{} names are {}; `lockstep plan inventory --list` prints all",
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
