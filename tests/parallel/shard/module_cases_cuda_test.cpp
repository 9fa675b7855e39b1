// SPDX-License-Identifier: Apache-2.0
// The module cases on a GPU that all ranks share. Built where CUDA is.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "tests/parallel/shard/module_cases.h"

namespace lockstep::test {
namespace {

using parallel::FullyShardOptions;

const comm::Group& world() {
  static const comm::Group group = [] {
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowTF32CuDNN(false);
    // Sums by atomic additions would be others each time.
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setBenchmarkCuDNN(false);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    return comm::init();
  }();
  return group;
}

std::vector<Sharding> shardings() {
  FullyShardOptions orig = shard_all(parallel::OneUnit{}), post = shard_all(), host = shard_all();
  orig.use_orig_params = true;
  post.advanced.forward_prefetch = post.advanced.backward_prefetch = parallel::Prefetch::post;
  // Shards in host memory: the only one of these that does something on one rank.
  host.offload = parallel::HostOffload{};
  return {{"drop", shard_all(), true, 2}, {"drop_orig", orig, true, 2},
          {"learned", shard_all()},       {"post", post},
          {"host_drop", host, true, 2},   {"host", host}};
}

class ModuleCasesCuda : public testing::TestWithParam<ModuleCase> {};

TEST_P(ModuleCasesCuda, TheSameBitsAsThePlainModule) {
  for (const Sharding& sharding : shardings()) {
    SCOPED_TRACE(sharding.name);
    // A rank that fails leaves, and ends the others: what they would still compare is lost.
    ASSERT_NO_THROW(compare(GetParam(), sharding, world(), at::kCUDA));
  }
}

// Sparse gradients are added up in no fixed order on CUDA, in the plain module too.
std::vector<ModuleCase> deterministic_cases() {
  std::vector<ModuleCase> all = module_cases();
  std::erase_if(all, [](const ModuleCase& each) { return each.name.ends_with("_sparse"); });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Modules, ModuleCasesCuda, testing::ValuesIn(deterministic_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::test
