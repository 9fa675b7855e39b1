// SPDX-License-Identifier: Apache-2.0
// What memory_of() says against what the Meter counts, for every kind of module.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "lockstep/memory/meter.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/parallelize.h"
#include "tests/parallel/shard/module_cases.h"

namespace lockstep::test {
namespace {

using memory::Meter;
using parallel::Layer;
using parallel::memory_of;
using parallel::ModelMemory;
using parallel::Tensors;
using testing::HasSubstr;

constexpr int64_t kWide = 12, kRows = 40;

// Modules that have the batch in the second dimension.
int batch_dim_of(const ModuleCase& each) {
  return each.name == "lstm" || each.name == "gru" || each.name == "attention" ||
                 each.name == "encoder"
             ? 1
             : 0;
}

at::Tensor with_rows(const at::Tensor& input, int dim, int64_t rows) {
  return input.index_select(dim, at::arange(rows, at::kLong).remainder(input.size(dim)));
}

at::Tensor square_loss(const Tensors& outputs) { return outputs[0].square().sum(); }

bool is_sparse(const ModuleCase& each) { return each.name.ends_with("sparse"); }

// The highest peak of a step after the first, without what was there before.
int64_t measured(const ModuleCase& each) {
  const int64_t before = Meter::current();
  const auto model = make_case_module(each, at::kCPU);
  std::vector<at::Tensor> trained;
  std::vector<optim::NamedParameter> named;
  for (const at::Tensor& parameter : parameters_of(*model)) {
    if (!parameter.requires_grad()) continue;
    trained.push_back(parameter);
    named.push_back({std::to_string(named.size()), parameter});
  }
  std::unique_ptr<optim::Optimizer> optimizer;
  if (!is_sparse(each)) optimizer = std::make_unique<optim::AdamW>(named);
  int64_t peak = 0;
  for (int step = 0; step < 3; ++step) {
    Meter::reset_peak();
    const at::Tensor input = with_rows(each.input(5), batch_dim_of(each), kRows);
    const at::Tensor loss = square_loss({model->forward(input)});
    loss.backward();
    if (optimizer) optimizer->step();
    drop_gradients(trained);
    if (step > 0) peak = std::max(peak, Meter::peak());
  }
  return peak - before;
}

Layer layer_of(const ModuleCase& each) {
  return parallel::layer("case", [each] { return make_case_module(each, at::kCPU); });
}

TEST(MemoryOf, IsWithinTenPercentForEveryModule) {
  Meter::install();
  const at::Tensor settled = at::randn({8, 8}).matmul(at::randn({8, 8}));  // what is made once
  int on_meta = 0;
  for (const ModuleCase& each : module_cases(kWide)) {
    const ModelMemory said =
        memory_of({layer_of(each)}, {each.input(5)}, layout::ParallelDims{}, {},
                  {.rows = kRows,
                   .batch_dim = batch_dim_of(each),
                   .optimizer_bytes = is_sparse(each) ? 0 : 8,
                   .loss = square_loss});
    const auto found = static_cast<double>(measured(each));
    const auto total = static_cast<double>(said.ranks.at(0).total());
    std::printf("%-22s %8.1f KB, measured %8.1f, %+5.1f %%  %s\n", each.name.c_str(), total / 1024,
                found / 1024, 100 * (total / found - 1), said.counted.c_str());
    EXPECT_NEAR(total, found, 0.1 * found) << each.name;
    on_meta += said.layers.at(0).on_meta ? 1 : 0;
  }
  EXPECT_GT(on_meta, 0);
}

// A layer with a number that no one can see from outside.
class HeadsImpl : public torch::nn::Module {
 public:
  explicit HeadsImpl(int64_t heads) : heads_(heads) {
    wide_ = register_module("wide", torch::nn::Linear(64, 64));
  }
  at::Tensor forward(const at::Tensor& x) {  // (B, T, 64)
    ++calls;
    const at::Tensor split = wide_(x).unflatten(2, {heads_, 64 / heads_}).transpose(1, 2);
    const at::Tensor mixed = split.matmul(split.transpose(2, 3)).softmax(-1).matmul(split);
    return mixed.transpose(1, 2).flatten(2);
  }

  static inline int calls = 0;

 private:
  int64_t heads_;
  torch::nn::Linear wide_{nullptr};
};
TORCH_MODULE(Heads);

Layer heads_layer(int index, int64_t heads) {
  return parallel::layer("blocks." + std::to_string(index), [heads] { return Heads(heads); });
}

TEST(MemoryOf, LayersThatOnlyLookAlikeAreCountedByThemselves) {
  const auto said = memory_of({heads_layer(0, 1), heads_layer(1, 8), heads_layer(2, 1)},
                              {at::zeros({2, 32, 64})}, layout::ParallelDims{});
  // Scores of one head are (B, 32, 32).
  EXPECT_GT(said.layers[1].kept, said.layers[2].kept + 2 * 7 * 32 * 32 * 4 - 1);
  EXPECT_EQ(said.layers[0].name, "blocks.0.wide");
}

TEST(MemoryOf, EachDistinctLayerRunsOnce) {
  HeadsImpl::calls = 0;
  const auto said =
      memory_of({heads_layer(0, 2), heads_layer(1, 2), heads_layer(2, 2), heads_layer(3, 2)},
                {at::zeros({2, 4, 64})}, layout::ParallelDims{});
  // The first has an input without gradient. A forward, and two with a backward; then one each.
  EXPECT_EQ(HeadsImpl::calls, 3 + 3 + 1 + 1) << said.counted;
  EXPECT_EQ(said.layers[3].kept, said.layers[1].kept);
  EXPECT_GT(said.layers[1].kept, 0);
}

// Passes its words on, and adds rows of a table of its own.
class SparseRowsImpl : public torch::nn::Module {
 public:
  SparseRowsImpl() {
    table_ = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 40).sparse(true)));
  }
  Tensors forward(const Tensors& in) {
    const at::Tensor rows = table_(in[0]);
    return {in[0], in.size() > 1 ? in[1] + rows : rows};
  }

 private:
  torch::nn::Embedding table_{nullptr};
};
TORCH_MODULE(SparseRows);

TEST(MemoryOf, SparseGradientsOfAlikeLayersAreSparse) {
  std::vector<Layer> layers;
  for (int i = 0; i < 3; ++i) {
    layers.push_back(parallel::layer("rows." + std::to_string(i), [] { return SparseRows(); }));
  }
  const auto said = memory_of(layers, {at::zeros({2, 4}, at::kLong)}, layout::ParallelDims{});
  EXPECT_EQ(said.ranks[0].parameters, 3 * 50 * 40 * 4);
  EXPECT_EQ(said.ranks[0].gradients, 0);
}

TEST(MemoryOf, ALayersOutputThatBothKeepCountsOnce) {
  const auto relu = [](int index) {
    return parallel::layer("relu." + std::to_string(index), [] {
      return torch::nn::Sequential(torch::nn::Linear(256, 256), torch::nn::ReLU());
    });
  };
  const Tensors input{at::zeros({512, 256})};
  const auto said = memory_of({relu(0), relu(1)}, input, layout::ParallelDims{});
  constexpr int64_t kOne = 512 * 256 * 4;
  EXPECT_NEAR(static_cast<double>(said.layers[0].kept), 2 * kOne, 0.01 * kOne);  // input and output
  EXPECT_NEAR(static_cast<double>(said.layers[1].kept), kOne, 0.01 * kOne);      // output alone
}

TEST(MemoryOf, RecomputationKeepsInputsAlone) {
  const std::vector<Layer> layers{heads_layer(0, 4), heads_layer(1, 4)};
  const Tensors input{at::zeros({8, 32, 64})};
  layout::ParallelConfig config{.micro_batch_size = 8};
  const auto selective = memory_of(layers, input, config);
  config.memory = layout::MemoryStrategy::aggressive;
  const auto full = memory_of(layers, input, config);
  config.memory = layout::MemoryStrategy::basic;
  const auto none = memory_of(layers, input, config);
  EXPECT_LT(selective.layers[1].kept, none.layers[1].kept);
  EXPECT_GT(selective.layers[1].kept, full.layers[1].kept);
  constexpr int64_t kInput = 8 * 32 * 64 * 4;
  EXPECT_NEAR(static_cast<double>(full.layers[1].kept), kInput,
              0.1 * kInput);  // and a generator's state
  EXPECT_GT(none.layers[1].kept, 3 * kInput);
  EXPECT_LT(full.ranks[0].activations, none.ranks[0].activations);
}

TEST(MemoryOf, LeavesRandomNumbersAndModulesAsTheyWere) {
  torch::manual_seed(7);
  const auto module = std::make_shared<CaseModule>();
  module_cases()[10].make(*module);  // batch norm, with running averages
  const Layer there = parallel::layer("there", [module] { return module; });
  const Layer made = heads_layer(1, 2);
  module->parameters()[1].mutable_grad() = at::full({5}, 3.0);
  const at::Tensor mean = module->named_buffers()["module.running_mean"].clone();
  torch::manual_seed(7);
  memory_of({there}, {at::randn({4, 5, 4, 4})}, layout::ParallelDims{});
  torch::manual_seed(7);
  memory_of({made}, {at::zeros({4, 8, 64})}, layout::ParallelDims{});
  const at::Tensor drawn = at::randn({3});
  torch::manual_seed(7);
  EXPECT_TRUE(at::equal(drawn, at::randn({3})));
  EXPECT_TRUE(at::equal(module->named_buffers()["module.running_mean"], mean));
  EXPECT_TRUE(at::equal(module->parameters()[1].grad(), at::full({5}, 3.0)));
  EXPECT_FALSE(module->parameters()[0].grad().defined());
  EXPECT_TRUE(module->parameters()[0].is_cpu());
}

TEST(MemoryOf, RefusesWhatDoesNotFit) {
  const std::vector<Layer> layers{heads_layer(0, 1), heads_layer(1, 1), heads_layer(2, 1)};
  const Tensors input{at::zeros({2, 4, 64})};
  const auto message = [&](const Tensors& inputs, const layout::ParallelDims& dims) {
    try {
      memory_of(layers, inputs, dims);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  EXPECT_THAT(message(input, {.pp = 2}), HasSubstr("3 layers in 2 stages"));
  EXPECT_THAT(message({}, {}), HasSubstr("0 example inputs"));
  EXPECT_THAT(message({at::zeros({})}, {}), HasSubstr("rows in dimension 0"));
}

}  // namespace
}  // namespace lockstep::test
