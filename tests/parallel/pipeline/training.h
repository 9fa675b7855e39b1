// SPDX-License-Identifier: Apache-2.0
// Language models trained by one process and over the axes of a mesh, on the same micro-batches.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/model/language_model.h"
#include "lockstep/model/layers.h"
#include "lockstep/nn/loss.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/schedule/schedule.h"
#include "tests/support/sampling.h"

namespace lockstep::test {

using layout::PipelineSchedule;

struct PipelineCase {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int ranks = 1, dp = 1, tp = 1;  // ranks: of the pipeline
  bool sequence_parallel = false;
  int chunks = 1;
  int microbatches = 8;  // of each data-parallel rank
  bool llama = false, tied = false, reproducible = false;
  bool qwen = false;  // llama with norms of heads, heads of their own width, and a window
  layout::Recompute recompute = layout::Recompute::none;
  std::string disk = {};  // folder for activations; empty: in memory
  std::optional<parallel::FullyShardOptions> shard = std::nullopt;
  int max_unsharded = 3;
  int first_step = 0, steps = tests_all() ? 10 : 3;
  int layers = 0;  // 0: as few as the stages allow
  double dropout = 0.1;
  bool evals = false;  // trains in eval mode
  optim::AdamWOptions adamw = {.lr = 1e-3};
  c10::Device device = at::kCPU;

  int stages() const { return ranks * chunks; }
  int total() const { return dp * microbatches; }
  int world() const { return dp * tp * ranks; }
  int64_t kv_heads() const { return llama ? std::max(2, tp) : 4; }
};

inline std::string describe(const PipelineCase& c) {
  std::string text(layout::name_of(c.schedule));
  text += " p" + std::to_string(c.ranks) + " v" + std::to_string(c.chunks) + " m" +
          std::to_string(c.microbatches) + " dp" + std::to_string(c.dp) + " tp" +
          std::to_string(c.tp) + (c.sequence_parallel ? "s" : "") + " " +
          std::string(layout::name_of(c.recompute)) + (c.llama ? " llama" : " gpt") +
          (c.qwen ? " as qwen3" : "") + (c.tied ? " tied" : "") +
          (c.reproducible ? " reproducible" : "") + (c.evals ? " in eval mode" : "") + " at most " +
          std::to_string(c.max_unsharded);
  if (c.shard) text += " " + std::string(layout::name_of(c.shard->strategy));
  return text;
}

// Each layer; what may be tied is alone.
inline parallel::UnitPolicy units_of_language_model() {
  return parallel::ByPredicate([](const std::string& path, torch::nn::Module&) {
    return path.starts_with("blocks.") ? std::count(path.begin(), path.end(), '.') == 1
                                       : path == "embed" || path == "positions" || path == "head";
  });
}

constexpr int64_t kVocab = 29, kLength = 8, kRows = 2;

// A layer for each stage at least, and with one more the stages differ.
inline config::ModelSpec spec_of(const PipelineCase& c) {
  config::ModelSpec spec{.kind = c.llama ? config::ModelKind::llama : config::ModelKind::gpt,
                         .layers = c.layers > 0 ? c.layers : std::max(2, c.stages()),
                         .hidden = 16,
                         .heads = 4,
                         .kv_heads = c.kv_heads(),
                         .dropout = c.dropout,
                         .tied = c.tied};
  if (c.qwen) {
    spec.qk_norm = true;
    spec.head_dim = 6;
    spec.window = 5;
  }
  return spec.resolved(kLength, kVocab);
}

// Embeddings and head lie with the first and the last block.
inline std::vector<int> split_of(const config::ModelSpec& spec, int stages) {
  if (stages == 1) return {};
  std::vector<int> split(static_cast<size_t>(stages), static_cast<int>(spec.layers) / stages);
  ++split.front();
  ++split.back();
  return split;
}

struct TokenBatch {
  at::Tensor input, target;
};

// Of the micro-batch that is number `index` in the whole run.
inline TokenBatch tokens(int64_t index, c10::Device device) {
  const at::Tensor all =
      at::randint(0, kVocab, {kRows, kLength + 1},
                  at::detail::createCPUGenerator(static_cast<uint64_t>(100 + index)), at::kLong);
  return {all.narrow(1, 0, kLength).contiguous().to(device),
          all.narrow(1, 1, kLength).flatten().contiguous().to(device)};
}

// `group` shares the vocabulary.
inline at::Tensor loss_of(const at::Tensor& logits, const TokenBatch& batch, double scale,
                          const comm::Group& group = {}) {
  return nn::cross_entropy(logits.flatten(0, 1), batch.target,
                           {.scale = scale, .group = group, .vocab = kVocab});
}

struct PipelineCurve {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> weights;               // that this rank has
  std::map<std::string, layout::TensorSplit> splits = {};  // how they lie in the whole ones
};

inline PipelineCurve train_one_process(const PipelineCase& c) {
  model::LanguageModel model(spec_of(c), {.tensors = at::TensorOptions().device(c.device)});
  model::initialize(*model, 3);
  model->random().seed = 5;
  model->train(!c.evals);
  auto whole = parallel::ddp(model, comm::Group(), {.reproducible = c.reproducible});
  optim::AdamW optimizer(*model, c.adamw);
  const double scale = 1.0 / static_cast<double>(c.total() * kRows * kLength);
  PipelineCurve curve;
  for (int step = 0; step < c.steps; ++step) {
    double sum = 0;
    for (int i = 0; i < c.total(); ++i) {
      model->random().position = {.step = step, .micro_batch = i};
      std::optional<parallel::NoSync> no_sync;
      if (i + 1 < c.total()) no_sync.emplace(whole.no_sync());
      const TokenBatch batch = tokens(step * c.total() + i, c.device);
      const at::Tensor loss = loss_of(whole.forward(batch.input), batch, scale);
      loss.backward();
      sum += loss.item<double>();
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(
        optim::clip_grad_norm_(model->parameters(), 1, {.exact = c.reproducible}));
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& item : model->named_parameters())
    curve.weights[item.key()] = item.value().detach().clone();
  return curve;
}

struct PipelineTrained {
  PipelineCurve curve;
  parallel::PipelineStats stats;  // of the last step
  schedule::Schedule schedule;
};

// Called before a step, by its number, and after the last.
using AtStep =
    std::function<void(int step, const parallel::Pipeline& pipeline, optim::Optimizer& optimizer)>;

inline PipelineTrained train_pipeline(
    const PipelineCase& c, const comm::Group& world,
    const AtStep& at_step = [](int, const parallel::Pipeline&, optim::Optimizer&) {}) {
  const mesh::Mesh mesh =
      mesh::Mesh::parallel(world, layout::ParallelDims{.dp = c.dp, .tp = c.tp, .pp = c.ranks});
  const config::ModelSpec spec = spec_of(c);
  const auto random = std::make_shared<nn::RandomContext>();
  random->seed = 5;
  parallel::PipelineOptions options{
      .schedule = c.schedule,
      .microbatches = c.microbatches,
      .chunks = c.chunks,
      .split = split_of(spec, c.stages()),
      .plan = config::tensor_plan(spec),
      .device = c.device,
      .advanced = {
          .sequence_parallel = c.sequence_parallel,
          .max_unsharded = c.max_unsharded,
          .initializer =
              parallel::MaterializeOptions{
                  .seed = 3, .device = c.device, .rule = model::initial_values(spec)},
          .recompute = c.recompute,
          .random = random,
          .store = c.disk.empty() ? nullptr : std::make_shared<parallel::ActivationStore>(c.disk)}};
  if (c.stages() == 1) options.split = {static_cast<int>(spec.layers) + 2};
  if (c.shard) {
    options.data = *c.shard;
  } else {
    options.data = parallel::DdpOptions{.reproducible = c.reproducible};
  }
  parallel::Pipeline pipeline(
      model::language_model_layers(spec, at::TensorOptions().device(c.device), random), mesh,
      options);
  pipeline.train(!c.evals);
  optim::AdamW optimizer(pipeline.named_parameters(), c.adamw);
  const comm::Group dp = mesh["dp"];
  // Gradients are averaged over dp.
  const double scale = static_cast<double>(c.dp) / static_cast<double>(c.total() * kRows * kLength);
  PipelineTrained result;
  for (int step = c.first_step; step < c.steps; ++step) {
    at_step(step, pipeline, optimizer);
    const auto batch_of = [&](int i) {
      return tokens(step * c.total() + dp.rank() * c.microbatches + i, c.device);
    };
    const at::Tensor losses = pipeline.step(
        {.inputs = [&](int i) { return parallel::Tensors{batch_of(i).input}; },
         .loss =
             [&](int i, const parallel::Tensors& outputs) {
               return loss_of(outputs[0], batch_of(i), scale, mesh["tp"]);
             },
         .begin =
             [&](int i) {
               random->position = {.step = step, .micro_batch = dp.rank() * c.microbatches + i};
             }});
    const at::Tensor all = at::empty({dp.size() * losses.numel()}, at::kDouble);
    comm::all_gather(all, losses, dp).wait();
    double sum = 0;
    for (int64_t i = 0; i < all.numel(); ++i) sum += all[i].item<double>();
    result.curve.losses.push_back(sum / c.dp);
    result.curve.norms.push_back(pipeline.clip_grad_norm_(1, {.exact = c.reproducible}));
    optimizer.step();
    optimizer.zero_grad();
  }
  at_step(c.steps, pipeline, optimizer);
  for (size_t i = 0; i < pipeline.sharded().size(); ++i) {
    const auto copies = pipeline.tied_copies(i);  // get their values before a step only
    for (const auto& [name, tensor] : pipeline.sharded()[i].full_state_dict()) {
      if (std::find(copies.begin(), copies.end(), name) == copies.end())
        result.curve.weights[name] = tensor.clone();
    }
  }
  if (pipeline.sharded().empty()) {
    for (const auto& [name, tensor, parts] : pipeline.named_parameters())
      result.curve.weights[name] = tensor.detach().clone();
  }
  for (const auto& [name, tensor] : result.curve.weights)
    result.curve.splits[name] = pipeline.tensor().split(name, tensor.sizes().vec());
  result.stats = pipeline.stats();
  result.schedule = pipeline.schedule();
  return result;
}

// What one process does with the same micro-batches.
inline const PipelineCurve& one_process(const PipelineCase& c) {
  static std::map<std::string, PipelineCurve> known;
  const std::string key = std::to_string(spec_of(c).layers) + " " + std::to_string(c.total()) +
                          (c.llama ? "l" + std::to_string(c.kv_heads()) : "g") +
                          (c.qwen ? "q" : "") + std::to_string(c.dropout) + c.device.str() +
                          (c.tied ? "t" : "u") + (c.reproducible ? "r" : "") +
                          (c.evals ? "e" : "") + std::to_string(c.steps);
  const auto found = known.find(key);
  return found != known.end() ? found->second
                              : known.emplace(key, train_one_process(c)).first->second;
}

inline void expect_near_each(const std::vector<double>& found, const std::vector<double>& expected,
                             const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5 * std::abs(expected[i])) << what << " at step " << i;
}

inline void expect_same(const PipelineCase& c, const PipelineCurve& found,
                        const PipelineCurve& expected) {
  EXPECT_FALSE(found.weights.empty());
  const bool bits = c.reproducible && !c.tied && c.tp == 1;
  if (bits) {
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
  } else {
    expect_near_each(found.losses, expected.losses, "loss");
    expect_near_each(found.norms, expected.norms, "norm");
  }
  for (const auto& [name, tensor] : found.weights) {
    at::Tensor other = expected.weights.at(name);
    if (const auto& split = found.splits.at(name); !split.is_whole()) {
      std::vector<at::Tensor> parts;
      for (const layout::Range& range : split.ranges)
        parts.push_back(other.narrow(split.dim, range.begin, range.size()));
      other = at::cat(parts, split.dim);
    }
    EXPECT_TRUE(bits ? at::equal(tensor, other) : at::allclose(tensor, other, 0, 1e-4)) << name;
  }
}

}  // namespace lockstep::test
