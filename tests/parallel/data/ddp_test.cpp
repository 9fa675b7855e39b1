// SPDX-License-Identifier: Apache-2.0
// What DDP does with gradients, beyond following the curve of one process.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/core/error.h"
#include "tests/parallel/data/branches.h"
#include "tests/parallel/training.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

const parallel::DdpAdvancedOptions kEarly{.first_bucket_bytes = 1};

using parallel::DdpOptions;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Ddp, AveragesAndLeavesViewsOfBuckets) {
  comm::run_threads(2, [](comm::Group group) {
    at::Tensor flat;
    const auto look = [&](parallel::GradientBucket& bucket,
                          const comm::Group& g) -> std::function<void()> {
      flat = bucket.flat;
      EXPECT_TRUE(comm::is_symmetric(flat, g));
      return [work = comm::all_reduce(bucket.flat, g, {.op = comm::ReduceOp::avg})]() mutable {
        work.wait();
      };
    };
    auto ddp = parallel::ddp(Branches(), group, {.hook = look});
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& weight : ddp.module()->weights) weight.mutable_grad().reset();
      ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
      EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
      EXPECT_TRUE(ddp.module()->weights[2].grad().storage().is_alias_of(flat.storage()));
    }
  });
}

TEST(Ddp, SeparateGradientsKeepTheirMemory) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.advanced = {.gradient_as_bucket_view = false}});
    ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
    const at::Tensor first = ddp.module()->weights[0].grad();
    EXPECT_EQ(first.storage().nbytes(), 4 * sizeof(float));
    first.zero_();
    ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 2.0).backward();
    EXPECT_EQ(first[0].item<double>(), 2.5);
    EXPECT_TRUE(first.is_same(ddp.module()->weights[0].grad()));
  });
}

TEST(Ddp, SeveralBackwardPassesAddUp) {
  comm::run_threads(3, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group);
    ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
    at::Tensor loss = ddp.forward(std::vector<int>{0, 1, 2}, 10.0 * group.rank());
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_FLOAT_EQ(gradient(ddp.module(), 1), 12);
    loss.backward();
    EXPECT_FLOAT_EQ(gradient(ddp.module(), 1), 22);
    // Also where the wrapper's forward was not used.
    ddp.module()->forward({0, 1, 2}, 3.0 * group.rank()).backward();
    EXPECT_FLOAT_EQ(gradient(ddp.module(), 1), 25);
  });
}

TEST(Ddp, NoSyncAccumulatesAndSyncGradientsAverages) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group);
    {
      const auto guard = ddp.no_sync();
      ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
      EXPECT_EQ(gradient(ddp.module(), 0), group.rank() + 1.0);
    }
    ddp.module()->eval();
    ddp.sync_gradients();
    EXPECT_EQ(gradient(ddp.module(), 0), group.rank() + 1.0);
    ddp.module()->train();
    ddp.sync_gradients();
    EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
    // What was accumulated counts even where the last pass does not use it.
    {
      const auto guard = ddp.no_sync();
      ddp.forward(std::vector<int>{0}, group.rank() + 1.0).backward();
    }
    ddp.forward(std::vector<int>{1, 2}, 0.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 0), 3);
  });
}

TEST(Ddp, UnusedParametersAreNamed) {
  const auto errors = errors_of(3, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group);
    ddp.forward(group.rank() == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 2}, 1.0)
        .backward();
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, says("parameter w1 ... no gradient ... ranks 1, 2 of 3"));
    EXPECT_THAT(error, HasSubstr("find_unused_parameters"));
  }
}

TEST(Ddp, FindsUnusedParameters) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(
        Branches(), group, {.bucket_bytes = 1, .find_unused_parameters = true, .advanced = kEarly});
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& weight : ddp.module()->weights) weight.mutable_grad().reset();
      ddp.forward(group.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{0}, 2.0).backward();
      EXPECT_EQ(gradient(ddp.module(), 0), 2);
      EXPECT_EQ(gradient(ddp.module(), 1), 1);
      EXPECT_FALSE(ddp.module()->weights[2].grad().defined());
    }
    // Another set in another step.
    ddp.forward(std::vector<int>{2}, group.rank() * 2.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 2), 1);
    EXPECT_EQ(gradient(ddp.module(), 0), 2);
  });
}

TEST(Ddp, StaticGraphLeavesOutWhatNoStepUses) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group,
                             {.bucket_bytes = 1, .static_graph = true, .advanced = kEarly});
    EXPECT_EQ(ddp.buckets().size(), 3u);
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& weight : ddp.module()->weights) weight.mutable_grad().reset();
      ddp.forward(std::vector<int>{0, 2}, group.rank() + 1.0).backward();
      EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
      EXPECT_FALSE(ddp.module()->weights[1].grad().defined());
      EXPECT_EQ(ddp.buckets().size(), 2u);
    }
  });
}

TEST(Ddp, StaticGraphNamesWhatOnlyNoSyncUses) {
  const auto errors = errors_of(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.static_graph = true});
    ddp.forward(std::vector<int>{0, 1}, 1).backward();
    {
      const auto guard = ddp.no_sync();
      ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
    }
    ddp.forward(std::vector<int>{0, 1}, 1).backward();
  });
  EXPECT_THAT(errors, testing::Each(HasSubstr("parameter w2 got another gradient")));
}

TEST(Ddp, WhatNoSyncLeftMayBeDropped) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.find_unused_parameters = true});
    {
      const auto guard = ddp.no_sync();
      ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
    }
    for (at::Tensor& weight : ddp.module()->weights) weight.mutable_grad().reset();
    ddp.forward(std::vector<int>{0, 1}, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
    EXPECT_FALSE(ddp.module()->weights[2].grad().defined());
  });
}

TEST(Ddp, StaticGraphNamesWhatStopsGettingGradients) {
  const auto stopped = errors_of(4, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.static_graph = true});
    ddp.forward(std::vector<int>{0, 1}, 1.0).backward();
    ddp.forward(group.rank() % 2 ? std::vector<int>{0} : std::vector<int>{0, 1}, 1.0).backward();
  });
  for (const std::string& error : stopped)
    EXPECT_THAT(error, says("parameter w1 ... no gradient ... first step ... ranks 1, 3 of 4"));
  const auto began = errors_of(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.static_graph = true});
    ddp.forward(std::vector<int>{0, 1}, 1.0).backward();
    ddp.forward(std::vector<int>{0, 1, 2}, 1.0).backward();
  });
  for (const std::string& error : began) EXPECT_THAT(error, HasSubstr("parameter w2"));
}

// Recomputes its input's square times a weight in a backward of its own, inside the outer one.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            at::Tensor weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const c10::AutoGradMode with_grad(true);
    const auto saved = context->get_saved_variables();
    const at::Tensor x = saved[0].detach().requires_grad_();
    (x * saved[1]).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

// Two recomputed blocks share w; `other` is used in plain sight.
class RecomputingImpl : public torch::nn::Module {
 public:
  RecomputingImpl() {
    other = register_parameter("other", at::full({1}, 3.0));
    shared = register_parameter("shared", at::full({1}, 2.0));  // in the bucket that is sent first
  }
  at::Tensor forward(const at::Tensor& x) {
    return Recomputed::apply(Recomputed::apply(x * other, shared), shared).sum();
  }
  at::Tensor shared, other;
};
TORCH_MODULE(Recomputing);

TEST(Ddp, GradientsInSeveralPartsNeedStaticGraph) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Recomputing(), group,
                             {.bucket_bytes = 1, .static_graph = true, .advanced = kEarly});
    for (int step = 0; step < 3; ++step) {
      for (at::Tensor& weight : ddp.module()->parameters()) weight.mutable_grad().reset();
      ddp.forward(at::full({1}, group.rank() + 1.0)).backward();
      // d/dw (3 x w^2) = 6 x w, x = 1.5 on average
      EXPECT_FLOAT_EQ(ddp.module()->shared.grad().item<float>(), 18);
      EXPECT_FLOAT_EQ(ddp.module()->other.grad().item<float>(), 6);
    }
  });
  const auto errors = errors_of(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Recomputing(), group, {.bucket_bytes = 1, .advanced = kEarly});
    for (int step = 0; step < 2; ++step) ddp.forward(at::full({1}, 1.0)).backward();
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, says("parameter shared ... another gradient ... ranks 0, 1 of 2"));
    EXPECT_THAT(error, HasSubstr("static_graph"));
  }
}

TEST(Ddp, BucketsFollowTheOrderOfArrival) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(4, 64), group,
                             {.bucket_bytes = 512, .advanced = {.first_bucket_bytes = 256}});
    const auto names = [&] {
      std::vector<std::vector<std::string>> all;
      for (const auto& bucket : ddp.buckets()) all.push_back(bucket.parameters);
      return all;
    };
    using Names = std::vector<std::string>;
    EXPECT_THAT(names(), ElementsAre(Names{"w3"}, Names{"w2", "w1"}, Names{"w0"}));
    ddp.forward(std::vector<int>{3, 0, 2, 1}, 1.0).backward();
    // The sum is taken apart from its end.
    EXPECT_THAT(names(), ElementsAre(Names{"w1"}, Names{"w2", "w0"}, Names{"w3"}));
    EXPECT_EQ(ddp.buckets()[1].bytes, 512u);
    EXPECT_EQ(gradient(ddp.module(), 2), 1);
  });
}

TEST(Ddp, ReductionBeginsBeforeBackwardEnds) {
  for (const bool delay : {false, true}) {
    comm::run_threads(2, [delay](comm::Group group) {
      std::vector<std::string> events;
      const auto record = [&](parallel::GradientBucket& bucket,
                              const comm::Group& g) -> std::function<void()> {
        events.push_back("bucket " + std::to_string(bucket.index));
        return [work = comm::all_reduce(bucket.flat, g)]() mutable { work.wait(); };
      };
      auto ddp = parallel::ddp(Branches(2), group,
                               {.bucket_bytes = 1,
                                .hook = record,
                                .advanced = {.first_bucket_bytes = 1, .delay_all_reduce = delay}});
      ddp.module()->weights[0].register_hook(
          [&](const at::Tensor&) { events.push_back("last gradient"); });
      ddp.forward(std::vector<int>{0, 1}, 1.0).backward();
      if (delay) {
        EXPECT_THAT(events, ElementsAre("last gradient", "bucket 0", "bucket 1"));
      } else {
        EXPECT_THAT(events, ElementsAre("bucket 0", "last gradient", "bucket 1"));
      }
    });
  }
}

TEST(Ddp, MixedDtypesAndFrozenParameters) {
  comm::run_threads(2, [](comm::Group group) {
    auto model = torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
    model[1]->to(at::kDouble);
    const auto parameters = model->parameters();
    parameters[1].set_requires_grad(false);
    auto ddp = parallel::ddp(model, group);
    EXPECT_EQ(ddp.buckets().size(), 2u);  // one per dtype
    const at::Tensor x = at::full({1, 3}, group.rank() + 1.0);
    model[1]
        ->as<torch::nn::Linear>()
        ->forward(model[0]->as<torch::nn::Linear>()->forward(x).to(at::kDouble))
        .sum()
        .backward();
    EXPECT_FALSE(parameters[1].grad().defined());
    EXPECT_EQ(parameters[3].grad()[0].item<double>(), 1);
    const at::Tensor mine = parameters[0].grad().clone(), others = mine.clone();
    comm::broadcast(others, group).wait();
    EXPECT_TRUE(at::equal(mine, others));
  });
}

TEST(Ddp, OutputsOfManyTypes) {
  std::vector<at::Tensor> found;
  const at::Tensor t = at::zeros({1});
  parallel::detail::collect_tensors(
      std::tuple(t, std::vector{t, t}, std::pair(3, std::optional<int>())), found);
  EXPECT_EQ(found.size(), 3u);
}

TEST(Ddp, AGroupOfOneInstallsNothing) {
  Branches model;
  auto ddp = parallel::ddp(model, comm::Group(), {.find_unused_parameters = true});
  EXPECT_TRUE(ddp.buckets().empty());
  EXPECT_EQ(torch::autograd::impl::grad_accumulator(model->weights[0])->post_hooks().size(), 0u);
  ddp.forward(std::vector<int>{0}, 1.0).backward();
  ddp.sync_gradients();
  EXPECT_EQ(gradient(model, 0), 1);
}

TEST(Ddp, HooksGoWithTheWrapper) {
  comm::run_threads(2, [](comm::Group group) {
    Branches model;
    { const auto ddp = parallel::ddp(model, group); }
    model->forward({0}, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(model, 0), group.rank() + 1.0);
  });
}

TEST(Ddp, AnExceptionInBackwardDoesNotSpoilTheNext) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.bucket_bytes = 1, .advanced = kEarly});
    bool broken = true;
    ddp.module()->weights[0].register_hook([&](const at::Tensor&) {
      if (broken) throw std::runtime_error("user's own");
    });
    const std::vector<int> all{0, 1, 2};  // 0 comes last, when the buckets of the others are out
    EXPECT_THROW(ddp.forward(all, 1.0).backward(), std::runtime_error);
    broken = false;
    for (at::Tensor& weight : ddp.module()->weights) weight.mutable_grad().reset();
    // Also where the wrapper's forward was not used.
    ddp.module()->forward(all, group.rank() * 2.0).backward();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(gradient(ddp.module(), i), 1);
    ddp.forward(all, group.rank() * 2.0).backward();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(gradient(ddp.module(), i), 2);
  });
}

// One tensor under two names.
class TiedImpl : public torch::nn::Module {
 public:
  TiedImpl() {
    first = register_parameter("first", at::full({64}, 2.0));
    register_parameter("second", first);
  }
  at::Tensor forward(double scale) { return (first * first).sum() * scale; }
  at::Tensor first;
};
TORCH_MODULE(Tied);

TEST(Ddp, TiedWeightsAreReducedOnce) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Tied(), group, {.bucket_bytes = 1, .advanced = kEarly});
    EXPECT_EQ(ddp.buckets().size(), 1u);
    for (int step = 0; step < 3; ++step) {
      ddp.module()->first.mutable_grad().reset();
      ddp.forward(group.rank() + 1.0).backward();
      EXPECT_EQ(ddp.module()->first.grad()[63].item<double>(), 6);
    }
  });
}

TEST(Ddp, TwoForwardsWithBuffersBeforeOneBackward) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(ConvNetTask::make(1), group);
    const at::Tensor real = ddp.forward(ConvNetTask::batch(group.rank()).input);
    const at::Tensor fake = ddp.forward(ConvNetTask::batch(2 + group.rank()).input);
    (real + fake).sum().backward();
    const at::Tensor mine = ddp.module()->parameters()[0].grad().clone(), first = mine.clone();
    comm::broadcast(first, group).wait();
    EXPECT_TRUE(at::equal(mine, first));
  });
}

TEST(Ddp, AutogradGradIsNoBackward) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(MlpTask::make(1), group, {.static_graph = true});
    const at::Tensor x = MlpTask::batch(group.rank()).input.clone().requires_grad_();
    const at::Tensor output = ddp.forward(x);
    const at::Tensor slope = torch::autograd::grad({output.sum()}, {x}, {}, true, true)[0];
    EXPECT_FALSE(ddp.module()->parameters()[0].grad().defined());
    (output.sum() + slope.pow(2).sum()).backward();  // a gradient penalty
    const at::Tensor mine = ddp.module()->parameters()[0].grad().clone(), first = mine.clone();
    comm::broadcast(first, group).wait();
    EXPECT_TRUE(at::equal(mine, first));
  });
}

TEST(Ddp, SyncGradientsTeachesNothingAboutBackward) {
  for (const bool reproducible : {false, true}) {
    comm::run_threads(2, [&](comm::Group group) {
      auto ddp =
          parallel::ddp(Recomputing(), group, {.static_graph = true, .reproducible = reproducible});
      for (int step = 0; step < 2; ++step) {
        for (at::Tensor& weight : ddp.module()->parameters()) weight.mutable_grad().reset();
        {
          const auto guard = ddp.no_sync();
          ddp.forward(at::full({1}, group.rank() + 1.0)).backward();
        }
        ddp.sync_gradients();
        EXPECT_FLOAT_EQ(ddp.module()->other.grad().item<float>(), 6);
        for (at::Tensor& weight : ddp.module()->parameters()) weight.mutable_grad().reset();
        ddp.forward(at::full({1}, group.rank() + 1.0)).backward();
        EXPECT_FLOAT_EQ(ddp.module()->shared.grad().item<float>(), 18);
      }
    });
  }
}

TEST(Ddp, HooksCountTheBucketsTheySee) {
  comm::run_threads(2, [](comm::Group group) {
    std::vector<int> seen;
    const auto record = [&](parallel::GradientBucket& bucket,
                            const comm::Group& g) -> std::function<void()> {
      seen.push_back(bucket.index);
      return [work = comm::all_reduce(bucket.flat, g)]() mutable { work.wait(); };
    };
    auto ddp = parallel::ddp(
        Branches(), group,
        {.bucket_bytes = 1, .sparse_parameters = {"w2"}, .hook = record, .advanced = kEarly});
    EXPECT_EQ(ddp.buckets()[0].bytes, 0u);  // the sparse one is first, and no hook's business
    ddp.forward(std::vector<int>{0, 1, 2}, group.rank() + 1.0).backward();
    EXPECT_THAT(seen, ElementsAre(0, 1));
    EXPECT_EQ(ddp.module()->weights[2].grad().to_dense()[3].item<double>(), 1.5);
  });
}

TEST(Ddp, AHandleKeepsTheModel) {
  comm::run_threads(2, [](comm::Group group) {
    parallel::DdpHandle handle = parallel::ddp(Branches(), group, {.find_unused_parameters = true});
    handle.sync_gradients();
    EXPECT_EQ(handle.devices().size(), 1u);
  });
}

TEST(Ddp, ReportsGroupOptionsAndDevices) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.bucket_bytes = 77});
    EXPECT_EQ(ddp.rank(), group.rank());
    EXPECT_EQ(ddp.world_size(), 2);
    EXPECT_EQ(ddp.group().name(), group.name());
    EXPECT_EQ(ddp.options().bucket_bytes, 77u);
    EXPECT_THAT(ddp.devices(), ElementsAre(c10::Device(at::kCPU)));
  });
  const comm::Group alone;
  auto placed = parallel::ddp_on_detected_device(Branches(), alone);
  EXPECT_THAT(placed.devices(), ElementsAre(parallel::detected_device(alone)));
}

}  // namespace
}  // namespace lockstep::test
