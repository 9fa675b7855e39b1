// SPDX-License-Identifier: Apache-2.0
// DataParallel over replicas on the CPU, against one process.
#include "lockstep/parallel/data/data_parallel.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <thread>

#include "lockstep/nn/linear.h"
#include "lockstep/optim/autocast.h"
#include "tests/parallel/data/replica_models.h"
#include "tests/support/says.h"

namespace lockstep::parallel {
namespace {

using test::says;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Task>
class DataParallelTask : public ::testing::Test {};
using Tasks = ::testing::Types<Mlp, Conv>;
TYPED_TEST_SUITE(DataParallelTask, Tasks);

template <class Task, class Optimizer, class Options>
void follow_one_process(size_t replicas, int64_t rows, const Options& options) {
  SCOPED_TRACE(testing::Message() << replicas << " replicas, " << rows << " rows");
  auto alone = Task::make();
  auto model = copy_of(alone);
  auto parallel = data_parallel(model, {.devices = cpus(replicas)});
  Optimizer alone_optimizer(alone->parameters(), options), optimizer(model->parameters(), options);
  for (uint64_t step = 0; step < 20; ++step) {
    const at::Tensor x = Task::input(rows, step), y = target(rows, step);
    const at::Tensor expected = at::mse_loss(alone->forward(x), y);
    const at::Tensor loss = at::mse_loss(parallel.forward(x), y);
    ASSERT_LT(difference(loss, expected), 1e-5) << "step " << step;
    alone_optimizer.zero_grad();
    optimizer.zero_grad();
    expected.backward();
    loss.backward();
    parallel.sync_gradients();
    ASSERT_LT(largest_difference(alone, model, [](const at::Tensor& p) { return p.grad(); }), 1e-5)
        << "step " << step;
    alone_optimizer.step();
    optimizer.step();
  }
}

TYPED_TEST(DataParallelTask, FollowsOneProcess) {
  for (const size_t replicas : {1, 2, 3, 4}) {
    for (const int64_t rows : {12, 10, 2, 1}) {  // even, uneven, fewer rows than replicas
      follow_one_process<TypeParam, torch::optim::SGD>(
          replicas, rows, torch::optim::SGDOptions(0.05).momentum(0.9));
      follow_one_process<TypeParam, torch::optim::Adam>(replicas, rows,
                                                        torch::optim::AdamOptions(1e-3));
    }
  }
}

// The same bits again, whichever replica is faster.
TYPED_TEST(DataParallelTask, IsDeterministic) {
  const auto start = TypeParam::make();
  const auto gradients = [&] {
    auto model = copy_of(start);
    auto parallel = data_parallel(model, {.devices = cpus(3)});
    at::mse_loss(parallel.forward(TypeParam::input(11, 0)), target(11, 0)).backward();
    parallel.reduce_gradients();
    return model->parameters();
  };
  const auto first = gradients(), second = gradients();
  for (size_t i = 0; i < first.size(); ++i)
    EXPECT_TRUE(at::equal(first[i].grad(), second[i].grad()));
}

TEST(DataParallel, AccumulatesOverSeveralForwards) {
  auto alone = Mlp::make();
  auto model = copy_of(alone);
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  std::vector<at::Tensor> losses;
  for (uint64_t k = 0; k < 3; ++k) {
    at::mse_loss(alone->forward(Mlp::input(8, k)), target(8, k)).backward();
    losses.push_back(at::mse_loss(parallel.forward(Mlp::input(8, k)), target(8, k)));
  }
  // All graphs are valid though replicas were given the parameters again in between.
  losses[0].backward();
  parallel.reduce_gradients();
  losses[1].backward();
  losses[2].backward();
  parallel.reduce_gradients();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_LT(difference(model->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-6);
  }
  parallel.reduce_gradients();  // replicas have nothing left
  EXPECT_LT(difference(model->parameters()[0].grad(), alone->parameters()[0].grad()), 1e-6);
}

TEST(DataParallel, TakesSeveralInputsAndGathersScalars) {
  class Weighted : public torch::nn::Cloneable<Weighted> {
   public:
    Weighted() { reset(); }
    void reset() override { scale = register_parameter("scale", at::full({1}, 2.0)); }
    at::Tensor forward(const at::Tensor& x, const at::Tensor& weight) {
      return (x * weight * scale).sum();
    }
    at::Tensor scale;
  };
  auto parallel = data_parallel(std::make_shared<Weighted>(), {.devices = cpus(2)});
  const at::Tensor x = at::arange(4, at::kFloat), weight = at::full({4}, 10.0);
  EXPECT_TRUE(at::equal(parallel.forward(x, weight), at::tensor({20.0f, 100.0f})));
  EXPECT_THAT(message_of([&] {
                parallel.forward(x, at::ones({3, 2}));
              }),
              says("inputs are (4), (3, 2) ... dimension 0"));
  EXPECT_THAT(message_of([&] { parallel.forward(at::ones({}), weight); }),
              HasSubstr("inputs are ()"));
}

TEST(DataParallel, ForwardParallelTakesOneInputPerDevice) {
  auto model = Mlp::make();
  auto parallel = data_parallel(model, {.devices = cpus(3)});
  std::vector<at::Tensor> inputs;
  for (uint64_t i = 0; i < 3; ++i) inputs.push_back(Mlp::input(static_cast<int64_t>(i) + 1, i));
  const auto outputs = parallel.forward_parallel(inputs);
  ASSERT_EQ(outputs.size(), 3U);
  for (size_t i = 0; i < 3; ++i) EXPECT_LT(difference(outputs[i], model->forward(inputs[i])), 1e-6);
  inputs.pop_back();
  EXPECT_THAT(message_of([&] { parallel.forward_parallel(inputs); }), says("inputs is 2 ... 3"));
}

TEST(DataParallel, ReplicasFollowTheModel) {
  ConvNet model;
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  const at::Tensor x = Conv::input(4, 0);
  model->conv->weight.data().mul_(0.5);  // a change that no version counter shows
  model->head->weight.set_requires_grad(false);
  model->head->eval();
  const at::Tensor output = parallel.forward(x);
  EXPECT_LT(difference(output, model->forward(x)), 1e-6);
  output.sum().backward();
  parallel.reduce_gradients();
  EXPECT_FALSE(model->head->weight.grad().defined());
  EXPECT_TRUE(model->head->bias.grad().defined());
  parallel.run(
      1,
      [&](ConvNetImpl& net, size_t, int64_t) {
        EXPECT_TRUE(net.is_training());
        EXPECT_FALSE(net.head->is_training());
        EXPECT_FALSE(net.head->weight.requires_grad());
        return net.forward(x).sum();
      },
      [] {});
  model->to(at::kDouble);
  EXPECT_EQ(parallel.forward(x.to(at::kDouble)).scalar_type(), at::kDouble);
}

class Float8NetImpl : public torch::nn::Cloneable<Float8NetImpl> {
 public:
  Float8NetImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", nn::Linear(16, 16));
    linear->float8 = linear->float8_cached = true;
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Float8Net);

// Weights reach replicas without a new version, by which codes that are kept would be known to be
// old.
TEST(DataParallel, ReplicasCastTheWeightsOfEachStep) {
  Float8Net model;
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  const at::Tensor x = random({1, 16}, 1).repeat({4, 1});
  for (const double value : {0.5, 2.0}) {
    {
      const at::NoGradGuard no_grad;
      model->linear->weight.fill_(value);
      model->linear->bias.zero_();
    }
    const at::Tensor y = parallel.forward(x);
    EXPECT_TRUE(at::equal(y[0], y[3])) << value;  // of replica 0, of replica 1
  }
}

TEST(DataParallel, ReplicasSeeTheCallersModes) {
  auto model = Mlp::make();
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(parallel.forward(Mlp::input(4, 0)).requires_grad());
  }
  EXPECT_TRUE(parallel.forward(Mlp::input(4, 0)).requires_grad());
  EXPECT_EQ(parallel.forward(Mlp::input(4, 0)).scalar_type(), at::kFloat);
  const auto under_autocast = [&] {
    const optim::AutocastGuard autocast({.device = at::kCPU});
    return parallel.forward(Mlp::input(4, 0));
  };
  const at::Tensor before = under_autocast();
  EXPECT_EQ(before.scalar_type(), at::kBFloat16);
  // Weights that were cast are kept, but not for longer than they are true.
  model->parameters().back().data().add_(1);
  EXPECT_TRUE(at::allclose(under_autocast().to(at::kFloat), before.to(at::kFloat) + 1, 0, 0.02));
  const optim::AutocastGuard autocast({.device = at::kCPU});
  std::vector<std::vector<double>> losses(2);
  parallel.run(
      3,
      [&](torch::nn::SequentialImpl& net, size_t replica, int64_t) {
        const at::Tensor loss = net.forward(Mlp::input(4, 0)).to(at::kFloat).mean();
        losses[replica].push_back(loss.item<double>());
        return loss;
      },
      [&] { model->parameters().back().data().add_(1); });
  for (const auto& loss : losses) {
    EXPECT_NEAR(loss[1], loss[0] + 1, 0.02);
    EXPECT_NEAR(loss[2], loss[0] + 2, 0.02);
  }
}

TEST(DataParallel, KeepsTheBuffersOfReplicaZero) {
  torch::nn::Sequential alone(torch::nn::Linear(6, 3), torch::nn::BatchNorm1d(3));
  auto model = copy_of(alone);
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  const auto check = [&] {
    for (size_t i = 0; i < alone->buffers().size(); ++i) {
      EXPECT_LT(difference(alone->buffers()[i], model->buffers()[i]), 1e-6);
    }
  };
  for (uint64_t k = 0; k < 3; ++k) {
    const at::Tensor x = Mlp::input(8, k);
    parallel.forward(x);
    alone->forward(x.narrow(0, 0, 4));
    check();
  }
  for (const SyncMode mode : {SyncMode(Synchronous{}), SyncMode(BoundedStaleness{0})}) {
    parallel.set_mode(mode);
    parallel.run(
        3,
        [](torch::nn::SequentialImpl& net, size_t replica, int64_t step) {
          return net.forward(Mlp::input(4, static_cast<uint64_t>(step) + 10 * replica)).sum();
        },
        [] {});
    for (uint64_t step = 0; step < 3; ++step) alone->forward(Mlp::input(4, step));
    check();
  }
}

// w^2 / 2 times each row: its gradient tells which w a replica had, and which rows.
class ParabolaImpl : public torch::nn::Cloneable<ParabolaImpl> {
 public:
  ParabolaImpl() { reset(); }
  void reset() override { w = register_parameter("w", at::ones({}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return w * w / 2 * x; }
  at::Tensor w;
};
TORCH_MODULE(Parabola);

at::Tensor one_row(double value) { return at::full({1}, value, at::kDouble); }

struct ParabolaSteps {
  explicit ParabolaSteps(SyncMode mode, size_t replicas = 3)
      : parallel(data_parallel(model, {.devices = cpus(replicas), .mode = mode})) {}

  // One loss for the whole batch.
  void backward_of_batch(const std::vector<double>& rows) {
    parallel.forward(at::tensor(rows, at::kDouble)).sum().backward();
  }
  // A loss for each replica.
  void backward_of_replicas(const std::vector<double>& rows) {
    std::vector<at::Tensor> inputs;
    for (const double row : rows) inputs.push_back(one_row(row));
    for (const at::Tensor& output : parallel.forward_parallel(inputs)) output.sum().backward();
  }
  // The gradients that each update is made with, for a descent that halves w at a gradient of w.
  std::vector<double> sync() {
    std::vector<double> seen;
    parallel.sync_gradients([&] {
      seen.push_back(gradient());
      const at::NoGradGuard no_grad;
      model->w.sub_(model->w.grad(), 0.5);
    });
    return seen;
  }
  double gradient() const { return model->w.grad().item<double>(); }

  Parabola model;
  DataParallel<Parabola> parallel;
};

TEST(DataParallelSync, AveragesOverReplicas) {
  ParabolaSteps steps(Synchronous{});
  steps.backward_of_replicas({3, 6, 9});
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 6);
  steps.parallel.sync_gradients();  // replicas have nothing left
  EXPECT_DOUBLE_EQ(steps.gradient(), 6);
  // What was averaged before is not averaged again; two backward passes before one call add up.
  steps.backward_of_replicas({3, 6, 9});
  steps.backward_of_replicas({30, 60, 90});
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 72);
  // Nor where replica 0 has no part in the loss.
  const auto outputs = steps.parallel.forward_parallel({one_row(1), one_row(2), one_row(3)});
  (outputs[1] + outputs[2]).sum().backward();
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 72 + 5.0 / 3);
  // Gradients may be cleared between forward and backward.
  const auto again = steps.parallel.forward_parallel({one_row(1), one_row(2), one_row(3)});
  steps.model->zero_grad();
  for (const at::Tensor& output : again) output.sum().backward();
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 2);
  // The loss of a batch has its average in it, or has none.
  steps.parallel.zero_grad();
  steps.backward_of_batch({3, 6, 9, 12});
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 30);
}

TEST(DataParallelSync, DoesNothingInEvalMode) {
  ParabolaSteps steps(Synchronous{});
  steps.backward_of_replicas({3, 6, 9});
  steps.parallel.eval();
  steps.parallel.sync_gradients([] { ADD_FAILURE() << "an update in eval mode"; });
  EXPECT_DOUBLE_EQ(steps.gradient(), 3);  // of replica 0
  steps.parallel.train();
  steps.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 6);
}

TEST(DataParallelSync, ModesDecideWhatAnUpdateIsMadeOf) {
  const auto of_replicas = [](SyncMode mode) {
    ParabolaSteps steps(mode);
    steps.backward_of_replicas({0.5, 1, 1.5});
    return steps.sync();
  };
  EXPECT_THAT(of_replicas(Synchronous{}), ElementsAre(1));
  EXPECT_THAT(of_replicas(Asynchronous{}), ElementsAre(0.5, 1, 1.5));
  EXPECT_THAT(of_replicas(BoundedStaleness{0}), ElementsAre(1));
  EXPECT_THAT(of_replicas(BoundedStaleness{1}), ElementsAre(0.5, 1.25));
  EXPECT_THAT(of_replicas(BoundedStaleness{2}), ElementsAre(0.5, 1, 1.5));
  EXPECT_THAT(of_replicas(BoundedStaleness{1000}), ElementsAre(0.5, 1, 1.5));

  ParabolaSteps steps(Synchronous{});
  const auto of_batch = [&](SyncMode mode, const std::vector<double>& rows) {
    steps.model->w.data().fill_(1);
    steps.parallel.zero_grad();
    steps.parallel.set_mode(mode);  // at run time
    steps.backward_of_batch(rows);
    return steps.sync();
  };
  EXPECT_THAT(of_batch(Synchronous{}, {0.5, 1, 1.5}), ElementsAre(3));
  EXPECT_THAT(of_batch(Asynchronous{}, {0.5, 1, 1.5}), ElementsAre(0.5, 1, 1.5));
  EXPECT_THAT(of_batch(BoundedStaleness{1}, {0.5, 1, 1.5}), ElementsAre(0.5, 2.5));
  EXPECT_THAT(of_batch(Asynchronous{}, {0.5, 1}), ElementsAre(0.5, 1));  // replica 2 is idle
  // All updates are in the values of the next step: w is 1 - (0.5 + 1) / 2.
  steps.parallel.zero_grad();
  steps.backward_of_replicas({1, 2, 4});
  EXPECT_THAT(steps.sync(), ElementsAre(0.25, 0.5, 1));
}

TEST(DataParallelSync, AFailedUpdateLeavesTheOthersForTheNext) {
  ParabolaSteps steps(Asynchronous{});
  steps.backward_of_replicas({1, 2, 4});
  int updates = 0;
  EXPECT_EQ(message_of<std::runtime_error>([&] {
              steps.parallel.sync_gradients([&] {
                if (++updates == 2) throw std::runtime_error("no optimizer");
              });
            }),
            "no optimizer");
  EXPECT_THAT(steps.sync(), testing::Contains(4));
  EXPECT_THAT(steps.parallel.forward(one_row(1)).size(0), 1);
}

TEST(DataParallelSync, SaysWhatItCannotDo) {
  ParabolaSteps steps(Asynchronous{});
  steps.backward_of_replicas({1, 2, 4});
  EXPECT_THAT(message_of([&] { steps.parallel.sync_gradients(); }),
              says("3 updates ... 3 replicas"));
  steps.backward_of_batch({1, 2, 4});
  EXPECT_THAT(message_of([&] { steps.sync(); }), HasSubstr("forward and of forward_parallel"));
  steps.parallel.zero_grad();
  steps.backward_of_batch({1, 2, 4});
  EXPECT_THAT(steps.sync(), ElementsAre(1, 2, 4));
  EXPECT_THAT(message_of([&] {
                steps.parallel.sync_gradients([&] { steps.parallel.forward(one_row(1)); });
              }),
              says("one thing"));
  // One replica has one update, in all modes.
  ParabolaSteps alone(Asynchronous{}, 1);
  alone.backward_of_replicas({5});
  alone.parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(alone.gradient(), 5);
}

TEST(DataParallel, ForwardsToTheModel) {
  ParabolaSteps steps(Synchronous{});
  auto& parallel = steps.parallel;
  parallel.eval();
  EXPECT_FALSE(steps.model->is_training());
  EXPECT_FALSE(parallel.is_training());
  parallel.train();
  EXPECT_TRUE(steps.model->is_training());
  EXPECT_TRUE(parallel.parameters()[0].is_same(steps.model->w));
  EXPECT_TRUE(parallel.named_parameters()["w"].is_same(steps.model->w));

  // A step that is thrown away leaves nothing, in replicas neither.
  steps.backward_of_replicas({100, 100, 100});
  parallel.zero_grad();
  EXPECT_FALSE(steps.model->w.grad().defined() && steps.gradient() != 0);
  steps.backward_of_replicas({3, 6, 9});
  parallel.to(at::kCPU);
  parallel.sync_gradients();
  EXPECT_DOUBLE_EQ(steps.gradient(), 6);
  EXPECT_EQ(parallel.devices(), cpus(3));
  EXPECT_EQ(parallel.forward(at::ones({5}, at::kDouble)).size(0), 5);
}

TEST(DataParallel, DetectsDevices) {
  EXPECT_FALSE(detected_devices().empty());
  EXPECT_EQ(data_parallel(Mlp::make()).devices(), detected_devices());
}

TEST(DataParallel, RefusesWhatCannotWork) {
  EXPECT_THAT(message_of([] { data_parallel(Mlp::make(), {.devices = {}}); }),
              says("devices is 0 ... at least 1"));
  EXPECT_THAT(message_of([] { data_parallel(Mlp::make(), {.mode = BoundedStaleness{-1}}); }),
              says("BoundedStaleness is -1 ... at least 0"));
  auto parallel = data_parallel(Mlp::make());
  EXPECT_THAT(message_of([&] { parallel.set_mode(BoundedStaleness{-2}); }), HasSubstr("is -2"));
  EXPECT_THAT(message_of([&] {
                parallel.run(
                    -1, [](auto&, size_t, int64_t) { return at::Tensor(); }, [] {});
              }),
              says("steps is -1 ... at least 0"));
}

TEST(DataParallel, SaysWhichModelCannotBeCloned) {
  class Plain : public torch::nn::Module {
   public:
    Plain() : torch::nn::Module("Plain") {
      linear = register_module("linear", torch::nn::Linear(6, 3));
    }
    at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
    torch::nn::Linear linear{nullptr};
  };
  EXPECT_THAT(message_of([] { data_parallel(std::make_shared<Plain>(), {.devices = cpus(2)}); }),
              HasSubstr("[DataParallel] Plain cannot be replicated"));
  // One replica is the model itself.
  auto alone =
      data_parallel(std::make_shared<Plain>(), {.devices = cpus(1), .mode = Asynchronous{}});
  EXPECT_EQ(alone.forward(Mlp::input(4, 0)).size(0), 4);
  alone.run(
      2, [](Plain& net, size_t, int64_t) { return net.forward(Mlp::input(2, 0)).sum(); }, [] {});
}

TEST(DataParallel, ReplicasShareTheCores) {
  const int before = at::get_num_threads();
  at::set_num_threads(6);
  {
    auto parallel = data_parallel(Mlp::make(), {.devices = cpus(3)});
    std::vector<int> threads(3);
    parallel.run(
        1,
        [&](torch::nn::SequentialImpl& net, size_t replica, int64_t) {
          threads[replica] = at::get_num_threads();
          return net.forward(Mlp::input(2, 0)).sum();
        },
        [] {});
    EXPECT_THAT(threads, Each(2));
    EXPECT_EQ(at::get_num_threads(), 6);
    int later = 0;
    std::jthread([&] { later = at::get_num_threads(); }).join();
    EXPECT_EQ(later, 6);
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace lockstep::parallel
