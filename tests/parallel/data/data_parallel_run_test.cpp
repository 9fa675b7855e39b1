// SPDX-License-Identifier: Apache-2.0
// DataParallel::run: what the modes compute, and how far replicas drift apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <latch>
#include <thread>
#include <typeinfo>

#include "lockstep/parallel/data/data_parallel.h"
#include "tests/parallel/data/replica_models.h"
#include "tests/support/says.h"

namespace lockstep::parallel {
namespace {

using test::says;
using ::testing::Each;
using ::testing::HasSubstr;

// A parameter that is registered twice, and that clone() therefore makes two of.
class TiedImpl : public torch::nn::Cloneable<TiedImpl> {
 public:
  TiedImpl() { reset(); }
  void reset() override {
    linear =
        register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)));
    again = register_parameter("again", linear->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear->forward(x)).matmul(again); }
  torch::nn::Linear linear{nullptr};
  at::Tensor again;
};
TORCH_MODULE(Tied);

struct TiedTask {
  static Tied make() {
    torch::manual_seed(3);
    return Tied();
  }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 3}, seed); }
};

std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(tensor); };
    if (std::none_of(result.begin(), result.end(), same)) result.push_back(tensor);
  }
  return result;
}

template <class Task>
void check_synchronous_run(size_t replicas) {
  SCOPED_TRACE(testing::Message() << replicas << " replicas of " << typeid(Task).name());
  constexpr int64_t kSteps = 20;
  auto alone = Task::make();
  auto model = Task::make();  // the same, by its seed
  const auto loss_of = [&](auto& net, size_t replica, int64_t step) {
    const uint64_t seed = static_cast<uint64_t>(step) * replicas + replica;
    return at::mse_loss(net.forward(Task::input(5, seed)), target(5, seed));
  };
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD alone_optimizer(distinct(alone->parameters()), options);
  torch::optim::SGD optimizer(distinct(model->parameters()), options);
  for (int64_t step = 0; step < kSteps; ++step) {
    alone_optimizer.zero_grad();
    for (size_t r = 0; r < replicas; ++r) loss_of(*alone, r, step).backward();
    for (at::Tensor& parameter : distinct(alone->parameters())) {
      parameter.mutable_grad().div_(static_cast<double>(replicas));
    }
    alone_optimizer.step();
  }
  auto parallel = data_parallel(model, {.devices = cpus(replicas)});
  const RunStats stats = parallel.run(kSteps, loss_of, [&] { optimizer.step(); });
  EXPECT_LT(largest_difference(model, alone), 1e-5);
  EXPECT_THAT(stats.steps, Each(kSteps));
  EXPECT_EQ(stats.steps.size(), replicas);
  EXPECT_EQ(stats.largest_lead, 0);
}

TEST(DataParallelRun, SynchronousIsOneProcess) {
  for (const size_t replicas : {1, 2, 3}) {
    check_synchronous_run<Mlp>(replicas);
    check_synchronous_run<Conv>(replicas);
    check_synchronous_run<TiedTask>(replicas);
  }
}

// One weight w with the loss w * w / 2: the gradient tells which w a replica had.
class WeightImpl : public torch::nn::Cloneable<WeightImpl> {
 public:
  WeightImpl() { reset(); }
  void reset() override { w = register_parameter("w", at::ones({}, at::kDouble)); }
  at::Tensor loss() { return w * w / 2; }
  at::Tensor w;
};
TORCH_MODULE(Weight);

struct Descent {
  Weight model;
  void operator()() const {
    const at::NoGradGuard no_grad;
    model->w.sub_(model->w.grad(), 0.1);
  }
  double value() const { return model->w.item<double>(); }
};

class SlowReplica : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(, SlowReplica, ::testing::Values(0, 1));

TEST_P(SlowReplica, IsNotWaitedForInAsynchronous) {
  constexpr int64_t kSteps = 6;
  const size_t slow = GetParam();
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2), .mode = Asynchronous{}});
  std::latch both_have_begun(2), fast_is_done(kSteps + 1);
  int64_t updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        at::Tensor loss = net.loss();
        if (step == 0) both_have_begun.arrive_and_wait();
        // Holds its first gradient back until the fast one has done everything.
        if (step == 0 && replica == slow) fast_is_done.arrive_and_wait();
        return loss;
      },
      [&] {
        update();
        if (++updates <= kSteps) fast_is_done.count_down();
      });
  EXPECT_THAT(stats.steps, Each(kSteps));
  EXPECT_THAT(stats.waits, Each(0));
  EXPECT_EQ(stats.largest_lead, kSteps - 1);
  // 6 steps of the fast one, one with the gradient at the initial weight, 5 of the slow one.
  double w = 1;
  for (int i = 0; i < 6; ++i) w -= 0.1 * w;
  w -= 0.1 * 1;
  for (int i = 0; i < 5; ++i) w -= 0.1 * w;
  EXPECT_NEAR(update.value(), w, 1e-12);
}

TEST(DataParallelRun, BoundedStalenessBoundsTheLead) {
  constexpr int64_t kSteps = 12;
  for (const int64_t bound : {0, 1, 3}) {
    SCOPED_TRACE(bound);
    Descent update;
    auto parallel =
        data_parallel(update.model, {.devices = cpus(3), .mode = BoundedStaleness{bound}});
    std::atomic<bool> exceeded = false;
    const RunStats stats = parallel.run(
        kSteps,
        [&](WeightImpl& net, size_t replica, int64_t step) {
          const auto now = parallel.stats();
          if (step > *std::min_element(now.steps.begin(), now.steps.end()) + bound) exceeded = true;
          // The slow replica takes a step only when each of the others has run into the bound.
          while (replica == 2 && !exceeded) {
            const auto seen = parallel.stats();
            const auto stuck = [&](size_t i) {
              return seen.steps[i] == kSteps ||
                     (seen.steps[i] == step + bound + 1 && seen.waits[i] > 0);
            };
            if (stuck(0) && stuck(1)) break;
            std::this_thread::yield();
          }
          return net.loss();
        },
        std::ref(update));
    EXPECT_FALSE(exceeded);
    EXPECT_EQ(stats.largest_lead, bound);
    EXPECT_THAT(stats.steps, Each(kSteps));
    EXPECT_LT(update.value(), 0.9);
  }
}

TEST_P(SlowReplica, IsLeftBehindWithSynchronous) {
  constexpr int64_t kSteps = 20;
  const size_t slow = GetParam();
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2)});
  std::latch both_have_begun(2), fast_is_done(2);
  int64_t updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        at::Tensor loss = net.loss();
        if (step == 10) both_have_begun.arrive_and_wait();
        if (step == 10 && replica == slow) fast_is_done.arrive_and_wait();
        if (step == kSteps - 1 && replica != slow) fast_is_done.count_down();
        return loss;
      },
      [&] {
        update();
        if (++updates == 10) parallel.set_mode(Asynchronous{});
      });
  EXPECT_EQ(updates, 10 + 2 * 10);
  EXPECT_EQ(stats.largest_lead, 9);
  EXPECT_TRUE(std::holds_alternative<Asynchronous>(parallel.mode()));
}

// Though one replica had finished when the mode was set, and the other had not.
TEST(DataParallelRun, SynchronousIsLeftTogether) {
  constexpr int64_t kSteps = 5;
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2)});
  int64_t updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        if (replica == 0 && step == 0) {
          while (parallel.stats().waits[1] == 0) std::this_thread::yield();
          parallel.set_mode(Asynchronous{});
        }
        return net.loss();
      },
      [&] {
        update();
        ++updates;
      });
  EXPECT_THAT(stats.steps, Each(kSteps));
  EXPECT_EQ(updates, 1 + 2 * (kSteps - 1));
}

TEST(DataParallelRun, SynchronousCanBeEnteredDuringARun) {
  constexpr int64_t kSteps = 20;
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2), .mode = Asynchronous{}});
  std::latch fast_is_ahead(2);
  int64_t updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        at::Tensor loss = net.loss();
        if (replica == 1 && step == 0) fast_is_ahead.arrive_and_wait();
        if (replica == 0 && step == 7) {
          parallel.set_mode(Synchronous{});
          fast_is_ahead.count_down();
        }
        return loss;
      },
      [&] {
        update();
        ++updates;
      });
  // The slow one catches up alone over steps 0 to 6; from 7 on there is one update a step.
  EXPECT_EQ(updates, 7 + 7 + (kSteps - 7));
  EXPECT_EQ(stats.largest_lead, 7);
  EXPECT_THAT(stats.steps, Each(kSteps));
  parallel.run(
      3, [](WeightImpl& net, size_t, int64_t) { return net.loss(); }, std::ref(update));
  EXPECT_EQ(parallel.stats().largest_lead, 0);
}

TEST(DataParallelRun, FailuresEndTheRun) {
  for (const SyncMode mode :
       {SyncMode(Synchronous{}), SyncMode(Asynchronous{}), SyncMode(BoundedStaleness{1})}) {
    Descent update;
    auto parallel = data_parallel(update.model, {.devices = cpus(3), .mode = mode});
    const auto fine = [](WeightImpl& net, size_t, int64_t) { return net.loss(); };
    // The others would have far to go.
    EXPECT_EQ(message_of<std::runtime_error>([&] {
                parallel.run(
                    1 << 30,
                    [&](WeightImpl& net, size_t replica, int64_t step) {
                      if (replica == 1 && step == 2) throw std::runtime_error("no more data");
                      return net.loss();
                    },
                    std::ref(update));
              }),
              "no more data");
    EXPECT_EQ(parallel.stats().steps[1], 2);
    EXPECT_EQ(message_of<std::runtime_error>(
                  [&] { parallel.run(5, fine, [] { throw std::runtime_error("no optimizer"); }); }),
              "no optimizer");
    EXPECT_THAT(message_of([&] {
                  parallel.run(
                      5, [](WeightImpl& net, size_t, int64_t) { return net.w.expand({3}); },
                      std::ref(update));
                }),
                HasSubstr("the loss has 3 elements, must have 1"));
    const RunStats stats = parallel.run(4, fine, std::ref(update));
    EXPECT_THAT(stats.steps, Each(4));
  }
}

TEST(DataParallelRun, AFailedStepLeavesNoGradients) {
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(3)});
  const auto fails = [&](WeightImpl& net, size_t replica, int64_t) -> at::Tensor {
    if (replica != 1) return net.loss();
    // The others have their gradients, and wait for this one's.
    while (parallel.stats().waits[0] == 0 || parallel.stats().waits[2] == 0) {
      std::this_thread::yield();
    }
    throw std::runtime_error("no more data");
  };
  EXPECT_EQ(message_of<std::runtime_error>([&] { parallel.run(1 << 30, fails, std::ref(update)); }),
            "no more data");
  EXPECT_EQ(update.value(), 1);
  update.model->w.mutable_grad() = at::Tensor();
  parallel.reduce_gradients();
  EXPECT_FALSE(update.model->w.grad().defined());
}

TEST(DataParallelRun, NestedRunsAreRefused) {
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2)});
  EXPECT_THAT(message_of([&] {
                parallel.run(
                    2,
                    [&](WeightImpl& net, size_t, int64_t) {
                      parallel.run(
                          1, [](WeightImpl& inner, size_t, int64_t) { return inner.loss(); },
                          [] {});
                      return net.loss();
                    },
                    std::ref(update));
              }),
              says("one thing"));
}

}  // namespace
}  // namespace lockstep::parallel
