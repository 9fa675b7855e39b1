// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/sgd.h"

#include <torch/optim/sgd.h>

#include "lockstep/core/error.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

class SgdLikeTorch : public ::testing::TestWithParam<SGDOptions> {
 protected:
  void compare(const std::vector<at::Tensor>& tensors, at::ScalarType theirs) {
    std::vector<at::Tensor> expected;
    for (const at::Tensor& tensor : tensors) {
      expected.push_back(tensor.detach().to(theirs, false, true).contiguous().requires_grad_());
    }
    const SGDOptions& options = GetParam();
    SGD optimizer(named(tensors), options);
    torch::optim::SGD reference(expected, torch::optim::SGDOptions(options.lr)
                                              .momentum(options.momentum)
                                              .dampening(options.dampening)
                                              .nesterov(options.nesterov)
                                              .weight_decay(options.weight_decay));
    for (int step = 0; step < 100; ++step) {
      set_grads(tensors, expected);
      optimizer.step();
      reference.step();
    }
    const auto state = optimizer.state();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].scalar_type() == theirs) {
        expect_close(tensors[i], expected[i]);
      } else {
        const at::Tensor master = entry(state, "p" + std::to_string(i) + ".master");
        expect_close(master, expected[i]);
        EXPECT_TRUE(same_bits(tensors[i], master.to(tensors[i].scalar_type())));
      }
    }
  }
};

TEST_P(SgdLikeTorch, Float32) { compare(parameters_of_many_sizes(), at::kFloat); }
TEST_P(SgdLikeTorch, Float64) { compare(parameters_of_many_sizes(at::kDouble), at::kDouble); }
TEST_P(SgdLikeTorch, BFloat16) { compare(parameters_of_many_sizes(at::kBFloat16), at::kFloat); }
TEST_P(SgdLikeTorch, Float16) { compare({parameter({50}, at::kHalf)}, at::kFloat); }
TEST_P(SgdLikeTorch, ByOperators) {
  compare({at::randn({6, 70}).slice(1, 3, 66, 2).detach().requires_grad_()}, at::kFloat);
}

INSTANTIATE_TEST_SUITE_P(
    SGD, SgdLikeTorch,
    ::testing::Values(SGDOptions{}, SGDOptions{.lr = 0.1, .weight_decay = 0.1},
                      SGDOptions{.momentum = 0.9},
                      SGDOptions{.momentum = 0.8, .dampening = 0.3, .weight_decay = 0.01},
                      SGDOptions{.momentum = 0.9, .nesterov = true, .weight_decay = 0.01}));

TEST(SGD, SparseGradient) {
  const at::Tensor indices = at::tensor({1, 4, 1}, at::kLong).unsqueeze(0);
  for (const auto& options :
       {SGDOptions{}, SGDOptions{.weight_decay = 0.1}, SGDOptions{.momentum = 0.9}}) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const std::vector<at::Tensor> tensors = {parameter({5, 3}, type)};
      const auto expected = copies_of(tensors);
      SGD optimizer(named(tensors), options), reference(named(expected), options);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor values = at::randn({3, 3}).to(type);
        tensors[0].mutable_grad() = at::sparse_coo_tensor(indices, values, {5, 3});
        expected[0].mutable_grad() = tensors[0].grad().to(at::kFloat).to_dense();
        optimizer.step();
        reference.step();
      }
      expect_close(tensors[0], expected[0]);
    }
  }
}

TEST(SGD, BadInputIsNamed) {
  const auto with = [](SGDOptions options) { SGD optimizer(named({parameter({2})}), options); };
  expect_error<ConfigError>("[SGD] ... momentum is -1 ... at least 0",
                            [&] { with({.momentum = -1}); });
  expect_error<ConfigError>("[SGD] dampening is 0.5, must be 0 without momentum",
                            [&] { with({.dampening = 0.5}); });
  expect_error<ConfigError>("[SGD] nesterov with momentum 0", [&] { with({.nesterov = true}); });
  expect_error<ConfigError>("[SGD] nesterov with momentum 0.9 and dampening 0.1",
                            [&] { with({.momentum = 0.9, .dampening = 0.1, .nesterov = true}); });
}

}  // namespace
}  // namespace lockstep::optim
