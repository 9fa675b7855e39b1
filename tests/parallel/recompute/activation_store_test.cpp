// SPDX-License-Identifier: Apache-2.0
// Recomputation with its inputs on disk.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/parallel/recompute/recompute.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::parallel {
namespace {

using test::says;
using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
WeakStorage storage_of(const at::Tensor& tensor) {
  return WeakStorage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

class ActivationStoreTest : public testing::Test {
 protected:
  std::shared_ptr<ActivationStore> store() const {
    return std::make_shared<ActivationStore>(folder_.path());
  }
  const test::TempDir folder_;
};

// Blocks of which the second call is seen: each adds its number when it is called.
struct Blocks {
  explicit Blocks(size_t count) {
    for (size_t i = 0; i < count; ++i) layers.emplace_back(8, 8);
  }
  at::Tensor run(size_t layer, const at::Tensor& x, const std::shared_ptr<ActivationStore>& store) {
    return recompute(
        [this, layer](const at::Tensor& in) { return in + at::gelu(layers[layer](in)); }, x,
        {.store = store});
  }
  at::Tensor forward(at::Tensor x, const std::shared_ptr<ActivationStore>& store) {
    for (size_t i = 0; i < layers.size(); ++i) {
      x = run(i, x, store);
      inputs.push_back(storage_of(x));
    }
    return x.square().sum();
  }
  Tensors take_grads() {
    Tensors grads;
    for (const auto& layer : layers) {
      for (const at::Tensor& parameter : layer->parameters()) {
        grads.push_back(parameter.grad().clone());
        parameter.mutable_grad() = at::Tensor();
      }
    }
    return grads;
  }

  std::vector<torch::nn::Linear> layers;
  std::vector<WeakStorage> inputs;  // of each block but the first, and the output
};

void wait_until_written(const ActivationStore& store, size_t bytes) {
  ASSERT_TRUE(test::eventually([&] { return store.stats().bytes_written >= bytes; }));
}

void expect_same(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

constexpr size_t kBytes = 4 * 8 * sizeof(float);

TEST_F(ActivationStoreTest, InputsLeaveMemoryAndComeBackAheadOfUse) {
  Blocks blocks(6);
  const at::Tensor x = at::randn({4, 8});
  blocks.forward(x, nullptr).backward();
  const Tensors expected = blocks.take_grads();

  const auto disk = store();
  for (size_t step = 1; step <= 3; ++step) {
    blocks.inputs.clear();
    const at::Tensor loss = blocks.forward(x, disk);
    wait_until_written(*disk, step * 6 * kBytes);
    for (size_t i = 0; i + 1 < blocks.inputs.size(); ++i) {
      ASSERT_TRUE(test::eventually([&] { return blocks.inputs[i].expired(); })) << i;
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
    loss.backward();
    expect_same(blocks.take_grads(), expected);
    // The first one is wanted before anybody could know.
    EXPECT_EQ(disk->stats().late, step);
    EXPECT_EQ(disk->stats().ahead, step * 5);
    EXPECT_EQ(disk->stats().bytes_read, step * 6 * kBytes);
  }
  EXPECT_EQ(disk->stats().file_size, 6 * 4096U);  // the space of a step is used by the next
}

TEST_F(ActivationStoreTest, BackwardRightAfterForwardNeedsNotWait) {
  Blocks blocks(3);
  const at::Tensor x = at::randn({4, 8});
  blocks.forward(x, nullptr).backward();
  const Tensors expected = blocks.take_grads();
  const auto disk = store();
  for (int i = 0; i < 50; ++i) {
    blocks.forward(x, disk).backward();
    expect_same(blocks.take_grads(), expected);
  }
  const memory::DiskStoreStats stats = disk->stats();
  EXPECT_EQ(stats.ahead + stats.late + stats.from_memory, 150U);
  EXPECT_LE(stats.late, 50U);
}

// Micro-batches as 1F1B has them. The order of the first step is the guess in the second.
TEST_F(ActivationStoreTest, PrefetchesInTheOrderOfTheLastStep) {
  Blocks blocks(3);
  const auto disk = store();
  size_t put = 0;
  std::vector<at::Tensor> losses(4);
  const auto forward = [&](size_t i) {
    losses[i] = blocks.forward(at::randn({4, 8}), disk);
    put += 3 * kBytes;
    wait_until_written(*disk, put);
  };
  const auto backward = [&](size_t i) {
    losses[i].backward();
    losses[i].reset();
  };
  const auto late_of_a_step = [&] {
    const size_t before = disk->stats().late;
    forward(0);
    forward(1);
    backward(0);
    forward(2);
    backward(1);
    forward(3);
    backward(2);
    backward(3);
    return disk->stats().late - before;
  };
  EXPECT_EQ(late_of_a_step(), 4U);  // the last block of each micro-batch
  EXPECT_EQ(late_of_a_step(), 1U);
  EXPECT_EQ(late_of_a_step(), 1U);
  EXPECT_LE(disk->stats().peak_memory, 5 * kBytes);
}

// Another order than guessed, on the same store.
TEST_F(ActivationStoreTest, AWrongPrefetchOrderChangesNoResult) {
  Blocks blocks(3);
  const at::Tensor x = at::randn({4, 8}), y = at::randn({4, 8});
  blocks.forward(x, nullptr).backward();
  const Tensors expected_x = blocks.take_grads();
  blocks.forward(y, nullptr).backward();
  const Tensors expected_y = blocks.take_grads();
  const auto disk = store();
  for (const bool swapped : {false, true, true, false, false}) {
    const at::Tensor a = blocks.forward(x, disk), b = blocks.forward(y, disk);
    (swapped ? b : a).backward();
    expect_same(blocks.take_grads(), swapped ? expected_y : expected_x);
    (swapped ? a : b).backward();
    expect_same(blocks.take_grads(), swapped ? expected_x : expected_y);
  }
}

// A graph that is never gone through, or not to its end.
TEST_F(ActivationStoreTest, DroppedGraphsFreeTheirInputs) {
  Blocks blocks(4);
  const auto disk = store();
  const at::Tensor x = at::randn({4, 8});
  for (int i = 0; i < 20; ++i) blocks.forward(x, disk);
  const at::Tensor kept = blocks.forward(x, disk);
  for (int i = 0; i < 20; ++i) {
    const at::Tensor loss = blocks.forward(x, disk);
    torch::autograd::grad({loss}, {blocks.layers[2]->weight});
  }
  kept.backward();
  EXPECT_LE(disk->stats().file_size, 12 * 4096U);
}

struct InputCase {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> make;  // from a leaf of (6, 8)
};

// All kinds of tensors, with and without gradients: the same bits as without a store.
TEST_F(ActivationStoreTest, AnyKindOfInputGivesTheSameBits) {
  const std::vector<InputCase> cases{
      {"leaf", [](const at::Tensor& x) { return x; }},
      {"result", [](const at::Tensor& x) { return x * 2; }},
      {"transposed",
       [](const at::Tensor& x) {
         return (x * 2).view({8, 6}).t();
       }},
      {"columns",
       [](const at::Tensor& x) {
         return at::cat({x, x}, 1).narrow(1, 3, 8);
       }},
      {"rows",
       [](const at::Tensor& x) {
         return at::cat({x, x}, 0).narrow(0, 3, 6);
       }},
      {"every second",
       [](const at::Tensor& x) {
         return at::cat({x, x}, 0).slice(0, 0, 12, 2);
       }},
      {"expanded",
       [](const at::Tensor& x) {
         return x.narrow(0, 0, 1).expand({6, 8});
       }},
      {"empty", [](const at::Tensor& x) { return (x * 2).narrow(0, 0, 0); }},
      {"double", [](const at::Tensor& x) { return x.to(at::kDouble); }},
      {"bfloat16", [](const at::Tensor& x) { return x.to(at::kBFloat16); }},
  };
  const at::Tensor weight = at::randn({8}).set_requires_grad(true);
  const auto body = [&](const at::Tensor& in) {
    return (in.to(at::kFloat) * weight).sin().sum() + in.exp().sum();
  };
  const auto disk = store();
  for (const InputCase& c : cases) {
    for (const bool needs_grad : {false, true}) {
      SCOPED_TRACE(std::string(c.name) + (needs_grad ? " with gradient" : ""));
      const auto grads = [&](const std::shared_ptr<ActivationStore>& where, bool again) {
        const at::Tensor leaf =
            at::arange(48, at::kFloat).div(48).view({6, 8}).set_requires_grad(needs_grad);
        const at::Tensor input = c.make(leaf);
        const at::Tensor out = again ? recompute(body, input, {.store = where}) : body(input);
        out.backward();
        Tensors found{weight.grad().clone()};
        weight.mutable_grad() = at::Tensor();
        if (needs_grad) found.push_back(leaf.grad());
        return found;
      };
      const Tensors expected = grads(nullptr, false);
      expect_same(grads(nullptr, true), expected);
      expect_same(grads(disk, true), expected);
    }
  }
}

TEST_F(ActivationStoreTest, RecomputationSeesTheSameInputs) {
  const auto disk = store();
  std::vector<std::string> seen;
  const auto body = [&](const Tensors& in) {
    std::string all;
    for (const at::Tensor& tensor : in) {
      if (!tensor.defined()) {
        all += "none; ";
        continue;
      }
      all += std::string(c10::toString(tensor.scalar_type())) + " ";
      for (const int64_t stride : tensor.strides()) all += std::to_string(stride) + " ";
      all += tensor.requires_grad() ? "g" : "-";
      all += tensor.is_leaf() ? "l; " : "-; ";
    }
    seen.push_back(all);
    return (in[0] * in[2]).exp();
  };
  const at::Tensor x = at::randn({6, 8}).set_requires_grad(true);
  const Tensors inputs{(x * 2).t(), at::Tensor(), x.t(), at::arange(3), x.new_zeros({2, 3}).t()};
  recompute(body, inputs, {.store = disk}).sum().backward();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_THAT(seen[0], HasSubstr("Float 1 8 g-; none;"));
}

TEST_F(ActivationStoreTest, OneTensorForTwoCalls) {
  Blocks blocks(2);
  const at::Tensor leaf = at::randn({4, 8}).set_requires_grad(true);
  const auto run = [&](const std::shared_ptr<ActivationStore>& where) {
    const at::Tensor x = leaf * 3;
    at::Tensor loss = (blocks.run(0, x, where) * blocks.run(1, x, where)).sum();
    loss.backward();
    Tensors grads = blocks.take_grads();
    grads.push_back(leaf.grad().clone());
    leaf.mutable_grad() = at::Tensor();
    return grads;
  };
  const Tensors expected = run(nullptr);
  expect_same(run(store()), expected);
}

TEST_F(ActivationStoreTest, BackwardTwice) {
  Blocks blocks(3);
  const auto disk = store();
  const at::Tensor loss = blocks.forward(at::randn({4, 8}), disk);
  loss.backward({}, /*retain_graph=*/true);
  const Tensors first = blocks.take_grads();
  loss.backward();
  expect_same(blocks.take_grads(), first);
}

TEST_F(ActivationStoreTest, Nests) {
  Blocks blocks(2);
  const at::Tensor leaf = at::randn({4, 8}).set_requires_grad(true);
  const auto run = [&](const std::shared_ptr<ActivationStore>& where) {
    const auto outer = [&, where](const at::Tensor& in) {
      return blocks.run(1, blocks.run(0, in, where).sin(), where);
    };
    recompute(outer, leaf * 2, {.store = where}).square().sum().backward();
    Tensors grads = blocks.take_grads();
    grads.push_back(leaf.grad().clone());
    leaf.mutable_grad() = at::Tensor();
    return grads;
  };
  const Tensors expected = run(nullptr);
  expect_same(run(store()), expected);
}

// Autocast keeps the casts of leaves until the outermost scope ends.
TEST_F(ActivationStoreTest, AutocastKeepsNothing) {
  const auto disk = store();
  const at::Tensor weight = at::randn({8, 8}).set_requires_grad(true);
  const at::Tensor leaf = at::randn({8, 8}).set_requires_grad(true);
  const optim::AutocastGuard autocast({.device = at::kCPU, .dtype = at::kBFloat16});
  std::vector<WeakStorage> inputs;
  const auto body = [&](const at::Tensor& in) {
    inputs.push_back(storage_of(in));
    return at::mm(in, weight).to(at::kFloat).sin();
  };
  recompute(body, leaf * 2, {.store = disk}).sum().backward();
  ASSERT_EQ(inputs.size(), 2U);
  EXPECT_TRUE(inputs[1].expired());
}

TEST_F(ActivationStoreTest, AnInputThatChangesIsNoticed) {
  for (const auto& disk : {store(), std::shared_ptr<ActivationStore>()}) {
    const at::Tensor leaf = at::randn({4, 8}).set_requires_grad(true);
    at::Tensor x = leaf * 2;
    const at::Tensor out =
        recompute([](const at::Tensor& in) { return in.sin(); }, x, {.store = disk});
    x.mul_(2);
    try {
      out.sum().backward();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), says("changed in place"));
    }
  }
}

TEST_F(ActivationStoreTest, WithoutGradModeNothingIsWritten) {
  Blocks blocks(3);
  const auto disk = store();
  {
    const at::NoGradGuard no_grad;
    blocks.forward(at::randn({4, 8}), disk);
  }
  EXPECT_EQ(disk->stats().peak_memory, 0U);
}

}  // namespace
}  // namespace lockstep::parallel
