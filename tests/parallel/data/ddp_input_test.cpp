// SPDX-License-Identifier: Apache-2.0
// Models that differ, options that make no sense, ranks that run out of data.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/core/error.h"
#include "tests/parallel/training.h"

namespace lockstep::test {
namespace {

using parallel::DdpOptions;
using testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

// All ranks must refuse, with the same words.
std::string refusal(const std::function<Sequential(int rank)>& build,
                    const DdpOptions& options = {}) {
  std::vector<std::string> errors(3);
  comm::run_threads(3, [&](comm::Group group) {
    try {
      parallel::ddp(build(group.rank()), group, options);
    } catch (const ConfigError& error) {
      errors[static_cast<size_t>(group.rank())] = error.what();
    }
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0], errors[2]);
  return errors[0];
}

TEST(DdpInput, ModelsThatDiffer) {
  EXPECT_THAT(refusal([](int rank) { return Sequential(Linear(2, rank == 1 ? 5 : 4)); }),
              HasSubstr("0.weight Float[4, 2] on ranks 0, 2; 0.weight Float[5, 2] on rank 1"));
  EXPECT_THAT(refusal([](int rank) {
                Sequential model(Linear(2, 2));
                if (rank == 2) model->to(at::kDouble);
                return model;
              }),
              HasSubstr("0.weight Double[2, 2] on rank 2"));
  EXPECT_THAT(refusal([](int rank) {
                Sequential model(Linear(2, 2));
                if (rank > 0) model->push_back(Linear(2, 2));
                return model;
              }),
              HasSubstr("2/4/4: nothing on rank 0; 1.weight Float[2, 2] on ranks 1, 2"));
  EXPECT_THAT(refusal([](int rank) {
                Sequential model;
                model->push_back(rank == 0 ? "a" : "b", Linear(2, 2));
                return model;
              }),
              HasSubstr("a.weight Float[2, 2] on rank 0; b.weight"));
  EXPECT_THAT(refusal([](int rank) {
                Sequential model(Linear(2, 2));
                model->parameters()[1].set_requires_grad(rank != 1);
                return model;
              }),
              HasSubstr("0.bias Float[2] without gradient on rank 1"));
  // As from a file that only one rank reads; gradients are averaged in the order of memory.
  EXPECT_THAT(refusal([](int rank) {
                Sequential model(Linear(2, 3));
                at::Tensor weight = model->parameters()[0];
                if (rank == 0) weight.set_data(weight.detach().t().contiguous().t());
                return model;
              }),
              HasSubstr("0.weight Float[3, 2] with strides (1, 3) on rank 0; 0.weight Float[3, 2] "
                        "on ranks 1, 2"));
}

TEST(DdpInput, ParametersThatAreUnfrozenLater) {
  comm::run_threads(2, [](comm::Group group) {
    Sequential model(Linear(2, 2), Linear(2, 2));
    at::Tensor weight = model->parameters()[2];
    weight.set_requires_grad(false);
    auto ddp = parallel::ddp(model, group);
    ddp.forward(at::ones({1, 2})).sum().backward();
    weight.set_requires_grad(true);
    try {
      ddp.forward(at::ones({1, 2})).sum().backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("parameter 1.weight is trained, but was frozen"));
    }
  });
}

TEST(DdpInput, OptionsThatMakeNoSense) {
  const auto build = [](int) { return Sequential(Linear(2, 2)); };
  EXPECT_THAT(refusal(build, {.bucket_bytes = 0}), HasSubstr("bucket_bytes is 0"));
  EXPECT_THAT(refusal(build, {.advanced = {.first_bucket_bytes = 0}}),
              HasSubstr("first_bucket_bytes is 0"));
  EXPECT_THAT(refusal(build, {.reproducible = true, .hook = parallel::hooks::bf16()}),
              HasSubstr("hook"));
  EXPECT_THAT(refusal(build, {.find_unused_parameters = true, .static_graph = true}),
              HasSubstr("static_graph"));
  EXPECT_THAT(refusal(build, {.sparse_parameters = {"0.wight"}}), HasSubstr("0.wight"));
  try {
    parallel::hooks::by_name("fp8");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'fp8', must be none, fp16, bf16, power-sgd, fp16-across"));
  }
  EXPECT_THROW(parallel::hooks::power_sgd({.rank = 0}), ConfigError);
  auto ddp = parallel::ddp(Sequential(Linear(2, 2)), comm::Group());
  EXPECT_THROW(ddp.join(), ConfigError);
}

// A model is given as a module, as its holder, or as a pointer to it; each keeps it alive.
TEST(Ddp, TakesAModuleAHolderOrAPointer) {
  const auto check = [](auto make) {
    Sequential model(Linear(2, 2));
    auto ddp = make(model);
    const at::Tensor input =
        at::ones({1, 2}, model->parameters().front().options().requires_grad(false));
    const at::Tensor expected = model->forward(input);
    model = Sequential();
    EXPECT_TRUE(at::equal(ddp.forward(input), expected));
    EXPECT_EQ(ddp.module()->parameters().size(), 2U);
  };
  check([](Sequential& model) { return parallel::ddp(*model, comm::Group()); });
  check([](Sequential& model) { return parallel::ddp(model, comm::Group()); });
  check([](Sequential& model) { return parallel::ddp(model.ptr(), comm::Group()); });
  check([](Sequential& model) { return parallel::ddp_on_detected_device(*model, comm::Group()); });
  // One that no pointer owns must outlive the wrapper.
  torch::nn::LinearImpl local(2, 2);
  auto ddp = parallel::ddp(local, comm::Group());
  EXPECT_EQ(&*ddp.module(), &local);
}

// Rank r has r + 2 batches. Against one process that averages over those who have data.
template <class Task>
void train_uneven(bool step_in_join) {
  constexpr int kRanks = 3;
  const auto steps_of = [](int rank) { return rank + 2; };
  const auto batch_of = [](int step, int rank) { return Task::batch(step * kRanks + rank); };
  const auto sgd = [](auto& model) {
    return torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  auto alone = Task::make(1);
  auto alone_optimizer = sgd(alone);
  for (int step = 0; step < steps_of(kRanks - 1); ++step) {
    alone_optimizer.zero_grad();
    int active = 0;
    for (int rank = 0; rank < kRanks; ++rank) active += step < steps_of(rank);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (step >= steps_of(rank)) continue;
      const Batch batch = batch_of(step, rank);
      (Task::loss(alone->forward(batch.input), batch) / active).backward();
    }
    alone_optimizer.step();
  }
  comm::run_threads(kRanks, [&](comm::Group group) {
    auto ddp = parallel::ddp(
        Task::make(7), group,
        {.bucket_bytes = 512, .uneven_inputs = true, .advanced = {.first_bucket_bytes = 512}});
    {
      // As the reference was made.
      const c10::AutoGradMode no_grad(false);
      auto from = Task::make(1)->parameters();
      auto to = ddp.module()->parameters();
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    auto optimizer = sgd(ddp.module());
    for (int step = 0; step < steps_of(group.rank()); ++step) {
      optimizer.zero_grad();
      const Batch batch = batch_of(step, group.rank());
      Task::loss(ddp.forward(batch.input), batch).backward();
      optimizer.step();
    }
    int steps_in_join = 0;
    Curve mine;
    const Curve expected = finish({}, *alone);
    if (step_in_join) {
      ddp.join([&] {
        optimizer.step();
        mine = finish({}, *ddp.module());  // before the weights of the last are shared
        ++steps_in_join;
      });
      EXPECT_EQ(steps_in_join, steps_of(kRanks - 1) - steps_of(group.rank()));
      if (steps_in_join > 0) {
        EXPECT_TRUE(at::allclose(mine.weights, expected.weights, 1e-5, 1e-6));
      }
    } else {
      ddp.join();
    }
    mine = finish({}, *ddp.module());
    EXPECT_TRUE(at::allclose(mine.weights, expected.weights, 1e-5, 1e-6))
        << "rank " << group.rank();
    // All ranks have data again: the wrapper goes on.
    optimizer.zero_grad();
    const Batch batch = batch_of(100, group.rank());
    Task::loss(ddp.forward(batch.input), batch).backward();
    ddp.join();
  });
}

TEST(DdpInput, RanksMayRunOutOfData) {
  train_uneven<MlpTask>(false);
  train_uneven<MlpTask>(true);
}

TEST(DdpInput, RanksMayRunOutOfDataWithBuffers) { train_uneven<ConvNetTask>(true); }

TEST(DdpInput, RanksMayRunOutOfDataWithSparseGradients) {
  // Momentum does not go with sparse gradients in torch's SGD, so the averages alone are compared.
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(EmbeddingTask::make(1), group, {.uneven_inputs = true});
    const Batch batch = EmbeddingTask::batch(0);
    at::Tensor average;
    if (group.rank() == 1) {
      EmbeddingTask::loss(ddp.forward(batch.input), batch).backward();
      average = ddp.module()->parameters()[0].grad().to_dense();
      ddp.join();
    } else {
      ddp.join([&] { average = ddp.module()->parameters()[0].grad().to_dense(); });
    }
    auto alone = EmbeddingTask::make(1);
    EmbeddingTask::loss(alone->forward(batch.input), batch).backward();
    EXPECT_TRUE(at::allclose(average, alone->parameters()[0].grad().to_dense()));
  });
}

// Rank 1 has no data in the first epoch, so it learns what a step is from the others.
TEST(DdpInput, ARankMayHaveNoDataInTheFirstEpoch) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(MlpTask::make(1), group,
                             {.bucket_bytes = 512, .static_graph = true, .uneven_inputs = true});
    const Batch batch = MlpTask::batch(0);
    const auto train = [&] { MlpTask::loss(ddp.forward(batch.input), batch).backward(); };
    if (group.rank() == 0) train();
    ddp.join();
    train();
    ddp.join();
  });
}

// Who leads is heard in forwards, too: rank 1 takes one more, and then leaves without a backward.
TEST(DdpInput, RanksAgreeWhoseWeightsCount) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp = parallel::ddp(ConvNetTask::make(1), group, {.uneven_inputs = true});
    ddp.forward(ConvNetTask::batch(0).input).sum().backward();
    if (group.rank() == 1) ddp.forward(ConvNetTask::batch(1).input);
    const at::Tensor weight = ddp.module()->parameters()[0];
    {
      const c10::AutoGradMode no_grad(false);
      weight.fill_(group.rank());
    }
    ddp.join();
    EXPECT_EQ(weight.flatten()[0].item<double>(), 1);
  });
}

// What a rank accumulated before it ran out of data is not part of the others' next step.
TEST(DdpInput, UnreducedGradientsOfARankThatRanOutOfDataDoNotCount) {
  comm::run_threads(2, [](comm::Group group) {
    auto ddp =
        parallel::ddp(MlpTask::make(1), group, {.uneven_inputs = true, .reproducible = true});
    const Batch batch = MlpTask::batch(0);
    if (group.rank() == 0) {
      const auto guard = ddp.no_sync();
      MlpTask::loss(ddp.forward(batch.input), batch).backward();
    } else {
      MlpTask::loss(ddp.forward(batch.input), batch).backward();
      auto alone = MlpTask::make(1);
      MlpTask::loss(alone->forward(batch.input), batch).backward();
      EXPECT_TRUE(
          at::allclose(ddp.module()->parameters()[0].grad(), alone->parameters()[0].grad()));
    }
    ddp.join();
  });
}

TEST(DdpInput, BuffersComeFromRankZero) {
  for (const bool broadcast : {true, false}) {
    comm::run_threads(2, [&](comm::Group group) {
      auto ddp = parallel::ddp(ConvNetTask::make(1), group, {.broadcast_buffers = broadcast});
      ddp.forward(ConvNetTask::batch(group.rank()).input).sum().backward();
      ddp.forward(ConvNetTask::batch(5).input)
          .sum()
          .backward();  // after rank 0's first batch everywhere
      const at::Tensor mine = ddp.module()->buffers()[0].clone(), first = mine.clone();
      comm::broadcast(first, group).wait();
      EXPECT_EQ(at::equal(mine, first), broadcast || group.rank() == 0);
    });
  }
}

TEST(DdpInput, SparseGradientsStaySparse) {
  comm::run_threads(3, [](comm::Group group) {
    auto ddp = parallel::ddp(EmbeddingTask::make(1), group);
    EXPECT_EQ(ddp.buckets()[1].bytes, 0u);  // the head, the rows, then nothing
    const Batch batch = EmbeddingTask::batch(group.rank());
    EmbeddingTask::loss(ddp.forward(batch.input), batch).backward();
    const at::Tensor gradient = ddp.module()->parameters()[0].grad();
    EXPECT_TRUE(gradient.is_sparse());
    EXPECT_LT(gradient.coalesce().values().size(0), gradient.size(0));
  });
}

}  // namespace
}  // namespace lockstep::test
