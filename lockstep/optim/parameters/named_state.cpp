// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/parameters/named_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::optim {

void load_named(const std::string& operation, std::span<const NamedTensor> own,
                std::span<const NamedTensor> entries) {
  std::map<std::string, at::Tensor> wanted;
  for (const auto& [name, tensor] : own) wanted.emplace(name, tensor);
  std::map<std::string, at::Tensor> given;
  std::vector<std::string> problems;
  for (const auto& [name, tensor] : entries) {
    if (!given.emplace(name, tensor).second) {
      problems.push_back(format("'{}' is given twice", name));
    } else if (!wanted.contains(name)) {
      problems.push_back(format("'{}' is unknown", name));
    } else if (!tensor.defined() || tensor.sizes() != wanted[name].sizes()) {
      problems.push_back(format("'{}' has shape ({}), must be ({})", name,
                                tensor.defined() ? join(tensor.sizes()) : "undefined",
                                join(wanted[name].sizes())));
    }
  }
  for (const auto& [name, tensor] : own) {
    if (!given.contains(name)) problems.push_back(format("'{}' is missing", name));
  }
  if (!problems.empty()) {
    constexpr size_t kShown = 8;  // a wrong model has thousands
    const size_t hidden = problems.size() - std::min(problems.size(), kShown);
    problems.resize(problems.size() - hidden);
    throw ConfigError(format("[{}] {}{}", operation, join(problems, "; "),
                             hidden ? format("; and {} more", hidden) : ""));
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) tensor.copy_(given[name]);
}

}  // namespace lockstep::optim
