// SPDX-License-Identifier: Apache-2.0
// The same steps, norms and scales on CUDA as on the CPU.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>

#include "lockstep/optim/adamw.h"
#include "lockstep/optim/autocast.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/sgd.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().to(at::kCUDA).requires_grad_());
    if (tensor.grad().defined()) copies.back().mutable_grad() = tensor.grad().to(at::kCUDA);
  }
  return copies;
}

template <class Make>
void compare_steps(at::ScalarType type, const Make& make) {
  at::manual_seed(1);
  const auto expected = parameters_of_many_sizes(type), tensors = on_device(expected);
  auto reference = make(named(expected)), optimizer = make(named(tensors));
  for (int step = 0; step < 20; ++step) {
    set_grads(expected, expected);
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].mutable_grad() = expected[i].grad().to(at::kCUDA);
    }
    if (step == 10) expected.back().mutable_grad() = tensors.back().mutable_grad() = at::Tensor();
    reference.step();
    optimizer.step();
  }
  const auto ours = optimizer.state(), theirs = reference.state();
  for (size_t i = 0; i < ours.size(); ++i) {
    // Momentum is a sum whose terms may cancel: its error is that of the terms.
    const bool is_sum = ours[i].name.ends_with("momentum_buffer");
    expect_close(ours[i].tensor.cpu(), theirs[i].tensor, is_sum ? 1e-5 : 1e-6);
  }
  if (type != at::kFloat) return;  // what was rounded may have fallen to the other side
  for (size_t i = 0; i < tensors.size(); ++i) expect_close(tensors[i].cpu(), expected[i]);
}

TEST(Cuda, AdamWAsOnTheCpu) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    compare_steps(
        type, [](auto parameters) { return AdamW(parameters, {.lr = 1e-2, .weight_decay = 0.1}); });
  }
}

#ifdef LOCKSTEP_NVCC
template <class Make>
void expect_cpus_bits(const Make& make) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    at::manual_seed(2);
    // More parameters than one kernel takes.
    auto expected = parameters_of_many_sizes(type);
    while (expected.size() < 150) {
      for (const at::Tensor& more : parameters_of_many_sizes(type)) expected.push_back(more);
    }
    const auto tensors = on_device(expected);
    auto reference = make(named(expected)), optimizer = make(named(tensors));
    for (int step = 0; step < 5; ++step) {
      set_grads(expected, expected);
      for (size_t i = 0; i < tensors.size(); ++i) {
        tensors[i].mutable_grad() = expected[i].grad().to(at::kCUDA);
      }
      // The steps of a parameter are its own.
      if (step == 1) expected[7].mutable_grad() = tensors[7].mutable_grad() = at::Tensor();
      const double factor = step == 3 ? 0.3 : 1;
      reference.step_scaled(factor);
      optimizer.step_scaled(factor);
      // A parameter that somebody else writes wins over its master.
      if (step == 2) {
        const at::NoGradGuard no_grad;
        tensors[1].mul_(2);
        expected[1].mul_(2);
      }
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(at::equal(tensors[i].cpu(), expected[i])) << c10::toString(type) << " " << i;
    }
    const auto state = optimizer.state(), expected_state = reference.state();
    for (size_t i = 0; i < state.size(); ++i) {
      EXPECT_TRUE(same_bits(state[i].tensor.cpu(), expected_state[i].tensor)) << state[i].name;
    }
  }
}

TEST(Cuda, AdamWHasTheCpusBits) {
  expect_cpus_bits([](auto parameters) { return AdamW(parameters); });
}

TEST(Cuda, RoundedMomentsHaveTheCpusBits) {
  const AdamWOptions rounded{.moments = MomentType::bfloat16, .seed = 3};
  expect_cpus_bits([&](auto parameters) { return AdamW(parameters, rounded); });
  // Columns of a whole tensor, and rows in a line with padding; aligned to blocks of Philox or not.
  const auto whole = layout::Placement::whole("whole", {600, 40});
  for (const int64_t begin : {0, 3, 8}) {
    const std::vector<std::pair<std::vector<int64_t>, PlacedPart>> cases = {
        {{600, 20}, {whole.narrow(1, {begin, begin + 20}, "tp")}},
        {{590, 40}, {whole.narrow(0, {begin, begin + 590}, "dp")}},
        {{600, 40}, {whole.narrow(0, {begin, begin + 555}, "dp"), 8 + begin}}};
    for (const auto& [sizes, part] : cases) {
      const at::Tensor gradient = at::randn(sizes), expected = parameter(sizes);
      const at::Tensor tensor = on_device({expected})[0];
      AdamW reference({{"p", expected, {part}}}, rounded),
          optimizer({{"p", tensor, {part}}}, rounded);
      for (int step = 0; step < 3; ++step) {
        expected.mutable_grad() = gradient.clone();
        tensor.mutable_grad() = gradient.to(at::kCUDA);
        reference.step();
        optimizer.step();
      }
      EXPECT_TRUE(at::equal(tensor.cpu(), expected)) << begin;
      for (const char* name : {"p.exp_avg", "p.exp_avg_sq"}) {
        EXPECT_TRUE(same_bits(entry(optimizer.state(), name).cpu(), entry(reference.state(), name)))
            << begin;
      }
    }
  }
}

TEST(Cuda, SgdHasTheCpusBits) {
  const SGDOptions options[] = {{.weight_decay = 0.1},
                                {.momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
                                {.momentum = 0.9, .nesterov = true}};
  for (const SGDOptions& sgd : options)
    expect_cpus_bits([&](auto parameters) { return SGD(parameters, sgd); });
}
#endif

TEST(Cuda, SgdAsOnTheCpu) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    compare_steps(type, [](auto parameters) {
      return SGD(parameters, {.momentum = 0.9, .nesterov = true, .weight_decay = 0.1});
    });
  }
}

TEST(Cuda, ClipAsOnTheCpu) {
  for (const auto type : {NormType::l2, NormType::max}) {
    const auto expected = parameters_of_many_sizes();
    set_grads(expected, expected);
    auto tensors = on_device(expected);
    tensors[2] = copy_of(expected[2]);  // on both devices
    tensors[2].mutable_grad() = expected[2].grad().clone();
    const double norm = clip_grad_norm_(expected, 0.5, {.type = type});
    EXPECT_NEAR(clip_grad_norm_(tensors, 0.5, {.type = type}), norm, 1e-6 * norm);
    for (size_t i = 0; i < tensors.size(); ++i) {
      expect_close(tensors[i].grad().cpu(), expected[i].grad());
    }
  }
}

TEST(Cuda, ScalerSeesOverflow) {
  const at::Tensor tensor = at::ones({5000}).to(at::kCUDA, at::kHalf).requires_grad_();
  AdamW optimizer({{"p", tensor}});
  GradScaler scaler({}, {.init_scale = 4});
  tensor.mutable_grad() = at::ones_like(tensor);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(tensor.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(tensor.grad()[17].item<float>(), 0.25f);
  scaler.update();
  tensor.grad()[4321].fill_(std::numeric_limits<float>::infinity());
  EXPECT_FALSE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 2);
}

TEST(Cuda, Autocast) {
  const at::Tensor a = at::ones({64, 64}, at::kCUDA);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const AutocastGuard guard({.device = at::kCUDA, .dtype = dtype});
    EXPECT_EQ(at::mm(a, a).scalar_type(), dtype);
  }
  EXPECT_EQ(at::mm(a, a).scalar_type(), at::kFloat);
}

TEST(Cuda, ExactNormHasTheCpusBits) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    at::manual_seed(6);
    auto tensors = parameters_of_many_sizes(type);
    set_grads(tensors, tensors);
    tensors[6].mutable_grad().mul_(1e-3);
    EXPECT_EQ(grad_norm(on_device(tensors), {.exact = true}), grad_norm(tensors, {.exact = true}));
  }
}

}  // namespace
}  // namespace lockstep::optim
