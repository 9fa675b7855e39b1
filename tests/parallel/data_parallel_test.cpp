// DataParallel over replicas on the CPU, against one process; and how far replicas drift apart.
#include "lockstep/parallel/data/data_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <latch>
#include <thread>
#include <typeinfo>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<c10::Device> cpus(size_t count) { return std::vector<c10::Device>(count, at::kCPU); }

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

struct Mlp {
  static torch::nn::Sequential make() {
    return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::Functional(at::tanh),
                                 torch::nn::Linear(16, 3));
  }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 6}, seed); }
};

class ConvNetImpl : public torch::nn::Cloneable<ConvNetImpl> {
 public:
  ConvNetImpl() { reset(); }
  void reset() override {
    conv = register_module("conv", torch::nn::Conv2d(2, 4, 3));
    head = register_module("head", torch::nn::Linear(4 * 4 * 4, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(at::relu(conv->forward(x)).flatten(1));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

struct Conv {
  static ConvNet make() { return ConvNet(); }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 2, 6, 6}, seed); }
};

at::Tensor target(int64_t rows, uint64_t seed) { return random({rows, 3}, seed + 1000); }

template <class Model>
Model copy_of(const Model& model) {
  return Model(std::dynamic_pointer_cast<typename Model::ContainedType>(model->clone()));
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

template <class A, class B>
double largest_difference(const A& a, const B& b) {
  double largest = 0;
  const auto as = a->parameters(), bs = b->parameters();
  for (size_t i = 0; i < as.size(); ++i) largest = std::max(largest, difference(as[i], bs[i]));
  return largest;
}

template <class Error = ConfigError, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// ---- forward and reduce_gradients ----

template <class Task>
class DataParallelTask : public ::testing::Test {};
using Tasks = ::testing::Types<Mlp, Conv>;
TYPED_TEST_SUITE(DataParallelTask, Tasks);

TYPED_TEST(DataParallelTask, FollowsOneProcess) {
  for (const size_t replicas : {1, 2, 3, 4}) {
    for (const int64_t rows : {12, 10, 2, 1}) {  // even, uneven, fewer rows than replicas
      SCOPED_TRACE(testing::Message() << replicas << " replicas, " << rows << " rows");
      auto alone = TypeParam::make();
      auto model = copy_of(alone);
      auto parallel = data_parallel(model, {.devices = cpus(replicas)});
      torch::optim::Adam alone_step(alone->parameters(), 1e-2), step(model->parameters(), 1e-2);
      for (uint64_t k = 0; k < 20; ++k) {
        const at::Tensor x = TypeParam::input(rows, k), y = target(rows, k);
        const at::Tensor expected = at::mse_loss(alone->forward(x), y);
        alone_step.zero_grad();
        expected.backward();
        const at::Tensor loss = at::mse_loss(parallel.forward(x), y);
        step.zero_grad();
        loss.backward();
        parallel.reduce_gradients();
        ASSERT_LT(difference(loss, expected), 1e-5) << "step " << k;
        for (size_t i = 0; i < model->parameters().size(); ++i) {
          ASSERT_LT(difference(model->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-5)
              << "step " << k;
        }
        alone_step.step();
        step.step();
      }
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
              HasSubstr("inputs are (4), (3, 2), must have the same size in dimension 0"));
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
  EXPECT_THAT(message_of([&] { parallel.forward_parallel(inputs); }),
              HasSubstr("the number of inputs is 2, must be 3, one for each device"));
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

TEST(DataParallel, ReplicasSeeTheCallersModes) {
  auto model = Mlp::make();
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(parallel.forward(Mlp::input(4, 0)).requires_grad());
  }
  EXPECT_TRUE(parallel.forward(Mlp::input(4, 0)).requires_grad());
  at::autocast::set_cpu_enabled(true);
  const at::Tensor under_autocast = parallel.forward(Mlp::input(4, 0));
  at::autocast::set_cpu_enabled(false);
  EXPECT_EQ(under_autocast.scalar_type(), at::kBFloat16);
  EXPECT_EQ(parallel.forward(Mlp::input(4, 0)).scalar_type(), at::kFloat);
}

TEST(DataParallel, KeepsTheBuffersOfReplicaZero) {
  torch::nn::Sequential alone(torch::nn::Linear(6, 3), torch::nn::BatchNorm1d(3));
  auto model = copy_of(alone);
  auto parallel = data_parallel(model, {.devices = cpus(2)});
  const auto check = [&] {
    for (size_t i = 0; i < alone->buffers().size(); ++i) {
      EXPECT_TRUE(at::equal(alone->buffers()[i], model->buffers()[i]));
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

// ---- run ----

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
  static Tied make() { return Tied(); }
  static at::Tensor input(int64_t rows, uint64_t seed) { return random({rows, 3}, seed); }
};

template <class Task>
void check_synchronous_run(size_t replicas) {
  SCOPED_TRACE(testing::Message() << replicas << " replicas of " << typeid(Task).name());
  constexpr int64_t kSteps = 20;
  auto alone = Task::make();
  auto model = Task::make();
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < alone->parameters().size(); ++i)
      model->parameters()[i].copy_(alone->parameters()[i]);
  }
  const auto loss_of = [&](auto& net, size_t replica, int64_t step) {
    const uint64_t seed = static_cast<uint64_t>(step) * replicas + replica;
    return at::mse_loss(net.forward(Task::input(5, seed)), target(5, seed));
  };
  torch::optim::SGD alone_step({alone->parameters()[0]},
                               torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD optimizer({model->parameters()[0]},
                              torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < kSteps; ++step) {
    alone_step.zero_grad();
    for (size_t r = 0; r < replicas; ++r) loss_of(*alone, r, step).backward();
    alone->parameters()[0].mutable_grad().div_(static_cast<double>(replicas));
    alone_step.step();
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

TEST(DataParallelRun, AsynchronousDoesNotWait) {
  constexpr int64_t kSteps = 6;
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2), .mode = Asynchronous{}});
  std::latch both_have_begun(2), fast_is_done(kSteps + 1);
  std::atomic<int64_t> updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        at::Tensor loss = net.loss();
        if (step == 0) both_have_begun.arrive_and_wait();
        // The slow replica holds its first gradient back until the fast one has done everything.
        if (step == 0 && replica == 1) fast_is_done.arrive_and_wait();
        return loss;
      },
      [&] {
        update();
        if (++updates <= kSteps) fast_is_done.count_down();
      });
  EXPECT_THAT(stats.steps, ElementsAre(kSteps, kSteps));
  EXPECT_THAT(stats.waits, ElementsAre(0, 0));
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

TEST(DataParallelRun, SynchronousCanBeLeftDuringARun) {
  constexpr int64_t kSteps = 20;
  Descent update;
  auto parallel = data_parallel(update.model, {.devices = cpus(2)});
  std::latch fast_is_done(2);
  int64_t updates = 0;
  const RunStats stats = parallel.run(
      kSteps,
      [&](WeightImpl& net, size_t replica, int64_t step) {
        at::Tensor loss = net.loss();
        if (replica == 1 && step == 10) fast_is_done.arrive_and_wait();
        if (replica == 0 && step == kSteps - 1) fast_is_done.count_down();
        return loss;
      },
      [&] {
        update();
        if (++updates == 10) parallel.set_mode(Asynchronous{});
      });
  EXPECT_EQ(updates, 10 + 2 * 10);
  EXPECT_GE(stats.largest_lead, 9);
  EXPECT_TRUE(std::holds_alternative<Asynchronous>(parallel.mode()));
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
    // What failed has left nothing behind: the gradient is that of this backward alone.
    update.model->zero_grad();
    parallel.reduce_gradients();
    EXPECT_TRUE(!update.model->w.grad().defined() || update.model->w.grad().item<double>() == 0);
    const RunStats stats = parallel.run(4, fine, std::ref(update));
    EXPECT_THAT(stats.steps, Each(4));
  }
}

TEST(DataParallelRun, MayNotUseItself) {
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
              HasSubstr("replicas do one thing at a time"));
}

// ---- what it is built from ----

TEST(DataParallel, DetectsDevices) {
  EXPECT_FALSE(detected_devices().empty());
  EXPECT_EQ(data_parallel(Mlp::make()).devices(), detected_devices());
}

TEST(DataParallel, RefusesWhatCannotWork) {
  EXPECT_THAT(message_of([] { data_parallel(Mlp::make(), {.devices = {}}); }),
              HasSubstr("the number of devices is 0, must be at least 1"));
  EXPECT_THAT(message_of([] { data_parallel(Mlp::make(), {.mode = BoundedStaleness{-1}}); }),
              HasSubstr("BoundedStaleness is -1, must be at least 0"));
  auto parallel = data_parallel(Mlp::make());
  EXPECT_THAT(message_of([&] { parallel.set_mode(BoundedStaleness{-2}); }), HasSubstr("is -2"));
  EXPECT_THAT(message_of([&] {
                parallel.run(
                    -1, [](auto&, size_t, int64_t) { return at::Tensor(); }, [] {});
              }),
              HasSubstr("steps is -1, must be at least 0"));
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
    auto parallel = data_parallel(Weight(), {.devices = cpus(3)});
    std::vector<int> threads(3);
    parallel.run(
        1,
        [&](WeightImpl& net, size_t replica, int64_t) {
          threads[replica] = at::get_num_threads();
          return net.loss();
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
