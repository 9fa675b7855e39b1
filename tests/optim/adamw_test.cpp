// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/adamw.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adamw.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "tests/optim/optim_support.h"

namespace lockstep::optim {
namespace {

torch::optim::AdamWOptions torch_options(const AdamWOptions& options) {
  return torch::optim::AdamWOptions(options.lr)
      .betas({options.beta1, options.beta2})
      .eps(options.eps)
      .weight_decay(options.weight_decay);
}

class LikeTorch : public ::testing::TestWithParam<AdamWOptions> {
 protected:
  // Our parameters of one type against torch's of another, fed the same gradients.
  void compare(at::ScalarType ours, at::ScalarType theirs, int steps = 100) {
    at::manual_seed(1);
    const auto tensors = parameters_of_many_sizes(ours);
    std::vector<at::Tensor> expected;
    for (const at::Tensor& tensor : tensors) {
      expected.push_back(tensor.detach().to(theirs, false, true).requires_grad_());
    }
    AdamW optimizer(named(tensors), GetParam());
    torch::optim::AdamW reference(expected, torch_options(GetParam()));
    for (int step = 0; step < steps; ++step) {
      set_grads(tensors, expected);
      optimizer.step();
      reference.step();
    }
    const auto state = optimizer.state();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = "p" + std::to_string(i);
      if (ours == theirs) {
        expect_close(tensors[i], expected[i]);
      } else {
        const at::Tensor master = entry(state, name + ".master");
        expect_close(master, expected[i]);
        EXPECT_TRUE(same_bits(tensors[i], master.to(ours))) << name;
      }
    }
  }
};

TEST_P(LikeTorch, Float32) { compare(at::kFloat, at::kFloat); }
TEST_P(LikeTorch, Float64) { compare(at::kDouble, at::kDouble, 20); }
TEST_P(LikeTorch, BFloat16WithMaster) { compare(at::kBFloat16, at::kFloat); }
TEST_P(LikeTorch, Float16WithMaster) { compare(at::kHalf, at::kFloat, 20); }

INSTANTIATE_TEST_SUITE_P(AdamW, LikeTorch,
                         ::testing::Values(AdamWOptions{}, AdamWOptions{.weight_decay = 0},
                                           AdamWOptions{.lr = 3e-2, .weight_decay = 0.3},
                                           AdamWOptions{.beta1 = 0, .beta2 = 0.5, .eps = 1e-3},
                                           AdamWOptions{.lr = 0, .weight_decay = 0.1}));

TEST(AdamW, GroupsHaveTheirOwnRates) {
  const std::vector<at::Tensor> tensors = {parameter({4, 5}), parameter({5}), parameter({7})};
  const auto expected = copies_of(tensors);
  AdamW optimizer({{.parameters = {{"a", tensors[0]}}, .weight_decay = 0.3},
                   {.parameters = {{"b", tensors[1]}}, .lr_scale = 10},
                   {.parameters = {{"c", tensors[2]}}, .weight_decay = 0}},
                  {.lr = 1e-2, .weight_decay = 0.1});
  using Options = torch::optim::AdamWOptions;
  const auto group = [](const at::Tensor& tensor, const Options& options) {
    return torch::optim::OptimizerParamGroup({tensor}, std::make_unique<Options>(options));
  };
  torch::optim::AdamW reference({group(expected[0], Options(1e-2).weight_decay(0.3)),
                                 group(expected[1], Options(1e-1).weight_decay(0.1)),
                                 group(expected[2], Options(1e-2).weight_decay(0))});
  for (int step = 0; step < 100; ++step) {
    if (step == 50) {  // a schedule keeps the ratio
      optimizer.set_lr(1e-3);
      for (auto& theirs : reference.param_groups()) {
        auto& options = static_cast<Options&>(theirs.options());
        options.lr(options.lr() * 0.1);
      }
    }
    if (step == 70) {
      optimizer.groups()[2].lr_scale = 0.5;
      static_cast<Options&>(reference.param_groups()[2].options()).lr(5e-4);
    }
    set_grads(tensors, expected);
    optimizer.step();
    reference.step();
  }
  for (size_t i = 0; i < tensors.size(); ++i) expect_close(tensors[i], expected[i]);
}

TEST(AdamW, WithoutGradientNothingChanges) {
  const std::vector<at::Tensor> tensors = {parameter({9}), parameter({9})};
  const auto before = copies_of(tensors);
  AdamW optimizer(named(tensors), {.weight_decay = 0.5});
  tensors[0].mutable_grad() = at::randn({9});
  optimizer.step();
  optimizer.step();
  EXPECT_FALSE(same_bits(tensors[0], before[0]));
  EXPECT_TRUE(same_bits(tensors[1], before[1]));
  const auto state = optimizer.state();
  EXPECT_EQ(entry(state, "p0.step").item<int64_t>(), 2);
  EXPECT_EQ(entry(state, "p1.step").item<int64_t>(), 0);
}

TEST(AdamW, BitsDoNotDependOnThreads) {
  const int threads = at::get_num_threads();
  std::vector<std::vector<at::Tensor>> results;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    at::manual_seed(7);
    auto tensors = parameters_of_many_sizes();
    for (const auto& tensor : parameters_of_many_sizes(at::kBFloat16)) tensors.push_back(tensor);
    AdamW optimizer(named(tensors));
    for (int step = 0; step < 5; ++step) {
      set_grads(tensors, tensors);
      optimizer.step();
    }
    for (const NamedTensor& item : optimizer.state()) tensors.push_back(item.tensor);
    results.push_back(tensors);
  }
  at::set_num_threads(threads);
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(same_bits(results[0][i], results[1][i])) << i;
    EXPECT_TRUE(same_bits(results[0][i], results[2][i])) << i;
  }
}

TEST(AdamW, BitsDoNotDependOnPlaceInMemory) {
  const at::Tensor whole = parameter({1000}), gradient = at::randn({1000});
  AdamW one({{"whole", whole}});
  std::vector<at::Tensor> parts;
  for (const auto& [begin, end] : {std::pair{0, 1}, {1, 14}, {14, 333}, {333, 1000}}) {
    parts.push_back(copy_of(whole.slice(0, begin, end)));
    parts.back().mutable_grad() = gradient.slice(0, begin, end);
  }
  AdamW many(named(parts));
  whole.mutable_grad() = gradient;
  for (int step = 0; step < 3; ++step) {
    one.step();
    many.step();
  }
  EXPECT_TRUE(same_bits(at::cat(parts), whole));
}

// Strides that the kernels can walk, and strides that they cannot: then torch's operators work, as
// they do on CUDA.
class Strides : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void compare(const at::Tensor& odd) {
    const at::Tensor plain = odd.detach().clone(at::MemoryFormat::Contiguous).requires_grad_();
    AdamW first({{"p", odd}}), second({{"p", plain}});
    for (int step = 0; step < 10; ++step) {
      set_grads({odd}, {plain});
      if (step % 2 == 1) odd.mutable_grad() = odd.grad().clone(at::MemoryFormat::Preserve);
      if (step == 5) {  // a parameter that someone writes to is taken as it is
        const at::NoGradGuard no_grad;
        odd.mul_(2);
        plain.mul_(2);
      }
      first.step();
      second.step();
    }
    const auto ours = first.state(), expected = second.state();
    for (size_t i = 0; i < ours.size(); ++i) expect_close(ours[i].tensor, expected[i].tensor);
    if (odd.element_size() > 2) {
      expect_close(odd, plain);
    } else {
      EXPECT_TRUE(same_bits(odd, entry(ours, "p.master").to(odd.scalar_type())));
    }
  }
};

TEST_P(Strides, ChannelsLast) {
  const at::Tensor tensor = at::randn({2, 3, 4, 5}).to(GetParam());
  compare(tensor.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_());
}
TEST_P(Strides, Transposed) {
  compare(at::randn({6, 70}).to(GetParam()).t().detach().requires_grad_());
}
TEST_P(Strides, WithGaps) {
  compare(at::randn({6, 70}).to(GetParam()).slice(1, 3, 66, 2).detach().requires_grad_());
}

INSTANTIATE_TEST_SUITE_P(AdamW, Strides, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(AdamW, GradientsOfOtherTypes) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const auto grad_type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const at::Tensor tensor = parameter({100}, type);
      const at::Tensor expected = copy_of(tensor.to(at::kDouble));
      AdamW optimizer({{"p", tensor}}), reference({{"p", expected}});
      tensor.mutable_grad() = at::randn({100}).to(grad_type);
      expected.mutable_grad() = tensor.grad().to(at::kDouble);
      optimizer.step();
      reference.step();
      expect_close(tensor, expected.to(type),
                   type == at::kFloat || type == at::kDouble ? 1e-6 : 8e-3);
      expect_close(entry(optimizer.state(), "p.exp_avg"), entry(reference.state(), "p.exp_avg"));
    }
  }
}

TEST(AdamW, SparseGradientIsMadeDense) {
  const std::vector<at::Tensor> tensors = {parameter({5, 3})};
  const auto expected = copies_of(tensors);
  AdamW optimizer(named(tensors)), reference(named(expected));
  const at::Tensor indices = at::tensor({1, 4, 1}, at::kLong).unsqueeze(0);
  tensors[0].mutable_grad() = at::sparse_coo_tensor(indices, at::randn({3, 3}), {5, 3});
  expected[0].mutable_grad() = tensors[0].grad().to_dense();
  optimizer.step();
  reference.step();
  EXPECT_TRUE(same_bits(tensors[0], expected[0]));
}

TEST(AdamW, MasterKeepsWhatTheParameterCannot) {
  const at::Tensor tensor = at::ones({40}, at::kBFloat16).requires_grad_();
  AdamW optimizer({{"p", tensor}}, {.lr = 1e-4, .weight_decay = 0});
  for (int step = 0; step < 100; ++step) {  // each step is a fortieth of what bfloat16 resolves
    tensor.mutable_grad() = at::ones({40}, at::kBFloat16);
    optimizer.step();
  }
  expect_close(tensor, at::full({40}, 0.99), 4e-3);
  expect_close(entry(optimizer.state(), "p.master"), at::full({40}, 0.99), 1e-5);
}

TEST(AdamW, AutogradNoticesTheStep) {
  const at::Tensor tensor = parameter({3});
  AdamW optimizer({{"p", tensor}});
  tensor.mutable_grad() = at::randn({3});
  const at::Tensor loss = (tensor * tensor).sum();
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

constexpr AdamWOptions kRounded{.moments = MomentType::bfloat16, .seed = 3};

// A step whose moments are `value` before they are rounded.
at::Tensor rounded_moments(const NamedParameter& parameter, double value, uint64_t seed) {
  AdamW optimizer({parameter},
                  {.beta1 = 0, .beta2 = 0, .moments = MomentType::bfloat16, .seed = seed});
  parameter.tensor.mutable_grad() = at::full_like(parameter.tensor, value);
  optimizer.step();
  const auto state = optimizer.state();
  return at::stack({entry(state, parameter.name + ".exp_avg"),
                    entry(state, parameter.name + ".exp_avg_sq")})
      .to(at::kDouble);
}

TEST(RoundedMoments, AreRightOnAverage) {
  constexpr int64_t kCount = 200'000;
  constexpr float kValue = 1.003f;
  const at::Tensor moments =
      rounded_moments({"p", at::zeros({kCount}).requires_grad_()}, kValue, 1);
  const at::Tensor mean = moments[0], square = moments[1];
  // Five deviations of the mean of so many elements.
  EXPECT_NEAR(mean.mean().item<double>(), kValue, 5 * 0.0078 * 0.5 / std::sqrt(kCount));
  EXPECT_NEAR(square.mean().item<double>(), kValue * kValue, 5 * 0.0078 * 0.5 / std::sqrt(kCount));
  EXPECT_TRUE(mean.eq(1).logical_or(mean.eq(1.0078125)).all().item<bool>());
  // The two have other bits, and so have neighbours.
  const auto correlation = [](const at::Tensor& a, const at::Tensor& b) {
    return ((a - a.mean()) * (b - b.mean())).mean().item<double>() /
           (a.std() * b.std()).item<double>();
  };
  EXPECT_NEAR(correlation(mean, square), 0, 0.02);
  for (const int64_t distance : {1, 2, 4, 1024}) {
    const int64_t left = kCount - distance;
    EXPECT_NEAR(correlation(mean.narrow(0, 0, left), mean.narrow(0, distance, left)), 0, 0.02);
  }
  const auto other = [&](const char* name, uint64_t seed) {
    return rounded_moments({name, at::zeros({kCount}).requires_grad_()}, kValue, seed);
  };
  EXPECT_TRUE(at::equal(other("p", 1), moments));
  EXPECT_NEAR(correlation(other("q", 1)[0], mean), 0, 0.02);
  EXPECT_NEAR(correlation(other("p", 2)[0], mean), 0, 0.02);
}

// With beta2 0.999 one step takes a tenth of a percent away: less than half of what bfloat16
// resolves.
TEST(RoundedMoments, SmallDecaysAreNotLost) {
  constexpr int kSteps = 500;
  const at::Tensor tensor = at::zeros({20'000}).requires_grad_();
  AdamW optimizer({{"p", tensor}}, kRounded);
  tensor.mutable_grad() = at::ones_like(tensor);
  optimizer.step();
  const at::Tensor square = entry(optimizer.state(), "p.exp_avg_sq");
  at::Tensor nearest = at::full({}, 0.001, at::kBFloat16);
  tensor.mutable_grad().zero_();
  for (int step = 0; step < kSteps; ++step) {
    optimizer.step();
    nearest = (nearest.to(at::kFloat) * 0.999).to(at::kBFloat16);
  }
  const double expected = 0.001 * std::pow(0.999, kSteps);  // 0.0006
  EXPECT_NEAR(square.to(at::kDouble).mean().item<double>(), expected, 0.01 * expected);
  EXPECT_NEAR(nearest.item<double>(), 0.001, 1e-5);
}

// A whole tensor and slices of it: flat shards of several parameters with padding, columns, and
// what operators update.
TEST(RoundedMoments, SlicesHaveTheBitsOfTheWhole) {
  using layout::Placement;
  const auto moments = [](NamedParameter parameter, const at::Tensor& gradient) {
    AdamW optimizer({parameter}, kRounded);
    for (int step = 0; step < 3; ++step) {
      parameter.tensor.mutable_grad() = gradient.clone(at::MemoryFormat::Preserve);
      optimizer.step();
    }
    return at::stack({entry(optimizer.state(), parameter.name + ".exp_avg"),
                      entry(optimizer.state(), parameter.name + ".exp_avg_sq")});
  };
  const auto zeros = [](at::IntArrayRef sizes) { return at::zeros(sizes).requires_grad_(); };
  at::manual_seed(1);
  const at::Tensor grad_a = at::randn({70, 30}), grad_b = at::randn({5000, 10});
  const at::Tensor a = moments({"a", zeros({70, 30})}, grad_a);
  const at::Tensor b = moments({"b", zeros({5000, 10})}, grad_b);
  EXPECT_EQ(a.scalar_type(), at::kBFloat16);

  // Rows 3 to 69 of a, padding, rows 2 to 4990 of b.
  const Placement whole_a = Placement::whole("a", {70, 30}),
                  whole_b = Placement::whole("b", {5000, 10});
  const at::Tensor line = at::cat(
      {grad_a.slice(0, 3, 69).flatten(), at::zeros({4}), grad_b.slice(0, 2, 4990).flatten()});
  const at::Tensor flat = moments(
      {"unit",
       zeros({line.numel()}),
       {{whole_b.narrow(0, {2, 4990}, "dp"), 66 * 30 + 4}, {whole_a.narrow(0, {3, 69}, "dp"), 0}}},
      line);
  EXPECT_TRUE(at::equal(flat.slice(1, 0, 66 * 30), a.slice(1, 3, 69).flatten(1)));
  EXPECT_TRUE(at::equal(flat.slice(1, 66 * 30 + 4), b.slice(1, 2, 4990).flatten(1)));
  EXPECT_EQ(flat.slice(1, 66 * 30, 66 * 30 + 4).count_nonzero().item<int64_t>(), 0);

  const at::Tensor columns =
      moments({"a", zeros({70, 13}), {{whole_a.narrow(1, {7, 20}, "tp")}}}, grad_a.slice(1, 7, 20));
  EXPECT_TRUE(at::equal(columns, a.slice(2, 7, 20)));

  // Memory in another order is updated by operators, whose sums agree where they are exact.
  const at::Tensor exact = at::randint(-8, 8, {70, 30}) / 8.0;
  const AdamWOptions halves{.beta1 = 0.5, .beta2 = 0.5, .moments = MomentType::bfloat16, .seed = 3};
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor :
       {at::zeros({70, 30}), at::zeros({30, 70}).t(), at::zeros({70, 60}).slice(1, 0, 60, 2)}) {
    AdamW optimizer({{"a", tensor.detach().requires_grad_()}}, halves);
    for (int step = 0; step < 12; ++step) {
      optimizer.groups()[0].parameters[0].tensor.mutable_grad() = exact.clone();
      optimizer.step();
    }
    const auto state = optimizer.state();
    results.push_back(at::stack({entry(state, "a.exp_avg"), entry(state, "a.exp_avg_sq")}));
  }
  EXPECT_TRUE(at::equal(results[0], results[1]));
  EXPECT_TRUE(at::equal(results[0], results[2]));
}

TEST(RoundedMoments, EveryTypeOfParameter) {
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    at::manual_seed(1);
    const auto tensors = parameters_of_many_sizes(type), expected = copies_of(tensors);
    AdamW optimizer(named(tensors), kRounded), reference(named(expected));
    for (int step = 0; step < 10; ++step) {
      set_grads(tensors, expected);
      optimizer.step();
      reference.step();
    }
    const auto ours = optimizer.state(), theirs = reference.state();
    for (size_t i = 0; i < ours.size(); ++i) {
      const bool is_moment = ours[i].name.find("exp_avg") != std::string::npos;
      const bool is_small = is_moment && type != at::kDouble;
      EXPECT_EQ(ours[i].tensor.scalar_type(),
                is_small ? at::kBFloat16 : theirs[i].tensor.scalar_type());
      // A moment is a sum whose terms may cancel: its error is that of the terms.
      expect_close(ours[i].tensor, theirs[i].tensor, is_small ? 0.03 : 2e-3);
    }
    EXPECT_TRUE(type == at::kDouble || !at::equal(tensors[7], expected[7]));
  }
}

TEST(RoundedMoments, StatesOfEitherTypeAreLoaded) {
  const at::Tensor tensor = parameter({3, 5});
  AdamW wide({{"p", tensor}}), rounded({{"p", tensor}}, kRounded), again({{"p", tensor}});
  tensor.mutable_grad() = at::randn({3, 5});
  wide.step();
  rounded.load_state(wide.state());
  again.load_state(rounded.state());
  for (const char* name : {"p.exp_avg", "p.exp_avg_sq"}) {
    const at::Tensor nearest = entry(wide.state(), name).to(at::kBFloat16);
    EXPECT_TRUE(same_bits(entry(rounded.state(), name), nearest));
    EXPECT_TRUE(same_bits(entry(again.state(), name), nearest.to(at::kFloat)));
  }
  EXPECT_EQ(entry(rounded.state(), "p.step").item<int64_t>(), 1);
}

TEST(AdamW, BadInputIsNamed) {
  const at::Tensor tensor = parameter({2, 3});
  const auto with = [&](AdamWOptions options) { AdamW optimizer({{"w", tensor}}, options); };
  expect_error<ConfigError>("[AdamW] ... lr is -1 ... at least 0", [&] { with({.lr = -1}); });
  expect_error<ConfigError>("[AdamW] beta1 is 1, must be in [0, 1)", [&] { with({.beta1 = 1}); });
  expect_error<ConfigError>("[AdamW] beta2 is -0.5, must be in [0, 1)",
                            [&] { with({.beta2 = -0.5}); });
  expect_error<ConfigError>("[AdamW] ... eps is -1 ... at least 0", [&] { with({.eps = -1}); });
  expect_error<ConfigError>("weight_decay -0.1", [&] { with({.weight_decay = -0.1}); });
  const auto outside = layout::Placement::whole("w", {2, 3});
  AdamW sliced({{"w", tensor, {{outside, 1}}}}, kRounded);
  expect_error<ConfigError>("w (2, 3) ... from element 1 ... 'w', which has 6",
                            [&] { sliced.state(); });
  AdamW optimizer({{"w", tensor}});
  tensor.mutable_grad() = at::randn({3, 2}).t();
  optimizer.step();
  {
    const at::NoGradGuard no_grad;
    tensor.set_data(at::randn({2, 4}));
  }
  tensor.mutable_grad() = at::randn({2, 4});
  expect_error<ConfigError>("parameter 'w' is Float (2, 4) on cpu", [&] { optimizer.step(); });
  tensor.mutable_grad() = at::Tensor();
  tensor.set_data(at::randn({2, 3}));
  tensor.mutable_grad() = at::randn({3});
  expect_error<ConfigError>("gradient of 'w' has shape (3), must be (2, 3)",
                            [&] { optimizer.step(); });
}

}  // namespace
}  // namespace lockstep::optim
