// SPDX-License-Identifier: Apache-2.0
// What memory_of() says against what ranks take, for a model of a user's own layers: attention,
// convolutions, an LSTM and tied weights. In processes, because memory is counted by process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>
#include <cstdio>

#include "lockstep/core/rank_env.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/memory/meter.h"
#include "lockstep/nn/linear.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/parallel/parallelize.h"
#include "tests/parallel/process_world.h"
#include "tests/support/sampling.h"

namespace lockstep::parallel {
namespace {

using layout::TensorStyle;
using memory::Meter;

constexpr int64_t kWidth = 96, kWords = 384, kLength = 96, kRows = 4;

// Attention and a perceptron, written as anyone would.
class OwnBlockImpl : public torch::nn::Module {
 public:
  OwnBlockImpl() {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv_ = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    up_ = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down_ = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {  // (B, T, C)
    const auto parts = qkv_(norm_(x)).unflatten(2, {4, 3 * kWidth / 4}).transpose(1, 2).chunk(3, 3);
    const at::Tensor scores = parts[0].matmul(parts[1].transpose(2, 3)).mul(0.2).softmax(-1);
    const at::Tensor y = x + scores.matmul(parts[2]).transpose(1, 2).flatten(2);
    return y + down_(at::gelu(up_(y)));
  }

 private:
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear qkv_{nullptr};
  nn::Linear up_{nullptr}, down_{nullptr};  // which tensor-parallel ranks can share
};
TORCH_MODULE(OwnBlock);

class OwnConvolutionImpl : public torch::nn::Module {
 public:
  OwnConvolutionImpl() {
    conv_ = register_module(
        "conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + at::relu(conv_(x.transpose(1, 2)).transpose(1, 2));
  }

 private:
  torch::nn::Conv1d conv_{nullptr};
};
TORCH_MODULE(OwnConvolution);

class OwnRecurrenceImpl : public torch::nn::Module {
 public:
  OwnRecurrenceImpl() {
    lstm_ = register_module(
        "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth).batch_first(true)));
  }
  at::Tensor forward(const at::Tensor& x) { return std::get<0>(lstm_(x)); }

 private:
  torch::nn::LSTM lstm_{nullptr};
};
TORCH_MODULE(OwnRecurrence);

// Multiplies with the embedding, which is its own where the stage has none.
Layer tied_head() {
  return {[](torch::nn::Module& stage) {
    const auto children = stage.named_children();
    std::shared_ptr<torch::nn::EmbeddingImpl> table;
    if (children.contains("embed")) {
      table = std::dynamic_pointer_cast<torch::nn::EmbeddingImpl>(children["embed"]);
    } else {
      table = torch::nn::Embedding(kWords, kWidth).ptr();
      register_layer(stage, "embed", table);
    }
    return LayerForward(
        [table](const Tensors& in) { return Tensors{at::linear(in.at(0), table->weight)}; });
  }};
}

std::vector<Layer> own_layers() {
  return {layer("embed", [] { return torch::nn::Embedding(kWords, kWidth); }),
          layer("blocks.0", [] { return OwnBlock(); }),
          layer("convolution", [] { return OwnConvolution(); }),
          layer("recurrence", [] { return OwnRecurrence(); }),
          layer("blocks.1", [] { return OwnBlock(); }),
          tied_head()};
}

at::Tensor own_loss(const Tensors& outputs) {
  const at::Tensor logits = outputs[0].flatten(0, 1);
  return at::cross_entropy_loss(logits, at::zeros({logits.size(0)}, at::kLong));
}

struct OwnLayout {
  const char* name;
  layout::ParallelDims dims;
  PipelineOptions options = {};
};

void PrintTo(const OwnLayout& layout, std::ostream* out) { *out << layout.name; }

PipelineOptions scheduled(PipelineSchedule schedule, int chunks = 1) {
  PipelineOptions options{.schedule = schedule, .microbatches = 4, .chunks = chunks};
  if (chunks > 1) options.split = {2, 1, 1, 2};
  return options;
}

PipelineOptions sharing(ShardingStrategy strategy) {
  return {.data = FullyShardOptions{.strategy = strategy, .use_orig_params = true}};
}

PipelineOptions recomputing(layout::Recompute recompute) {
  return {.advanced = {.recompute = recompute}};
}

PipelineOptions in_parts(PipelineOptions options = {}) {
  options.plan = {{"blocks.*.up", TensorStyle::column}, {"blocks.*.down", TensorStyle::row}};
  return options;
}

const std::vector<OwnLayout>& own_layouts() {
  static const std::vector<OwnLayout> all{
      {"one", {}},
      {"one_micro_batches", {}, {.microbatches = 3}},
      {"one_selective", {}, recomputing(layout::Recompute::selective)},
      {"one_recompute", {}, recomputing(layout::Recompute::full)},
      {"ddp", {.dp = 2}},
      {"shard_full", {.dp = 2}, sharing(ShardingStrategy::full_shard)},
      {"shard_optimizer", {.dp = 2}, sharing(ShardingStrategy::optimizer)},
      {"1f1b", {.pp = 2}, scheduled(PipelineSchedule::one_f_one_b)},
      {"interleaved", {.pp = 2}, scheduled(PipelineSchedule::interleaved, 2)},
      {"zb_h1", {.pp = 2}, scheduled(PipelineSchedule::zb_h1)},
      {"tp", {.tp = 2}, in_parts()},
      {"tp_gpipe", {.tp = 2, .pp = 2}, in_parts(scheduled(PipelineSchedule::gpipe))},
      {"ddp_1f1b", {.dp = 2, .pp = 2}, scheduled(PipelineSchedule::one_f_one_b)},
  };
  return all;
}

std::vector<OwnLayout> of_so_many_ranks() {
  std::vector<OwnLayout> mine;
  int number = 0;
  for (const OwnLayout& each : own_layouts()) {
    if (each.dims.world_size() != RankEnv::detect().world_size) continue;
    if (number++ % 2 == 0 || test::tests_all()) mine.push_back(each);
  }
  return mine;
}

int64_t gathered_bytes(const Pipeline& pipeline) {
  int64_t bytes = 0;
  for (const ShardedModel& stage : pipeline.sharded()) bytes += stage.stats().gather_bytes;
  return bytes;
}

// The highest peak of steps after the first two, without what was there before there was a model.
int64_t measure_own(const OwnLayout& layout) {
  // Threads of the last model may still have some of its memory: least is what none of them had.
  static int64_t least = Meter::current();
  static auto least_symmetric = static_cast<int64_t>(symmetric_memory());
  least = std::min(least, Meter::current());
  least_symmetric = std::min(least_symmetric, static_cast<int64_t>(symmetric_memory()));
  const int64_t before = least + least_symmetric;
  torch::manual_seed(1);
  Pipeline pipeline(own_layers(), mesh::Mesh::parallel(test::world(), layout.dims), layout.options);
  optim::AdamW optimizer(pipeline.named_parameters());
  const at::Tensor words = at::zeros({kRows, kLength}, at::kLong);
  int64_t peak = 0;
  for (int step = 0; step < 4; ++step) {
    Meter::reset_peak();
    pipeline.step({.inputs = [&](int) { return Tensors{words}; },
                   .loss = [](int, const Tensors& outputs) { return own_loss(outputs); }});
    optimizer.step();
    optimizer.zero_grad();
    if (step < 2) continue;
    peak = std::max(
        peak, Meter::peak() + static_cast<int64_t>(symmetric_memory()) + gathered_bytes(pipeline));
  }
  return peak - before;
}

class OwnMemoryPrediction : public testing::TestWithParam<OwnLayout> {};

TEST_P(OwnMemoryPrediction, IsWithinTenPercent) {
  Meter::install();
  const int rank = test::world().rank();
  const OwnLayout& layout = GetParam();
  PipelineOptions options = layout.options;
  options.tied = {"embed.weight"};
  const ModelMemory said = memory_of(own_layers(), {at::zeros({1, kLength}, at::kLong)},
                                     layout.dims, options, {.rows = kRows, .loss = own_loss});
  const plan::Memory& mine = said.ranks.at(static_cast<size_t>(rank));
  OwnLayout run = layout;
  run.options = options;
  const auto found = static_cast<double>(measure_own(run));
  const auto kilobytes = [](int64_t bytes) { return static_cast<double>(bytes) / 1024; };
  std::printf("%-18s rank %d: %7.0f %7.0f %7.0f %7.0f %7.0f = %8.0f KB, measured %8.0f, %+.1f %%\n",
              layout.name, rank, kilobytes(mine.parameters), kilobytes(mine.gradients),
              kilobytes(mine.optimizer), kilobytes(mine.activations), kilobytes(mine.buffers),
              kilobytes(mine.total()), found / 1024,
              100 * (static_cast<double>(mine.total()) / found - 1));
  EXPECT_NEAR(static_cast<double>(mine.total()), found, 0.1 * found) << said.counted;
}

INSTANTIATE_TEST_SUITE_P(Layouts, OwnMemoryPrediction, testing::ValuesIn(of_so_many_ranks()),
                         [](const auto& info) { return std::string("L_") + info.param.name; });

}  // namespace
}  // namespace lockstep::parallel
