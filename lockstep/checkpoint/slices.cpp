#include "lockstep/checkpoint/slices.h"

#include <torch/nn/module.h>

#include <set>
#include <string>

namespace lockstep::checkpoint {
namespace {

NamedSlice whole(const std::string& name, const at::Tensor& tensor) {
  return {layout::Placement::whole(name, tensor.sizes().vec()), tensor.detach()};
}

}  // namespace

std::vector<NamedSlice> slices_of(const torch::nn::Module& model) {
  std::vector<NamedSlice> slices;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      slices.push_back(whole(item.key(), item.value()));
    }
  };
  add(model.named_parameters());
  add(model.named_buffers());
  return slices;
}

std::vector<NamedSlice> slices_of(optim::Optimizer& optimizer) {
  std::vector<NamedSlice> slices;
  for (const auto& [name, tensor] : optimizer.state()) {
    slices.push_back(whole("optim." + name, tensor));
  }
  return slices;
}

std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model) {
  std::vector<NamedSlice> slices;
  for (auto& [placement, tensor] : model.sharded_state_dict()) {
    if (!placement.is_empty()) slices.push_back({placement, tensor});
  }
  return slices;
}

std::vector<NamedSlice> slices_of(const parallel::ShardedModel& model,
                                  optim::Optimizer& optimizer) {
  std::vector<NamedSlice> slices;
  for (const auto& [name, tensor] : optimizer.state()) {
    const size_t dot = name.rfind('.');  // "layer.weight.exp_avg"
    for (auto& [placement, part] : model.parts_of(name.substr(0, dot), tensor)) {
      if (placement.is_empty()) continue;
      placement.name = "optim." + placement.name + name.substr(dot);
      slices.push_back({placement, part});
    }
  }
  return slices;
}

std::vector<NamedSlice> operator+(std::vector<NamedSlice> a, const std::vector<NamedSlice>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace lockstep::checkpoint
