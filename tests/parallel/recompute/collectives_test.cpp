// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group.h"
#include "lockstep/parallel/recompute/recompute.h"

namespace lockstep::parallel {
namespace {

// A collective writes to the memory of a product past torch's operators.
void expect_sums_in_place_of_products(
    const std::function<comm::Work(const at::Tensor&, const comm::Group&)>& reduce,
    const char* backend) {
  comm::run_threads(
      2,
      [&](const comm::Group& group) {
        const at::Tensor weight =
            at::full({4, 4}, 0.1 * (1 + group.rank())).set_requires_grad(true);
        const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).set_requires_grad(true);
        const auto body = [&] {
          const at::Tensor product = at::mm(x, weight);
          const at::Tensor sum = product.detach();
          reduce(sum, group).wait();
          return (product.exp() * at::mm(sum, weight).sin()).sum();
        };
        const auto gradients = [&](const at::Tensor& loss) {
          return torch::autograd::grad({loss}, {x, weight});
        };
        const auto found = gradients(recompute(body, {.keep_products = true})),
                   expected = gradients(body());
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
      },
      {.backend = backend});
}

TEST(RecomputeSelective, ACollectiveMayTakeThePlaceOfAProduct) {
  const auto plain = [](const at::Tensor& tensor, const comm::Group& group) {
    return comm::all_reduce(tensor, group);
  };
  // Over gloo another thread writes the ordered sum.
  const auto ordered = [](const at::Tensor& tensor, const comm::Group& group) {
    return comm::all_reduce_ordered(tensor, group);
  };
  for (const char* backend : {"thread", "gloo"}) {
    expect_sums_in_place_of_products(plain, backend);
    expect_sums_in_place_of_products(ordered, backend);
  }
}

}  // namespace
}  // namespace lockstep::parallel
