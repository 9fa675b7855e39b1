// SPDX-License-Identifier: Apache-2.0
// The same bits on a GPU as on the CPU. Built where libtorch has CUDA; needs a GPU.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <random>
#include <vector>

#include "lockstep/nn/dropout.h"
#include "lockstep/nn/init.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/nn/random/random.h"

namespace lockstep::nn {
namespace {

using layout::Box;
using layout::Shape;

const RandomKey kKey = random_key(5, "test", "tensor", {.step = 3, .micro_batch = 1});
const at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

const std::vector<Distribution> kDistributions = {
    Distribution::uniform(0, 1), Distribution::uniform(-3, 0.5), Distribution::normal(0, 1),
    Distribution::normal(1.5, 0.02), Distribution::truncated_normal(0, 1, -0.5, 2)};

struct BoxCase {
  Shape shape;
  Box box;
  Shape sizes;  // of the box
};

// Boxes of all kinds of runs: long and short, one and many, beginning anywhere in a block.
std::vector<BoxCase> box_cases() {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n)(random);
  };
  std::vector<BoxCase> cases;
  for (int round = 0; round < 200; ++round) {
    BoxCase box_case;
    const auto dims = 1 + below(3);
    for (int64_t dim = 0; dim < dims; ++dim) {
      box_case.shape.push_back(1 + below(dims == 1 ? 4000 : 13));
      const auto begin = below(box_case.shape.back());
      box_case.box.ranges.push_back(
          below(1) ? layout::Range{begin, begin + below(box_case.shape.back() - begin)}
                   : layout::Range{0, box_case.shape.back()});
      box_case.sizes.push_back(box_case.box.ranges.back().size());
    }
    cases.push_back(box_case);
  }
  return cases;
}

at::Tensor bits_of(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  if (dense.element_size() == 8) return dense.view(at::kLong);
  return dense.view(dense.element_size() == 4 ? at::kInt : at::kShort);
}

void expect_same(const at::Tensor& on_gpu, const at::Tensor& on_cpu) {
  ASSERT_TRUE(on_gpu.is_cuda());
  const auto copy = on_gpu.cpu();
  ASSERT_EQ(copy.scalar_type(), on_cpu.scalar_type());
  ASSERT_TRUE(at::equal(bits_of(copy), bits_of(on_cpu)))
      << (copy != on_cpu).sum().item<int64_t>() << " of " << copy.numel() << " differ, by up to "
      << (copy - on_cpu).abs().max().item<double>();
}

TEST(RandomCuda, FillsHaveTheBitsOfTheCpu) {
  for (const auto& distribution : kDistributions) {
    for (const auto dtype : kTypes) {
      for (const int64_t size : {1, 3, 4, 5, 1023, 1'000'003}) {
        auto cpu = at::empty({size}, dtype);
        auto gpu = at::empty({size}, at::TensorOptions(dtype).device(at::kCUDA));
        fill(cpu, kKey, distribution);
        fill(gpu, kKey, distribution);
        expect_same(gpu, cpu);
      }
    }
  }
}

// Every float32 step of the normal transform, over as many words as a test has time for.
TEST(RandomCuda, NormalNumbersAreTheSameOverManyBlocks) {
  auto cpu = at::empty({1 << 26});
  auto gpu = at::empty({1 << 26}, at::TensorOptions(at::kCUDA));
  fill(cpu, kKey, Distribution::normal(0, 1));
  fill(gpu, kKey, Distribution::normal(0, 1));
  expect_same(gpu, cpu);
}

TEST(RandomCuda, SlicesHaveTheBitsOfTheCpu) {
  size_t round = 0;
  for (const auto& box_case : box_cases()) {
    const auto dtype = kTypes[round % 4];
    const auto& distribution = kDistributions[round++ % kDistributions.size()];
    auto cpu = at::empty(box_case.sizes, dtype);
    auto gpu = at::empty(box_case.sizes, at::TensorOptions(dtype).device(at::kCUDA));
    fill(cpu, kKey, distribution, Slice{box_case.shape, box_case.box});
    fill(gpu, kKey, distribution, Slice{box_case.shape, box_case.box});
    expect_same(gpu, cpu);
  }
}

TEST(RandomCuda, ElementsBeyondFourBillionBlocks) {
  const Slice slice{{int64_t{1} << 20, int64_t{1} << 20},
                    {{{(int64_t{1} << 20) - 3, int64_t{1} << 20}, {77, 200}}}};
  auto cpu = at::empty({3, 123}), gpu = at::empty({3, 123}, at::TensorOptions(at::kCUDA));
  fill(cpu, kKey, Distribution::normal(0, 1), slice);
  fill(gpu, kKey, Distribution::normal(0, 1), slice);
  expect_same(gpu, cpu);
}

// Memory that is not aligned for whole blocks, and whose neighbours are not to be touched.
TEST(RandomCuda, StaysInsideItsMemory) {
  for (const auto dtype : kTypes) {
    for (int64_t offset = 0; offset < 5; ++offset) {
      for (const int64_t size : {1, 2, 7, 100}) {
        const auto buffer = at::full({120}, -100, at::TensorOptions(dtype).device(at::kCUDA));
        const auto view = buffer.narrow(0, offset, size);
        fill(view, kKey, Distribution::normal(0, 1));
        auto expected = at::full({120}, -100, dtype);
        fill(expected.narrow(0, offset, size), kKey, Distribution::normal(0, 1));
        expect_same(buffer, expected);
        expect_same(dropout(view, 0.5, kKey), dropout(expected.narrow(0, offset, size), 0.5, kKey));
      }
    }
  }
}

TEST(RandomCuda, FollowsTheIndicesNotTheMemory) {
  auto cpu = at::empty({20, 30});
  auto gpu = at::empty({30, 20}, at::TensorOptions(at::kCUDA)).t();
  fill(cpu, kKey, Distribution::normal(0, 1));
  fill(gpu, kKey, Distribution::normal(0, 1));
  expect_same(gpu, cpu);
  expect_same(dropout(gpu, 0.5, kKey), dropout(cpu, 0.5, kKey));
}

TEST(RandomCuda, DropoutHasTheBitsOfTheCpuForwardAndBackward) {
  size_t round = 0;
  for (const auto& box_case : box_cases()) {
    const auto dtype = kTypes[round++ % 4];
    const auto x = at::randn(box_case.sizes).to(dtype),
               gradient = at::randn(box_case.sizes).to(dtype);
    const auto cpu = x.clone().requires_grad_();
    const auto gpu = x.to(at::kCUDA).requires_grad_();
    const Slice slice{box_case.shape, box_case.box};
    const auto y = dropout(cpu, 0.3, kKey, slice), z = dropout(gpu, 0.3, kKey, slice);
    expect_same(z.detach(), y.detach());
    y.backward(gradient);
    z.backward(gradient.to(at::kCUDA));
    expect_same(gpu.grad(), cpu.grad());
  }
}

TEST(RandomCuda, ModulesBeginAndDropAlike) {
  torch::nn::Sequential cpu(torch::nn::Linear(50, 70), Dropout(0.4)),
      gpu(torch::nn::Linear(50, 70), Dropout(0.4));
  gpu->to(at::kCUDA);
  initialize(*cpu, 9);
  initialize(*gpu, 9);
  const auto parameters = cpu->parameters(), others = gpu->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    expect_same(others[i].detach(), parameters[i].detach());
  }
  const auto context =
      std::make_shared<RandomContext>(RandomContext{.seed = 3, .position = {1, 2}});
  attach_random(*cpu, context);
  attach_random(*gpu, context);
  const auto x = at::randn({8, 50});
  const auto zeros = cpu->forward(x) == 0;
  EXPECT_TRUE(at::equal((gpu->forward(x.to(at::kCUDA)) == 0).cpu(), zeros));
}

// Queued behind slow work on a stream that does not wait for the default one: drawn anywhere else,
// it would be overwritten.
TEST(RandomCuda, WorksInTheOrderOfTheCurrentStream) {
  const auto options = at::TensorOptions(at::kCUDA);
  const auto matrix = at::rand({4096, 4096}, options);
  auto x = at::zeros({4096, 4096}, options);
  auto expected = at::empty({4096, 4096});
  fill(expected, kKey, Distribution::normal(0, 1));
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  matrix.sum().item();  // both streams begin with nothing to do
  {
    const c10::StreamGuard guard(device.getStreamFromGlobalPool(matrix.device()));
    for (int i = 0; i < 20; ++i) x.copy_(matrix.mm(matrix));
    fill(x, kKey, Distribution::normal(0, 1));
    expect_same(x, expected);
  }
}

}  // namespace
}  // namespace lockstep::nn
