// SPDX-License-Identifier: Apache-2.0
// The values of a sharded model, whole and in parts.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/shard/fully_shard.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel {
namespace {

using detail::Member;

// Parameters, once each, under their first names; then buffers.
std::vector<optim::NamedTensor> tensors_of(const torch::nn::Module& model) {
  std::vector<optim::NamedTensor> all;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
        all.push_back({item.key(), item.value()});
    }
  };
  add(model.named_parameters());
  add(model.named_buffers());
  return all;
}

}  // namespace

std::vector<optim::NamedTensor> ShardedModel::full_state_dict() const {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> gathered;
  if (shared()->engine) {
    for (const auto& flat : shared()->engine->flats()) {
      if (flat->plan().is_own()) continue;
      flat->parameter.check_views();
      const at::Tensor line = flat->shard.gathered();
      for (const Member& member : flat->members()) {
        gathered[member.name] = line.narrow(0, member.offset, member.numel())
                                    .view(member.shape)
                                    .to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
      }
      flat->shard.settle();
    }
  }
  std::vector<optim::NamedTensor> all;
  for (const auto& [name, tensor] : tensors_of(*shared()->model)) {
    const auto found = gathered.find(name);
    all.push_back(
        {name, found != gathered.end()
                   ? found->second
                   : tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)});
  }
  return all;
}

std::vector<NamedShard> ShardedModel::sharded_state_dict() const {
  std::vector<NamedShard> all;
  for (const auto& [name, tensor] : tensors_of(*shared()->model)) {
    const auto [flat, member] = shared()->find(name);
    if (flat == nullptr) {
      all.push_back({layout::Placement::whole(name, tensor.sizes().vec()), tensor.detach()});
    } else {
      all.push_back({flat->parameter.placement(*member), flat->shard.rows_of(*member)});
    }
  }
  return all;
}

void ShardedModel::load_full_state_dict(std::span<const optim::NamedTensor> values) {
  std::map<std::string, at::Tensor> given;
  for (const auto& [name, tensor] : values) given.emplace(name, tensor);
  const auto wanted = tensors_of(*shared()->model);
  for (const auto& [name, tensor] : wanted) {
    const auto found = given.find(name);
    if (found == given.end())
      throw ConfigError(format("[load_full_state_dict] there is no value for '{}'", name));
    if (found->second.sizes() != tensor.sizes()) {
      throw ConfigError(format("[load_full_state_dict] '{}' is ({}), must be ({})", name,
                               join(found->second.sizes()), join(tensor.sizes())));
    }
  }
  if (given.size() != wanted.size()) {
    for (const auto& [name, tensor] : wanted) given.erase(name);
    throw ConfigError(format("[load_full_state_dict] the model has no '{}'", given.begin()->first));
  }
  const at::NoGradGuard no_grad;
  begin_update();
  for (auto& [placement, tensor] : sharded_state_dict()) {
    at::Tensor value = given.at(placement.name);
    if (placement.is_empty()) continue;
    for (int64_t dim = 0; dim < value.dim(); ++dim) {
      const layout::Range range = placement.slice.ranges[static_cast<size_t>(dim)];
      value = value.narrow(dim, range.begin, range.size());
    }
    tensor.copy_(value);
  }
}

std::vector<NamedShard> ShardedModel::parts_of(const std::string& parameter,
                                               const at::Tensor& tensor) const {
  std::vector<NamedShard> parts;
  const auto whole = [&](const std::string& name) {
    parts.push_back({layout::Placement::whole(name, tensor.sizes().vec()), tensor});
  };
  if (!shared()->engine) {
    whole(parameter);
    return parts;
  }
  for (const auto& flat : shared()->engine->flats()) {
    for (const detail::OptimizedTensor& each : flat->shard.optimized()) {
      if (each.name != parameter) continue;
      const bool like_it = tensor.sizes() == each.tensor.sizes();
      for (size_t i = each.first; i < each.end; ++i) {
        const Member& member = flat->members()[i];
        if (!like_it) {
          whole(member.name);
        } else if (flat->plan().is_own() || !flat->plan().updates_as_one) {
          parts.push_back({flat->parameter.placement(member), tensor});
        } else {
          parts.push_back({flat->parameter.placement(member),
                           tensor.narrow(0, member.shard_offset, member.shard_numel())
                               .view(member.shard_shape())});
        }
      }
      return parts;
    }
  }
  throw ConfigError(format("[parts_of] the optimizer is given no parameter '{}'", parameter));
}

}  // namespace lockstep::parallel
