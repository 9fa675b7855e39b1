// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/tensor_parallel.h"

#include <gtest/gtest.h>

#include <set>

namespace lockstep::config {
namespace {

std::vector<ModelSpec> specs() {
  std::vector<ModelSpec> all;
  for (const bool tied : {false, true}) {
    for (const ModelKind kind : {ModelKind::gpt, ModelKind::llama})
      all.push_back({.kind = kind, .layers = 3, .hidden = 32, .heads = 4, .tied = tied});
    all.push_back(all.back());
    all.back().qkv_bias = true;
    all.push_back(all[all.size() - 2]);
    all.back().qk_norm = true;
    all.back().head_dim = 10;
  }
  for (ModelSpec& spec : all) spec = spec.resolved(16, 31);
  return all;
}

// Every tensor has a rule, every rule of a module with tensors is used, and shares add up.
TEST(TensorPlanOfModels, CoversTheModel) {
  for (const ModelSpec& spec : specs()) {
    std::set<std::string> modules;
    for (const TensorSpec& tensor : spec.tensors()) {
      modules.insert(tensor.name.substr(0, tensor.name.rfind('.')));
      int64_t numel = 0;
      for (int rank = 0; rank < 4; ++rank)
        numel += layout::numel_of(tensor_split(spec, tensor, 4, rank).local_shape());
      const bool whole = tensor_split(spec, tensor, 4, 0).is_whole();
      EXPECT_EQ(numel, (whole ? 4 : 1) * layout::numel_of(tensor.shape)) << tensor.name;
      EXPECT_EQ(whole, tensor.name.find("norm") != std::string::npos ||
                           tensor.name.starts_with("positions") ||
                           tensor.name.ends_with("out.bias") || tensor.name.ends_with("down.bias"))
          << tensor.name;
    }
    const layout::TensorPlan plan = tensor_plan(spec);
    std::vector<bool> used(plan.size());
    for (const int rule :
         layout::match(plan, std::vector<std::string>(modules.begin(), modules.end())))
      used[static_cast<size_t>(rule)] = true;
    for (size_t i = 0; i < plan.size(); ++i) {
      if (plan[i].pattern.find("dropout") == std::string::npos) {
        EXPECT_TRUE(used[i]) << plan[i].pattern;
      }
    }
  }
}
}  // namespace
}  // namespace lockstep::config
