// SPDX-License-Identifier: Apache-2.0
// What the wrapper of DDP does besides gradients: bucket sizes, devices, and what it passes on to
// the model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/parallel/data/branches.h"
#include "tests/parallel/training.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using parallel::DdpOptions;
using testing::ElementsAre;
using testing::HasSubstr;

// As train_ddp, with another bucket size in the middle of every accumulation.
template <class Task>
Curve train_with_changing_buckets(const comm::Group& group, int micro_batches, DdpOptions options) {
  auto ddp = parallel::ddp(Task::make(1), group, std::move(options));
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(kLearningRate));
  const int mine = micro_batches / group.size();
  Curve curve;
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    const at::Tensor sum = at::zeros({1}, at::kDouble);
    for (int i = 0; i < mine; ++i) {
      const Batch batch = Task::batch(step * micro_batches + group.rank() * mine + i);
      std::optional<parallel::NoSync> no_sync;
      if (i + 1 < mine) no_sync.emplace(ddp.no_sync());
      const at::Tensor loss = Task::loss(ddp.forward(batch.input), batch);
      (loss / mine).backward();
      sum.add_(loss.template item<double>());
      if (i == step % mine) {
        const size_t before = ddp.buckets().size();
        ddp.set_bucket_size(step % 2 == 0 ? 1 : size_t{1} << 20);
        EXPECT_EQ(ddp.options().bucket_bytes, step % 2 == 0 ? 1 : size_t{1} << 20);
        if (step % 2 == 0) {
          EXPECT_GT(ddp.buckets().size(), before);
        } else {
          EXPECT_LT(ddp.buckets().size(), before);
        }
      }
    }
    optimizer.step();
    comm::all_reduce(sum, group).wait();
    curve.losses.push_back(sum.item<double>() / micro_batches);
  }
  return finish(std::move(curve), *ddp.module());
}

struct BucketWay {
  DdpOptions options = {};
  parallel::GradientHook (*hook)() = nullptr;  // made by each rank: hooks have state
  double tolerance = 1e-5;
};

template <class Task>
void check_changing_buckets() {
  const Curve expected = train_alone<Task>(8);
  const std::vector<BucketWay> ways = {
      {},
      {{.find_unused_parameters = true}},
      {{.static_graph = true}},
      {{.uneven_inputs = true}},
      {{.reproducible = true}},
      {{.static_graph = true, .reproducible = true}},
      {{.advanced = {.gradient_as_bucket_view = false}}},
      {{.advanced = {.delay_all_reduce = true}}},
      {{}, [] { return parallel::hooks::fp16(); }, 2e-3},
      {{},
       [] {
         return parallel::hooks::power_sgd({.rank = 64, .start_step = 2, .min_compression = 0});
       },
       2e-4},
  };
  for (size_t way = 0; way < ways.size(); ++way) {
    SCOPED_TRACE(way);
    comm::run_threads(2, [&](comm::Group group) {
      DdpOptions options = ways[way].options;
      if (ways[way].hook != nullptr) options.hook = ways[way].hook();
      const Curve curve = train_with_changing_buckets<Task>(group, 8, options);
      EXPECT_EQ(difference(curve, expected, ways[way].tolerance), "");
      if (!options.reproducible) return;
      const Curve fixed = train_ddp<Task>(group, 8, options);
      EXPECT_EQ(curve.losses, fixed.losses);
      EXPECT_TRUE(at::equal(curve.weights, fixed.weights));
    });
  }
}

TEST(DdpBucketSize, TrainingIsTheSame) {
  check_changing_buckets<MlpTask>();
  check_changing_buckets<EmbeddingTask>();
}

TEST(DdpBucketSize, IsThatOfTheNextBackward) {
  comm::run_threads(2, [](comm::Group group) {
    std::vector<size_t> seen;
    const auto record = [&](parallel::GradientBucket& bucket,
                            const comm::Group& g) -> std::function<void()> {
      seen.push_back(bucket.names.size());
      return [work = comm::all_reduce(bucket.flat, g)]() mutable { work.wait(); };
    };
    auto ddp = parallel::ddp(Branches(4), group, {.hook = record});
    const auto step = [&] {
      seen.clear();
      ddp.zero_grad();
      ddp.forward(std::vector<int>{0, 1, 2, 3}, 1.0).backward();
    };
    step();
    EXPECT_THAT(seen, ElementsAre(4));
    ddp.set_bucket_size(32);  // two of the weights
    EXPECT_EQ(gradient(ddp.module(), 3), 2);
    step();
    EXPECT_THAT(seen, ElementsAre(2, 2));
    ddp.set_bucket_size(1);
    step();
    EXPECT_THAT(seen, ElementsAre(1, 1, 1, 1));
  });
}

TEST(DdpBucketSize, RanksThatDisagreeAreNamed) {
  const auto errors = errors_of(3, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group);
    ddp.set_bucket_size(group.rank() == 1 ? 2048 : 1024);
  });
  EXPECT_THAT(errors, testing::Each(says("size is 1024 on ranks 0, 2; 2048 on rank 1")));
  const auto zeros = errors_of(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group);
    ddp.set_bucket_size(0);
  });
  EXPECT_THAT(zeros, testing::Each(HasSubstr("0 on ranks 0, 1")));
  auto alone = parallel::ddp(Branches(), comm::Group());
  alone.set_bucket_size(99);
  EXPECT_EQ(alone.options().bucket_bytes, 99u);
  EXPECT_THROW(alone.set_bucket_size(0), ConfigError);
}

// From a hook on a tensor, and from a gradient hook.
TEST(DdpBucketSize, CannotChangeDuringABackward) {
  comm::run_threads(2, [](comm::Group group) {
    std::function<void()> in_hook;
    const auto hook = [&](parallel::GradientBucket& bucket,
                          const comm::Group& g) -> std::function<void()> {
      if (in_hook) in_hook();
      return [work = comm::all_reduce(bucket.flat, g)]() mutable { work.wait(); };
    };
    auto ddp = parallel::ddp(Branches(), group, {.hook = hook});
    const std::vector<int> all{0, 1, 2};
    const auto change = [&] { ddp.set_bucket_size(1); };
    const auto message = [&] {
      try {
        ddp.forward(all, 1.0).backward();
      } catch (const ConfigError& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    in_hook = change;
    EXPECT_THAT(message(), HasSubstr("set_bucket_size during a backward"));
    in_hook = {};
    const auto early = ddp.module()->weights[2].register_hook([&](const at::Tensor&) { change(); });
    EXPECT_THAT(message(), HasSubstr("set_bucket_size during a backward"));
    ddp.module()->weights[2].remove_hook(early);
    change();  // what failed does not stand in the way
    ddp.zero_grad();
    ddp.forward(all, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 0), 3);  // the hook adds
  });
}

TEST(DdpBucketSize, RanksWithoutDataFollow) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.uneven_inputs = true});
    const std::vector<int> all{0, 1, 2};
    ddp.forward(all, 1.0).backward();
    if (group.rank() == 0) {
      ddp.set_bucket_size(1);
      ddp.zero_grad();
      ddp.forward(all, 3.0).backward();
      EXPECT_EQ(gradient(ddp.module(), 0), 3);
      ddp.to(at::kCPU);
    }
    ddp.join();
    EXPECT_EQ(ddp.buckets().size(), 3u);
    EXPECT_EQ(ddp.options().bucket_bytes, 1u);
  });
}

// Its weight has no memory: inputs must be where it is.
class ElsewhereImpl : public torch::nn::Module {
 public:
  ElsewhereImpl() { weight = register_parameter("weight", at::empty({2}, at::kMeta)); }
  std::vector<at::Tensor> forward(const at::Tensor& x, at::Tensor& y,
                                  const std::vector<at::Tensor>& list,
                                  std::optional<at::Tensor> maybe, std::pair<at::Tensor, int> pair,
                                  const std::string& name, std::vector<int>& counts) {
    counts.push_back(static_cast<int>(name.size()));
    std::vector<at::Tensor> all{x * weight, y * weight, pair.first * weight};
    for (const at::Tensor& tensor : list) all.push_back(tensor * weight);
    if (maybe) all.push_back(*maybe * weight);
    return all;
  }
  at::Tensor weight;
};
TORCH_MODULE(Elsewhere);

TEST(DdpWrapper, MovesInputsToTheModel) {
  auto ddp = parallel::ddp(Elsewhere(), comm::Group());
  const at::Tensor x = at::ones({2});
  at::Tensor y = at::ones({2});
  std::vector<int> counts;
  const std::vector<at::Tensor> list{x, y};
  const auto outputs = ddp.forward(x, y, list, std::optional(x), std::pair(x, 3), "four", counts);
  EXPECT_EQ(outputs.size(), 6u);
  for (const at::Tensor& output : outputs) EXPECT_TRUE(output.is_meta());
  EXPECT_TRUE(y.is_cpu());              // the caller's own stays
  EXPECT_THAT(counts, ElementsAre(4));  // and is the one that the model gets, if it can be
  // Where there is nothing to move nothing is copied.
  at::Tensor here = at::ones({2}, at::kMeta);
  parallel::detail::Placed<at::Tensor&> placed(here, c10::Device(at::kMeta));
  EXPECT_EQ(&placed.get(), &here);
}

TEST(DdpWrapper, ForwardsToTheModel) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.reproducible = true});
    EXPECT_TRUE(ddp.is_training());
    ddp.eval();
    EXPECT_FALSE(ddp.module()->is_training());
    EXPECT_FALSE(ddp.is_training());
    ddp.train();
    EXPECT_TRUE(ddp.module()->is_training());
    EXPECT_TRUE(ddp.parameters()[1].is_same(ddp.module()->weights[1]));
    EXPECT_TRUE(ddp.named_parameters()["w2"].is_same(ddp.module()->weights[2]));

    const std::vector<int> all{0, 1, 2};
    const auto accumulate = [&] {
      const auto guard = ddp.no_sync();
      ddp.forward(all, 100.0).backward();
    };
    accumulate();
    ddp.zero_grad();  // the sums of reproducible mode too
    ddp.forward(all, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
    ddp.zero_grad();
    accumulate();
    ddp.to(at::kCPU);  // makes buckets again, and keeps the sums
    ddp.forward(all, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 2), 101.5);
    EXPECT_EQ(
        torch::autograd::impl::grad_accumulator(ddp.module()->weights[0])->post_hooks().size(), 1u);
  });
  auto alone = parallel::ddp(Branches(), comm::Group(), {.find_unused_parameters = true});
  alone.forward(std::vector<int>{0}, 2.0).backward();
  alone.to(at::kCPU);
  EXPECT_EQ(gradient(alone.module(), 0), 2);
  alone.zero_grad();
  EXPECT_FALSE(gradient(alone.module(), 0) > 0);
}

TEST(DdpWrapper, ParametersMayBeFrozenMeanwhile) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(Branches(), group, {.find_unused_parameters = true});
    at::Tensor& weight = ddp.module()->weights[1];
    weight.set_requires_grad(false);
    ddp.to(at::kCPU);
    ddp.set_bucket_size(1);
    EXPECT_FALSE(weight.requires_grad());
    const std::vector<int> all{0, 1, 2};
    ddp.forward(all, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 0), 1.5);
    EXPECT_FALSE(weight.grad().defined());
    weight.set_requires_grad(true);
    ddp.zero_grad();
    ddp.forward(all, group.rank() + 1.0).backward();
    EXPECT_EQ(gradient(ddp.module(), 1), 1.5);
  });
}

TEST(DdpWrapper, TakesTheDevicesOfAHost) {
  const std::vector<c10::Device> cpu_twice(2, at::kCPU);
  comm::run_threads(4,
                    [&](comm::Group group) {
                      auto ddp = parallel::ddp_on_devices(Branches(), group, cpu_twice);
                      EXPECT_THAT(ddp.devices(), ElementsAre(c10::Device(at::kCPU)));
                      Branches model;
                      parallel::ddp_on_devices(*model, group, cpu_twice);
                    },
                    {.backend = "thread"}, {0, 1, 0, 1});
  comm::run_threads(3,
                    [&](comm::Group group) {
                      const std::vector<c10::Device> gpus{{at::kCUDA, 3}, {at::kCUDA, 1}};
                      const std::vector<c10::Device> expected{gpus[0], gpus[0], gpus[1]};
                      EXPECT_EQ(parallel::device_among(gpus, group),
                                expected[static_cast<size_t>(group.rank())]);
                    },
                    {.backend = "thread"}, {0, 1, 1});
  // Too few for one of the hosts: all ranks refuse.
  std::vector<std::string> errors(3);
  comm::run_threads(3,
                    [&](comm::Group group) {
                      try {
                        parallel::ddp_on_devices(Branches(), group, {c10::Device(at::kCPU)});
                      } catch (const ConfigError& error) {
                        errors[static_cast<size_t>(group.rank())] = error.what();
                      }
                    },
                    {.backend = "thread"}, {0, 1, 1});
  EXPECT_THAT(errors, testing::Each(says("devices is 1 ... host has 2 ranks")));
}

}  // namespace
}  // namespace lockstep::test
