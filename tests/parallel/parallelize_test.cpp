// SPDX-License-Identifier: Apache-2.0
// One call that applies a whole configuration to a model of one's own.
#include "lockstep/parallel/parallelize.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <atomic>
#include <cmath>
#include <mutex>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/memory/meter.h"
#include "lockstep/nn/kernels/can_multiply.h"
#include "lockstep/nn/linear.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/schedule/schedule.h"
#include "tests/support/says.h"

namespace lockstep::test {
namespace {

using layout::MemoryStrategy;
using layout::ParallelConfig;
using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;
using parallel::Layer;
using parallel::layer;
using parallel::Tensors;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kVocab = 24, kWidth = 16, kLength = 6, kRows = 8;
constexpr int kSteps = 3;

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// ---- a model with a bit of everything ----

std::atomic<int> convolutions{0};  // how often one was computed

struct ConvBlockImpl : torch::nn::Module {
  ConvBlockImpl() {
    register_module("norm", norm);
    register_module("conv", conv);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++convolutions;
    const at::Tensor h = norm(x.transpose(1, 2));
    return x + at::relu(conv(h)).transpose(1, 2);
  }
  torch::nn::BatchNorm1d norm{torch::nn::BatchNorm1dOptions(kWidth).momentum(0.5)};
  torch::nn::Conv1d conv{torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)};
};
TORCH_MODULE(ConvBlock);

struct AttentionBlockImpl : torch::nn::Module {
  AttentionBlockImpl() {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const at::Tensor scores = at::bmm(parts[0], parts[1].transpose(1, 2)).div_(std::sqrt(16.0));
    return x + out(at::bmm(at::softmax(scores, -1), parts[2]));
  }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear qkv{kWidth, 3 * kWidth}, out{kWidth, kWidth};
};
TORCH_MODULE(AttentionBlock);

struct MlpBlockImpl : torch::nn::Module {
  MlpBlockImpl() {
    register_module("up", up);
    register_module("down", down);
    for (const at::Tensor& parameter : parameters()) torch::nn::init::normal_(parameter, 0, 0.2);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
  nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
};
TORCH_MODULE(MlpBlock);

struct RecurrentBlockImpl : torch::nn::Module {
  RecurrentBlockImpl() { register_module("lstm", lstm); }
  at::Tensor forward(const at::Tensor& x) { return x + std::get<0>(lstm(x)); }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(kWidth, kWidth).batch_first(true)};
};
TORCH_MODULE(RecurrentBlock);

std::shared_ptr<torch::nn::EmbeddingImpl> table(torch::nn::Module& stage) {
  const auto children = stage.named_children();
  return children.contains("embed")
             ? std::dynamic_pointer_cast<torch::nn::EmbeddingImpl>(children["embed"])
             : stage.register_module("embed", torch::nn::Embedding(kVocab, kWidth));
}

std::vector<Layer> layers() {
  const auto lookup = [](torch::nn::Module& stage) {
    return parallel::LayerForward(
        [embed = table(stage)](const Tensors& in) { return Tensors{embed->forward(in[0])}; });
  };
  const auto logits = [](torch::nn::Module& stage) {
    return parallel::LayerForward([embed = table(stage)](const Tensors& in) {
      return Tensors{at::linear(in[0], embed->weight)};
    });
  };
  return {{lookup},
          layer("conv", [] { return ConvBlock(); }),
          layer("attention1", [] { return AttentionBlock(); }),
          layer("mlp1", [] { return MlpBlock(); }),
          layer("recurrent", [] { return RecurrentBlock(); }),
          layer("attention2", [] { return AttentionBlock(); }),
          layer("mlp2", [] { return MlpBlock(); }),
          {logits}};
}

const layout::TensorPlan kPlan = {{"mlp*.up", layout::TensorStyle::column},
                                  {"mlp*.down", layout::TensorStyle::row}};

parallel::PipelineOptions others() { return {.tied = {"embed.weight"}}; }

at::Tensor words(int step) {
  return (at::arange(kRows * kLength) * (3 * step + 5))
      .add_(step)
      .fmod_(7919)
      .remainder(kVocab)
      .view({kRows, kLength});
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& input) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), input.roll(1, 1).flatten());
}

// The losses of some steps, and of an evaluation after them. Batch norm sees a micro-batch, so that
// all layouts have the same.
std::vector<double> train(parallel::Pipeline& model, const ParallelConfig& config) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  const int64_t rows = config.micro_batch_size, count = config.microbatches();
  const comm::Group dp = model.mesh()["dp"];
  std::vector<double> losses;
  const auto mean = [&](const at::Tensor& mine) {
    at::Tensor sum = mine.sum() / dp.size();
    comm::all_reduce(sum, dp).wait();
    losses.push_back(sum.item<double>());
  };
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor all = words(step);
    const auto micro = [&](int i) { return all.narrow(0, (dp.rank() * count + i) * rows, rows); };
    const parallel::PipelineBatch batch{
        .inputs = [&](int i) { return Tensors{micro(i)}; },
        .loss = [&](int i, const Tensors& out) { return loss_of(out[0], micro(i)) / count; }};
    mean(model.step(batch));
    model.clip_grad_norm_(1);
    optimizer.step();
    optimizer.zero_grad();
    if (step + 1 < kSteps) continue;
    model.eval();
    mean(model.evaluate(batch, static_cast<int>(count)));
    const auto outputs = model.forward(batch.inputs, static_cast<int>(count));
    EXPECT_EQ(outputs.size(), model.has_last_stage() ? static_cast<size_t>(count) : 0U);
    for (const Tensors& output : outputs) {
      EXPECT_EQ(output.at(0).sizes(), (std::vector<int64_t>{rows, kLength, kVocab}));
    }
    model.train();
  }
  return losses;
}

ParallelConfig one_rank() {
  return {.micro_batch_size = 2, .global_batch_size = kRows, .memory = MemoryStrategy::basic};
}

const std::vector<double>& expected_losses() {
  static const std::vector<double> losses = [] {
    auto model = parallel::parallelize(layers(), one_rank(), comm::Group(), others());
    return train(model, one_rank());
  }();
  return losses;
}

struct LayoutCase {
  const char* name;
  ParallelConfig config;
};

class Parallelize : public testing::TestWithParam<LayoutCase> {};

// Running statistics of batch norm differ between data-parallel ranks, of which the first one's
// count, so that the evaluation is compared where there is one.
TEST_P(Parallelize, TrainsAsOneProcess) {
  ParallelConfig config = GetParam().config;
  config.micro_batch_size = 2;
  config.global_batch_size = kRows;
  if (config.dims.tp > 1) config.tensor_plan = kPlan;
  const std::vector<double>& expected = expected_losses();
  EXPECT_LT(expected.back(), expected.front());
  comm::run_threads(static_cast<int>(config.dims.world_size()), [&](const comm::Group& group) {
    auto model = parallel::parallelize(layers(), config, group, others());
    const std::vector<double> losses = train(model, config);
    const size_t compared = config.dims.dp == 1 ? losses.size() : losses.size() - 1;
    for (size_t i = 0; i < compared; ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(
    , Parallelize,
    testing::Values(
        LayoutCase{"selective", {}}, LayoutCase{"full", {.memory = MemoryStrategy::aggressive}},
        LayoutCase{"disk", {.memory = MemoryStrategy::extreme}},
        LayoutCase{"everything_on_disk",
                   {.memory = MemoryStrategy::extreme,
                    .advanced = {.gradient_checkpointing = Recompute::none}}},
        LayoutCase{"dp2", {.dims = {.dp = 2}, .memory = MemoryStrategy::basic}},
        LayoutCase{"dp4_shard_full", {.dims = {.dp = 4}, .sharding = ShardingStrategy::full_shard}},
        LayoutCase{"dp2_shard_grad_op",
                   {.dims = {.dp = 2},
                    .memory = MemoryStrategy::aggressive,
                    .sharding = ShardingStrategy::shard_grad_op}},
        LayoutCase{"dp2_shard_optimizer",
                   {.dims = {.dp = 2}, .sharding = ShardingStrategy::optimizer}},
        LayoutCase{"tp2", {.dims = {.tp = 2}}}, LayoutCase{"pp2_interleaved", {.dims = {.pp = 2}}},
        LayoutCase{"pp4_1f1b",
                   {.dims = {.pp = 4},
                    .memory = MemoryStrategy::extreme,
                    .schedule = PipelineSchedule::one_f_one_b}},
        LayoutCase{"dp2_pp2_shard_full_zb_h1",
                   {.dims = {.dp = 2, .pp = 2},
                    .memory = MemoryStrategy::basic,
                    .sharding = ShardingStrategy::full_shard,
                    .schedule = PipelineSchedule::zb_h1}},
        LayoutCase{"dp2_tp2_pp2",
                   {.dims = {.dp = 2, .tp = 2, .pp = 2},
                    .memory = MemoryStrategy::aggressive,
                    .schedule = PipelineSchedule::gpipe}}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- every field acts ----

template <class Check>
void with(const ParallelConfig& config, Check check, int ranks = 0) {
  const int world = ranks == 0 ? static_cast<int>(config.dims.world_size()) : ranks;
  comm::run_threads(world, [&](const comm::Group& group) {
    auto model = parallel::parallelize(layers(), config, group, others());
    check(model);
  });
}

TEST(ParallelizeFields, SizesBatchesAndSchedule) {
  with({.dims = {.dp = 2, .pp = 2}, .schedule = PipelineSchedule::gpipe}, [](auto& model) {
    EXPECT_THAT(model.mesh().shape(), ElementsAre(2, 1, 2));
    EXPECT_EQ(model.schedule().kind, PipelineSchedule::gpipe);
    EXPECT_EQ(model.options().microbatches, 1);
  });
  with({.dims = {.dp = 2, .pp = 2},
        .schedule = PipelineSchedule::gpipe,
        .advanced = {.order = layout::Order::tp_fastest}},
       [](auto& model) { EXPECT_THAT(model.mesh().axis_names(), ElementsAre("pp", "dp", "tp")); });
  with({.dims = {.pp = 2},
        .micro_batch_size = 2,
        .global_batch_size = 8,
        .schedule = PipelineSchedule::one_f_one_b,
        .advanced = {.num_layers = 8, .layer_split = {2, 6}}},
       [](auto& model) {
         EXPECT_EQ(model.options().microbatches, 4);
         EXPECT_THAT(model.options().split, ElementsAre(2, 6));
       });
  with({.dims = {.pp = 2}, .global_batch_size = 4, .advanced = {.chunks = 4}},
       [](auto& model) { EXPECT_EQ(model.stages().size(), 4U); });
  with({.dims = {.pp = 2}, .global_batch_size = 4},
       [](auto& model) { EXPECT_EQ(model.stages().size(), 2U) << "interleaved takes two"; });
}

TEST(ParallelizeFields, TensorPlanAndSequence) {
  for (const bool sequence : {false, true}) {
    const ParallelConfig config{.dims = {.tp = 2},
                                .tensor_plan = {{"mlp1.up", layout::TensorStyle::column},
                                                {"mlp1.down", layout::TensorStyle::row}},
                                .advanced = {.sequence_parallel = sequence}};
    comm::run_threads(2, [&](const comm::Group& group) {
      auto model = parallel::parallelize(
          std::vector<Layer>{layer("mlp1", [] { return MlpBlock(); })}, config, group);
      EXPECT_EQ(model.modules()[0]->named_parameters()["mlp1.up.weight"].size(0), 2 * kWidth);
      // Of a sequence of 4 each rank sees 2.
      const int64_t seen = sequence ? 2 : 4;
      const auto out = model.forward([&](int) { return Tensors{at::ones({1, seen, kWidth})}; });
      EXPECT_EQ(out[0][0].size(1), seen);
      EXPECT_EQ(model.tensor().options().sequence_parallel, sequence);
    });
  }
}

TEST(ParallelizeFields, ShardingAndPrecision) {
  with({.dims = {.dp = 2}, .sharding = ShardingStrategy::full_shard}, [](auto& model) {
    ASSERT_EQ(model.sharded().size(), 1U);
    EXPECT_EQ(model.sharded()[0].options().strategy, ShardingStrategy::full_shard);
  });
  with({.dims = {.dp = 2}}, [](auto& model) { EXPECT_TRUE(model.sharded().empty()); });
  if (!nn::can_multiply(at::kBFloat16, at::kCPU)) {
    EXPECT_THAT(error_of([] { with({.mixed_precision = true}, [](auto&) {}); }),
                HasSubstr("cannot multiply bfloat16"));
    return;
  }
  with({.memory = MemoryStrategy::basic, .mixed_precision = true}, [](auto& model) {
    const auto outputs = model.forward([](int) { return Tensors{words(0)}; });
    EXPECT_EQ(outputs[0][0].scalar_type(), at::kBFloat16);
    EXPECT_EQ(model.named_parameters()[0].tensor.scalar_type(), at::kFloat);
  });
}

TEST(ParallelizeFields, MemoryStrategyAndItsSwitch) {
  struct Case {
    MemoryStrategy memory;
    std::optional<Recompute> explicit_switch;
    Recompute expected;
    int computed;
    bool on_disk;
  };
  for (const Case& c :
       {Case{MemoryStrategy::basic, {}, Recompute::none, 1, false},
        Case{MemoryStrategy::standard, {}, Recompute::selective, 2, false},
        Case{MemoryStrategy::aggressive, {}, Recompute::full, 2, false},
        Case{MemoryStrategy::extreme, {}, Recompute::full, 2, true},
        Case{MemoryStrategy::extreme, Recompute::none, Recompute::none, 1, true},
        Case{MemoryStrategy::basic, Recompute::full, Recompute::full, 2, false},
        Case{MemoryStrategy::aggressive, Recompute::none, Recompute::none, 1, false}}) {
    with({.memory = c.memory, .advanced = {.gradient_checkpointing = c.explicit_switch}},
         [&](auto& model) {
           EXPECT_EQ(model.options().advanced.recompute, c.expected);
           convolutions = 0;
           model.step({.inputs = [](int) { return Tensors{words(0)}; },
                       .loss = [](int, const Tensors& out) { return loss_of(out[0], words(0)); }});
           EXPECT_EQ(convolutions, c.computed);
           const auto& store = model.options().advanced.store;
           EXPECT_EQ(store != nullptr, c.on_disk);
           if (store) {
             EXPECT_GT(store->stats().ahead + store->stats().late + store->stats().from_memory, 0U);
           }
         });
  }
}

TEST(ParallelizeFields, Communication) {
  with({.dims = {.dp = 2},
        .advanced = {.communication = layout::CommStrategy::ring,
                     .communication_timeout = milliseconds{12'345}}},
       [](auto& model) {
         EXPECT_EQ(model.mesh().group().strategy(), layout::CommStrategy::ring);
         EXPECT_EQ(model.mesh()["dp"].group().timeout(), milliseconds{12'345});
       });
  with({.dims = {.dp = 2}}, [](auto& model) {
    EXPECT_EQ(model.mesh().group().strategy(), layout::CommStrategy::all_reduce);
  });
}

TEST(ParallelizeFields, MemoryLimit) {
  memory::Meter::install();
  const int64_t limit = memory::Meter::current() + 2'000;  // less than the embedding's table
  EXPECT_THROW(with({.advanced = {.max_memory_per_device = limit}}, [](auto&) {}), OutOfMemory);
  memory::Meter::set_limit(0);
}

// What runs twice writes its statistics once.
TEST(ParallelizeFields, RecomputationLeavesBuffersAlone) {
  const auto statistics = [](MemoryStrategy memory) {
    at::Tensor found;
    with({.memory = memory}, [&](auto& model) {
      model.step({.inputs = [](int) { return Tensors{words(0)}; },
                  .loss = [](int, const Tensors& out) { return loss_of(out[0], words(0)); }});
      const auto buffers = model.modules()[0]->named_buffers();
      EXPECT_EQ(buffers["conv.norm.num_batches_tracked"].template item<int64_t>(), 1);
      found = buffers["conv.norm.running_mean"].clone();
    });
    return found;
  };
  const at::Tensor expected = statistics(MemoryStrategy::basic);
  for (const MemoryStrategy memory : {MemoryStrategy::standard, MemoryStrategy::aggressive}) {
    EXPECT_TRUE(at::equal(statistics(memory), expected));
  }
}

// ---- a module, and what is refused ----

TEST(ParallelizeInput, AModuleKeepsItsNamesAndValues) {
  for (const ShardingStrategy sharding :
       {ShardingStrategy::no_shard, ShardingStrategy::full_shard}) {
    comm::run_threads(2, [&](const comm::Group& group) {
      AttentionBlock block;
      const at::Tensor input = at::ones({1, 3, kWidth});
      const at::Tensor expected = group.rank() == 0 ? block(input).detach() : at::Tensor();
      auto model = parallel::parallelize(block, {.dims = {.dp = 2}, .sharding = sharding}, group);
      const at::Tensor found = model.forward([&](int) { return Tensors{input}; })[0][0];
      if (group.rank() == 0) {
        EXPECT_TRUE(at::allclose(found, expected));
      }
      EXPECT_TRUE(model.modules()[0]->named_parameters().contains("qkv.weight"));
    });
  }
  EXPECT_THAT(error_of([] {
                comm::run_threads(2, [](const comm::Group& group) {
                  parallel::parallelize(AttentionBlock(), {.dims = {.pp = 2}}, group);
                });
              }),
              says("one layer ... pp is 2"));
}

TEST(ParallelizeInput, RefusesWhatIsSaidTwiceOrDoesNotFit) {
  const auto refusal = [](const ParallelConfig& config, parallel::PipelineOptions options) {
    return error_of([&] { parallel::parallelize(layers(), config, comm::Group(), options); });
  };
  EXPECT_THAT(refusal({}, {.microbatches = 4}), HasSubstr("ParallelConfig::global_batch_size"));
  EXPECT_THAT(refusal({}, {.advanced = {.recompute = Recompute::full}}),
              HasSubstr("ParallelConfig::memory decides"));
  EXPECT_THAT(
      refusal({}, {.data = parallel::FullyShardOptions{.strategy = ShardingStrategy::optimizer}}),
      HasSubstr("ParallelConfig::sharding"));
  EXPECT_THAT(refusal({.sharding = ShardingStrategy::full_shard},
                      {.data = parallel::DdpOptions{.find_unused_parameters = true}}),
              says("sharding is full ... mixed_precision off"));
  EXPECT_THAT(refusal({.advanced = {.num_layers = 5}}, {}),
              HasSubstr("num_layers is 5, but 8 layers are given"));
  EXPECT_THAT(refusal({.dims = {.dp = 2}}, {}), says("dp 2 x tp 1 x pp 1 = 2 ... world size 1"));
}

}  // namespace
}  // namespace lockstep::test
