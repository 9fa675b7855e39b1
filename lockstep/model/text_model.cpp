// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/text_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/layout/shard_math.h"
#include "lockstep/memory/device_graph.h"

namespace lockstep::model {
namespace {

// float32 in the CPU's memory. From a device by pinned memory, which is several times as fast.
at::Tensor on_host(const at::Tensor& logits) {
  if (logits.is_cpu()) return logits.to(at::kFloat).contiguous();
  const at::Tensor host =
      at::empty(logits.sizes(), at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
  return host.copy_(logits.to(at::kFloat));
}

// What the reader wants of the logits (M, V), where they are.
at::Tensor wanted_by(const TextReader& reader, const at::Tensor& logits) {
  if (reader.most_likely_of == 0) return logits.to(at::kFloat);
  return logits.narrow(1, 0, std::min(reader.most_likely_of, logits.size(1)))
      .argmax(1, /*keepdim=*/true)
      .to(at::kFloat);
}

int64_t chunk_on(c10::Device device) { return device.is_cuda() ? 2048 : 512; }

DecodingOptions decoding_options(nn::KvCacheOptions cache, const config::ModelSpec& spec,
                                 c10::Device device, int64_t ranks) {
  cache.window = spec.window;
  return {.cache = cache,
          .has_kernel = nn::cuda::can_attend(device, spec.heads / ranks,
                                             spec.num_kv_heads() / ranks, spec.head_size())};
}

// Of a text that all but its last token were given to the model of.
at::Tensor inputs_of(const ScoredText& text) {
  return at::tensor(at::ArrayRef<int64_t>(text.tokens).slice(0, text.tokens.size() - 1), at::kLong)
      .unsqueeze(0);
}
// The logits that predict scored tokens, of those of all inputs (T, V).
at::Tensor predictions(const at::Tensor& logits, const ScoredText& text) {
  return logits.narrow(0, text.from - 1, static_cast<int64_t>(text.tokens.size()) - text.from);
}

// From these logits.
TextScore score_of(const at::Tensor& logits, const ScoredText& text) {
  const at::Tensor logs = on_host(logits).to(at::kDouble).log_softmax(1);
  const at::Tensor targets = at::tensor(
      at::ArrayRef<int64_t>(text.tokens).slice(static_cast<size_t>(text.from)), at::kLong);
  return {logs.gather(1, targets.unsqueeze(1)).sum().item<double>(), logs.argmax(1).equal(targets)};
}

// The cache is one for the model: a text that is begun while others are generated takes it.
void require_own(const Decoding& decoding, int64_t reset) {
  if (decoding.resets() == reset) return;
  throw ConfigError(
      "[generate] another text was begun with this model before this one has ended, must be one "
      "after the other");
}

struct RecordedForward {
  std::unique_ptr<memory::DeviceGraph> graph;
  at::Tensor result;  // always in the same memory
};

// `forward` was called before. Its graph is null where this device cannot record.
RecordedForward record(c10::Device device, const std::function<at::Tensor()>& forward) {
  const memory::OnStream stream(memory::own_stream(device));
  const auto recorder = memory::make_graph_recorder(device);
  if (!recorder) return {};
  recorder->begin();
  at::Tensor result = forward();
  return {recorder->end(), std::move(result)};
}

// A model that is all here, and stays where it is.
class WholeModel final : public TextModel {
 public:
  // `stays`: parameters are always in the same memory, so a step can be recorded.
  WholeModel(std::vector<parallel::LayerForward> layers, c10::Device device,
             std::shared_ptr<Decoding> decoding, const config::ModelSpec& spec, bool stays)
      : layers_(std::move(layers)),
        device_(device),
        decoding_(std::move(decoding)),
        spec_(spec),
        stays_(stays) {}
  ~WholeModel() override { decoding_->reset({}); }

  void reset(nn::KvCacheOptions options) override {
    recorded_ = {};
    tokens_ = at::Tensor();
    reset_ = decoding_->reset(decoding_options(options, spec_, device_, 1));
  }

  std::vector<std::vector<double>> run(std::span<const TextStep> steps,
                                       const TextReader& reader) override {
    require_own(*decoding_, reset_);
    const at::NoGradGuard no_grad;
    std::vector<std::vector<double>> results;
    for (const TextStep& step : steps) {
      decoding_->begin(step.spans, device_);
      const at::Tensor wanted = on_host(forward(step, reader));
      results.push_back(reader.read(results.size(), decoding_->of_spans(wanted)));
    }
    decoding_->end();
    return results;
  }

  std::vector<TextScore> score(std::span<const ScoredText> texts) override {
    const at::NoGradGuard no_grad;
    std::vector<TextScore> scores;
    for (const ScoredText& text : texts) {
      const at::Tensor logits = logits_of(inputs_of(text).to(device_));
      scores.push_back(score_of(predictions(logits, text), text));
    }
    return scores;
  }

  int64_t chunk() const override { return chunk_on(device_); }

 private:
  at::Tensor logits_of(const at::Tensor& tokens) const {
    parallel::Tensors x{tokens};
    for (const parallel::LayerForward& layer : layers_) x = layer(x);
    return x[0][0];
  }

  // New tokens are computed once, then recorded, then repeated.
  at::Tensor forward(const TextStep& step, const TextReader& reader) {
    const at::Tensor tokens = decoding_->arranged(step.spans, step.tokens);
    if (!decoding_->are_new()) return wanted_by(reader, logits_of(tokens.to(device_)));
    const auto compute = [&] { return wanted_by(reader, logits_of(tokens_)); };
    if (!tokens_.defined()) {
      tokens_ = tokens.to(device_);
      return compute();
    }
    tokens_.copy_(tokens.pin_memory(), /*non_blocking=*/true);
    if (!stays_) return compute();
    if (!recorded_.graph || recorded_for_ != reader.most_likely_of) {
      recorded_ = record(device_, compute);
      recorded_for_ = reader.most_likely_of;
    }
    if (!recorded_.graph) return compute();
    recorded_.graph->repeat();
    return recorded_.result;
  }

  std::vector<parallel::LayerForward> layers_;
  c10::Device device_;
  std::shared_ptr<Decoding> decoding_;
  int64_t reset_ = 0;
  config::ModelSpec spec_;
  bool stays_;
  at::Tensor tokens_;  // of new tokens, always the same memory
  RecordedForward recorded_;
  int64_t recorded_for_ = 0;
};

class SharedModel final : public TextModel {
 public:
  SharedModel(const parallel::Pipeline& pipeline, std::shared_ptr<Decoding> decoding,
              const config::ModelSpec& spec)
      : pipeline_(pipeline),
        decoding_(std::move(decoding)),
        spec_(spec),
        stages_(pipeline.mesh()["pp"]) {}
  ~SharedModel() override { decoding_->reset({}); }

  void reset(nn::KvCacheOptions options) override {
    reset_ = decoding_->reset(decoding_options(options, spec_, pipeline_.options().device,
                                               pipeline_.tensor().group().size()));
  }

  std::vector<std::vector<double>> run(std::span<const TextStep> steps,
                                       const TextReader& reader) override {
    require_own(*decoding_, reset_);
    const auto step = [&](int i) -> const TextStep& { return steps[static_cast<size_t>(i)]; };
    const c10::Device device = pipeline_.options().device;
    std::vector<std::vector<double>> results(steps.size());
    pipeline_.evaluate({.inputs =
                            [&](int i) {
                              return parallel::Tensors{
                                  decoding_->arranged(step(i).spans, step(i).tokens).to(device)};
                            },
                        .loss =
                            [&](int i, const parallel::Tensors& outputs) {
                              const auto index = static_cast<size_t>(i);
                              const at::Tensor wanted =
                                  on_host(wanted_by(reader, whole(outputs[0][0])));
                              results[index] = reader.read(index, decoding_->of_spans(wanted));
                              return at::zeros({});
                            },
                        .begin = [&](int i) { decoding_->begin(step(i).spans, device); }},
                       static_cast<int>(steps.size()));
    decoding_->end();
    share(results, steps, reader.count);
    return results;
  }

  std::vector<TextScore> score(std::span<const ScoredText> texts) override {
    const auto text = [&](int i) -> const ScoredText& { return texts[static_cast<size_t>(i)]; };
    const c10::Device device = pipeline_.options().device;
    std::vector<double> numbers(2 * texts.size());
    pipeline_.evaluate(
        {.inputs = [&](int i) { return parallel::Tensors{inputs_of(text(i)).to(device)}; },
         .loss =
             [&](int i, const parallel::Tensors& outputs) {
               const TextScore score =
                   score_of(whole(predictions(outputs[0][0], text(i))), text(i));
               numbers[2 * static_cast<size_t>(i)] = score.log_likelihood;
               numbers[2 * static_cast<size_t>(i) + 1] = score.is_greedy ? 1 : 0;
               return at::zeros({});
             }},
        static_cast<int>(texts.size()));
    sum_over_stages(numbers);
    std::vector<TextScore> scores;
    for (size_t i = 0; i < texts.size(); ++i)
      scores.push_back({numbers[2 * i], numbers[2 * i + 1] > 0});
    return scores;
  }

  int steps_at_once() const override { return stages_.size(); }
  int64_t chunk() const override { return chunk_on(pipeline_.options().device); }

 private:
  // Ranks of "tp" have their columns of the vocabulary, (M, V / tp).
  at::Tensor whole(const at::Tensor& logits) const {
    const comm::Group& group = pipeline_.tensor().group();
    if (group.size() == 1) return logits;
    const int64_t most = layout::balanced_range(spec_.vocab, group.size(), 0).size(),
                  rows = logits.size(0);
    const at::Tensor mine = at::zeros({rows, most}, logits.options());
    mine.narrow(1, 0, logits.size(1)).copy_(logits);
    const at::Tensor all = at::empty({group.size(), rows, most}, logits.options());
    comm::all_gather(all, mine, group, {.tag = "logits"}).wait();
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < group.size(); ++rank) {
      parts.push_back(
          all[rank].narrow(1, 0, layout::balanced_range(spec_.vocab, group.size(), rank).size()));
    }
    return at::cat(parts, 1);
  }

  // Only the rank of the last stage has them so far.
  void share(std::vector<std::vector<double>>& results, std::span<const TextStep> steps,
             int64_t count) const {
    if (stages_.size() == 1) return;
    std::vector<double> all;
    for (size_t i = 0; i < steps.size(); ++i) {
      results[i].resize(steps[i].spans.size() * static_cast<size_t>(count));
      all.insert(all.end(), results[i].begin(), results[i].end());
    }
    sum_over_stages(all);
    auto next = all.begin();
    for (std::vector<double>& each : results) {
      std::copy_n(next, each.size(), each.begin());
      next += static_cast<int64_t>(each.size());
    }
  }
  void sum_over_stages(std::vector<double>& numbers) const {
    if (stages_.size() == 1) return;
    const at::Tensor sums =
        at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kDouble);
    comm::all_reduce(sums, stages_, {.tag = "results of the last stage"}).wait();
  }

  parallel::Pipeline pipeline_;
  std::shared_ptr<Decoding> decoding_;
  int64_t reset_ = 0;
  config::ModelSpec spec_;
  comm::Group stages_;
};

// Whole on each rank.
bool is_whole(const parallel::Pipeline& pipeline) {
  return pipeline.stages().size() == 1 && pipeline.has_first_stage() && pipeline.has_last_stage() &&
         pipeline.sharded().empty() && pipeline.tensor().group().size() == 1;
}

}  // namespace

std::unique_ptr<TextModel> text_model(LanguageModelImpl& model) {
  model.eval();
  const auto parameters = model.parameters();
  // Sharded and offloaded ones have this key.
  const bool stays = std::ranges::none_of(parameters, [](const at::Tensor& parameter) {
    return parameter.key_set().has(c10::DispatchKey::DeferredInit);
  });
  return std::make_unique<WholeModel>(model.layers(), parameters.front().device(), model.decoding(),
                                      model.spec(), stays);
}

std::unique_ptr<TextModel> text_model(const parallel::Pipeline& pipeline,
                                      std::shared_ptr<Decoding> decoding,
                                      const config::ModelSpec& spec) {
  parallel::Pipeline shared = pipeline;
  shared.eval();
  if (is_whole(shared))
    return std::make_unique<WholeModel>(shared.layers(), shared.options().device,
                                        std::move(decoding), spec, /*stays=*/true);
  return std::make_unique<SharedModel>(shared, std::move(decoding), spec);
}

}  // namespace lockstep::model
