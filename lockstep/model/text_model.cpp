// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/text_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::model {
namespace {

at::Tensor tokens_of(const TextStep& step) {
  return at::tensor(step.tokens, at::kLong).unsqueeze(0);
}

at::Tensor on_host(const at::Tensor& logits) {
  return logits.to(at::kCPU, at::kFloat).contiguous();
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

class WholeModel final : public TextModel {
 public:
  explicit WholeModel(LanguageModelImpl& model)
      : model_(model), device_(model.parameters().front().device()) {
    model.eval();
  }
  ~WholeModel() override { model_.decoding().reset({}); }

  void reset(nn::KvCacheOptions options) override { model_.decoding().reset(options); }

  std::vector<std::vector<double>> run(std::span<const TextStep> steps,
                                       const TextReader& reader) override {
    const at::NoGradGuard no_grad;
    std::vector<std::vector<double>> results;
    for (const TextStep& step : steps) {
      model_.decoding().begin(step.spans, device_);
      results.push_back(
          reader.read(results.size(), on_host(model_.forward(tokens_of(step).to(device_))[0])));
    }
    model_.decoding().end();
    return results;
  }

  std::vector<TextScore> score(std::span<const ScoredText> texts) override {
    const at::NoGradGuard no_grad;
    std::vector<TextScore> scores;
    for (const ScoredText& text : texts) {
      const at::Tensor logits = model_.forward(inputs_of(text).to(device_))[0];
      scores.push_back(score_of(predictions(logits, text), text));
    }
    return scores;
  }

 private:
  LanguageModelImpl& model_;
  c10::Device device_;
};

class SharedModel final : public TextModel {
 public:
  SharedModel(const parallel::Pipeline& pipeline, std::shared_ptr<Decoding> decoding, int64_t vocab)
      : pipeline_(pipeline),
        decoding_(std::move(decoding)),
        vocab_(vocab),
        stages_(pipeline.mesh()["pp"]) {
    pipeline_.eval();
  }
  ~SharedModel() override { decoding_->reset({}); }

  void reset(nn::KvCacheOptions options) override { decoding_->reset(options); }

  std::vector<std::vector<double>> run(std::span<const TextStep> steps,
                                       const TextReader& reader) override {
    const auto step = [&](int i) -> const TextStep& { return steps[static_cast<size_t>(i)]; };
    const c10::Device device = pipeline_.options().device;
    std::vector<std::vector<double>> results(steps.size());
    pipeline_.evaluate(
        {.inputs = [&](int i) { return parallel::Tensors{tokens_of(step(i)).to(device)}; },
         .loss =
             [&](int i, const parallel::Tensors& outputs) {
               const auto index = static_cast<size_t>(i);
               results[index] = reader.read(index, on_host(whole(outputs[0][0])));
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

 private:
  // Ranks of "tp" have their columns of the vocabulary, (M, V / tp).
  at::Tensor whole(const at::Tensor& logits) const {
    const comm::Group& group = pipeline_.tensor().group();
    if (group.size() == 1) return logits;
    const int64_t most = layout::balanced_range(vocab_, group.size(), 0).size(),
                  rows = logits.size(0);
    const at::Tensor mine = at::zeros({rows, most}, logits.options());
    mine.narrow(1, 0, logits.size(1)).copy_(logits);
    const at::Tensor all = at::empty({group.size(), rows, most}, logits.options());
    comm::all_gather(all, mine, group, {.tag = "logits"}).wait();
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < group.size(); ++rank) {
      parts.push_back(
          all[rank].narrow(1, 0, layout::balanced_range(vocab_, group.size(), rank).size()));
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
  int64_t vocab_;
  comm::Group stages_;
};

}  // namespace

std::unique_ptr<TextModel> text_model(LanguageModelImpl& model) {
  return std::make_unique<WholeModel>(model);
}
std::unique_ptr<TextModel> text_model(const parallel::Pipeline& pipeline,
                                      std::shared_ptr<Decoding> decoding, int64_t vocab) {
  return std::make_unique<SharedModel>(pipeline, std::move(decoding), vocab);
}

}  // namespace lockstep::model
