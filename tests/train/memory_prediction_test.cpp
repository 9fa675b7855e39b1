// SPDX-License-Identifier: Apache-2.0
// What plan::memory_per_rank says against what ranks take: each layout trains a few steps, in
// processes, because memory is counted by process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/meter.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/parameters/parameters.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/plan/memory.h"
#include "lockstep/train/trained_model.h"
#include "tests/support/sampling.h"
#include "tests/train/memory_layouts.h"

namespace lockstep::train {
namespace {

const comm::Group& world() {
  static const comm::Group group = [] {
    memory::Meter::install();
    return comm::init();
  }();
  return group;
}

std::vector<Layout> of_this_world() {
  std::vector<Layout> mine;
  const int ranks = RankEnv::detect().world_size;
  for (const Layout& layout : layouts()) {
    if (layout.ranks == ranks) mine.push_back(layout);
  }
  if (test::tests_all()) return mine;
  std::vector<Layout> some;
  for (size_t i = 0; i < mine.size(); i += 4) some.push_back(mine[i]);
  return some;
}

struct Measured {
  int64_t total = 0;    // on the device
  int64_t on_host = 0;  // of what is offloaded
  int64_t device_limit = 0, host_budget = 0;
};

// Budgets count what is offloaded, symmetric memory too.
Measured offloaded(const TrainedModel& model) {
  Measured sum;
  for (const parallel::ShardedModel& stage : model.sharded()) {
    const parallel::OffloadStats stats = parallel::offload_stats(stage);
    sum.total += stats.device_peak;
    sum.on_host += stats.host_peak;
    sum.device_limit += stats.device_limit;
    sum.host_budget += stats.host_budget;
  }
  return sum;
}

int64_t held_outside_torch(const TrainedModel& model, bool offloads) {
  return (offloads ? 0 : static_cast<int64_t>(symmetric_memory())) + model.arena_bytes();
}

std::unique_ptr<optim::Optimizer> optimizer_of(const TrainedModel& model, bool offloads) {
  auto groups = optim::decay_groups(model.parameters(), 0.1);
  if (offloads)
    return std::make_unique<parallel::OffloadedAdamW>(model.sharded(), std::move(groups));
  return std::make_unique<optim::AdamW>(std::move(groups));
}

// The highest peak of three steps after the first two, without what was there before there was a
// model: how much of what is on its way a rank holds at once depends on how far ahead it is.
Measured measure(const TrainConfig& config) {
  const bool offloads = config.offload.any();
  // Threads of the last model may still have some of its memory: least is what none of them had.
  static int64_t least = memory::Meter::current();
  static auto least_symmetric = static_cast<int64_t>(symmetric_memory());
  least = std::min(least, memory::Meter::current());
  least_symmetric = std::min(least_symmetric, static_cast<int64_t>(symmetric_memory()));
  const int64_t before = least + (offloads ? 0 : least_symmetric);
  TrainedModel model(config, at::kCPU, world());
  const auto optimizer = optimizer_of(model, offloads);
  const int64_t rows = config.train.micro_batch, length = config.train.seq_len;
  const auto next = [&] {
    const at::Tensor tokens = at::randint(config.model.vocab, {rows, length + 1}, at::kLong);
    const auto values = [](const at::Tensor& some) {
      const at::Tensor all = some.contiguous();
      return std::vector<int64_t>(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel());
    };
    return to_tensors({.input = values(tokens.narrow(1, 0, length)),
                       .target = values(tokens.narrow(1, 1, length)),
                       .rows = rows},
                      length, at::kCPU, model.context());
  };
  int64_t peak = 0;
  for (int step = 0; step < 5; ++step) {
    memory::Meter::reset_peak();
    model.step({.next = next, .step = step, .loss_scale = 1e-3});
    optimizer->step_scaled(optim::clip_factor(1, model.grad_norm()));
    optimizer->zero_grad();
    if (step < 2) continue;
    peak = std::max(peak, memory::Meter::peak() + held_outside_torch(model, offloads));
  }
  Measured measured = offloaded(model);
  measured.total += peak - before;
  return measured;
}

class MemoryPrediction : public testing::TestWithParam<Layout> {};

// Ranks with rows of their own against ranks that share them: of all that is not state, counted.
TEST(MemoryPredictionOfContext, ActivationsAreThoseOfTheTokensOfARank) {
  if (world().size() != 2) return;
  const auto activations = [](int cp) {
    TrainConfig config = base();
    config.model.kind = ModelKind::llama;
    config.train.seq_len = 512;
    config.parallel.cp = cp;
    if (cp > 1) config.parallel.context = config::ContextKind::ring;
    config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
    config.validate(world().size());
    const plan::Memory memory =
        plan::memory_per_rank(config::planned_run(config, config.model, world().size()))[0];
    const int64_t state = memory.total() - memory.activations;
    return static_cast<double>(measure(config).total - state);
  };
  EXPECT_NEAR(activations(1) / activations(2), 2, 0.25);
}

TEST_P(MemoryPrediction, IsWithinTenPercent) {
  TrainConfig config = base();
  GetParam().set(config);
  config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
  config.validate(world().size());
  const plan::Memory predicted = plan::memory_per_rank(config::planned_run(
      config, config.model, world().size()))[static_cast<size_t>(world().rank())];
  const Measured measured = measure(config);
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const auto compare = [&](int64_t said, int64_t found) {
    EXPECT_NEAR(megabytes(said), megabytes(found), 0.1 * megabytes(found));
    return found == 0 ? 0 : 100 * (megabytes(said) / megabytes(found) - 1);
  };
  std::printf("%-26s rank %d: %6.2f %6.2f %6.2f %6.2f %6.2f = %6.2f MB, measured %6.2f, %+.1f %%\n",
              GetParam().name, world().rank(), megabytes(predicted.parameters),
              megabytes(predicted.gradients), megabytes(predicted.optimizer),
              megabytes(predicted.activations), megabytes(predicted.buffers),
              megabytes(predicted.total()), megabytes(measured.total),
              compare(predicted.total(), measured.total));
  if (!config.offload.any()) return;
  std::printf("%-26s rank %d: on the host %6.2f MB, measured %6.2f, %+.1f %%\n", GetParam().name,
              world().rank(), megabytes(predicted.on_host), megabytes(measured.on_host),
              compare(predicted.on_host, measured.on_host));
  // All stages of a rank together have its budgets, those that were left open too.
  const auto allowed = layout::resolved(config.offload, 0, 0);
  EXPECT_LE(measured.device_limit, allowed.device_limit);
  EXPECT_LE(measured.host_budget, allowed.host_budget);
}

// What backward does not need for frozen parameters is not known, and counts.
TEST(FrozenMemoryPrediction, IsAnUpperBound) {
  TrainConfig config = base();
  if (world().size() > 1) config.parallel.shard = ShardingStrategy::full_shard;
  config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
  const auto total = [&] {
    return plan::memory_per_rank(config::planned_run(
        config, config.model, world().size()))[static_cast<size_t>(world().rank())]
        .total();
  };
  const int64_t all = total();
  config.train.freeze = "blocks.2.*,blocks.3.*,embed.*";
  const int64_t predicted = total(), measured = measure(config).total;
  std::printf("frozen rank %d: %.2f MB, measured %.2f\n", world().rank(),
              static_cast<double>(predicted) / (1 << 20),
              static_cast<double>(measured) / (1 << 20));
  EXPECT_LT(predicted, all);
  EXPECT_GT(1.02 * static_cast<double>(predicted), static_cast<double>(measured));
  EXPECT_LT(static_cast<double>(predicted), 1.3 * static_cast<double>(measured));
}

INSTANTIATE_TEST_SUITE_P(Layouts, MemoryPrediction, testing::ValuesIn(of_this_world()),
                         [](const auto& info) { return std::string("L_") + info.param.name; });

}  // namespace
}  // namespace lockstep::train
