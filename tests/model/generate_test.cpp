// SPDX-License-Identifier: Apache-2.0
// Text from a language model: what is drawn from logits, and the same tokens with and without a
// cache, beside other texts, and in every layout.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/model/layers.h"
#include "lockstep/model/sampling.h"
#include "lockstep/model/text_model.h"
#include "lockstep/nn/kernels/linear_map.h"
#include "lockstep/parallel/offload/offload.h"
#include "lockstep/parallel/parallelize.h"

namespace lockstep::model {
namespace {

using config::ModelKind;
using config::ModelSpec;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;
using Tokens = std::vector<int64_t>;

// ---- from logits to a token ----

const std::vector<float> kLogits{2, 1.5, 1, 0, -1, -.5};

std::vector<double> probabilities(const GenerateOptions& options) {
  std::vector<double> all(kLogits.size());
  for (const Candidate& each : candidates(kLogits, options))
    all[static_cast<size_t>(each.token)] = each.probability;
  return all;
}

Tokens kept(GenerateOptions options) {
  options.top_k = options.top_k == 40 ? 0 : options.top_k;
  Tokens tokens;
  for (const Candidate& each : candidates(kLogits, options)) tokens.push_back(each.token);
  return tokens;
}

// Of transformers' processors, computed apart from them.
TEST(Sampling, HasTheProbabilitiesOfTheDefinition) {
  EXPECT_THAT(probabilities({.temperature = 1, .top_k = 0}),
              Pointwise(DoubleNear(1e-8), std::vector<double>{.44610645, .27057724, .16411339,
                                                              .06037394, .02221033, .03661865}));
  EXPECT_THAT(probabilities({.temperature = .7, .top_k = 0}),
              Pointwise(DoubleNear(1e-8), std::vector<double>{.54689494, .26772786, .13106394,
                                                              .03140961, .00752735, .01537631}));
  EXPECT_THAT(kept({.temperature = 1, .top_p = .5}), ElementsAre(0, 1));
  EXPECT_THAT(kept({.temperature = 1, .top_p = .75}), ElementsAre(0, 1, 2));
  EXPECT_THAT(kept({.temperature = 1, .top_p = .9}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept({.temperature = 1, .top_p = .95}), ElementsAre(0, 1, 2, 3, 5));
  EXPECT_THAT(kept({.temperature = 2, .top_p = .75}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept({.temperature = 1, .min_p = .1}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept({.temperature = 1, .min_p = .3}), ElementsAre(0, 1, 2));
  EXPECT_THAT(kept({.temperature = 1, .min_p = .5}), ElementsAre(0, 1));
  EXPECT_THAT(kept({.temperature = 1, .top_k = 3}), ElementsAre(0, 1, 2));
  EXPECT_THAT(kept({.temperature = 0}), ElementsAre(0));
  EXPECT_THAT(probabilities({.temperature = 1, .top_k = 2}),
              Pointwise(DoubleNear(1e-6), std::vector<double>{.622459, .377541, 0, 0, 0, 0}));
  std::vector<float> scores = kLogits;
  penalize(scores, std::vector<int64_t>{0, 4, 0}, 1.2);
  EXPECT_THAT(scores, Pointwise(testing::FloatNear(1e-6F),
                                std::vector<float>{1.6666667F, 1.5F, 1, 0, -1.2F, -.5F}));
  const LogProbabilities log = log_probabilities(kLogits, 3, 2);
  EXPECT_NEAR(log.token, std::log(.06037394), 1e-6);
  ASSERT_EQ(log.top.size(), 2U);
  EXPECT_EQ(log.top[1].token, 1);
  EXPECT_NEAR(log.top[1].probability, std::log(.27057724), 1e-6);
}

TEST(Sampling, DrawsEachCandidateFromItsShare) {
  for (const double top_p : {1.0, .9999}) {
    const GenerateOptions three{.temperature = 1, .top_k = 3, .top_p = top_p};
    EXPECT_EQ(draw(kLogits, three, 0), 0);
    EXPECT_EQ(draw(kLogits, three, .505), 0);
    EXPECT_EQ(draw(kLogits, three, .51), 1);
    EXPECT_EQ(draw(kLogits, three, .82), 2);
    EXPECT_EQ(draw(kLogits, three, 1 - 1e-17), 2);
  }
  // Of many, the first are put in order, and the others only if they are needed.
  std::vector<float> many(5000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<float>(i * 7919 % 5000) / 5000;
  const GenerateOptions all{.temperature = 1, .top_k = 0};
  const auto ordered = candidates(many, all);
  double sum = 0;
  for (size_t i = 0; i < ordered.size(); ++i) {
    const double middle = sum + ordered[i].probability / 2;
    if (i % 499 == 0 || i == 255 || i == 256) {
      EXPECT_EQ(draw(many, all, middle), ordered[i].token) << i;
    }
    sum += ordered[i].probability;
  }
  // Equals all stay, and the smaller token counts as the likelier one.
  const std::vector<float> equal{1, 3, 3, 3, 0};
  EXPECT_EQ(candidates(equal, {.temperature = 1, .top_k = 2}).size(), 3U);
  EXPECT_EQ(candidates(equal, {.temperature = 0})[0].token, 1);
}

TEST(Sampling, RefusesWhatHasNoMeaning) {
  for (const GenerateOptions& wrong : std::vector<GenerateOptions>{{.tokens = -1},
                                                                   {.temperature = -1},
                                                                   {.temperature = NAN},
                                                                   {.top_k = -1},
                                                                   {.top_p = 0},
                                                                   {.top_p = 1.5},
                                                                   {.min_p = -.1},
                                                                   {.repetition_penalty = 0}})
    EXPECT_THROW(validate(wrong), ConfigError);
}

// ---- kernels ----

// Where models are tested: also on a CUDA device, if there is one.
std::vector<c10::Device> devices() {
  std::vector<c10::Device> all{c10::kCPU};
  if (torch::cuda::is_available()) all.emplace_back(c10::kCUDA, 0);
  return all;
}

void check_linear_map(c10::Device device) {
  const at::NoGradGuard no_grad;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t width : {1, 31, 32, 200, 224}) {
      // On a device other widths are a BLAS's.
      if (device.is_cuda() && width % 32 != 0) continue;
      const auto made = [&](const at::Tensor& tensor) { return tensor.to(type).to(device); };
      const at::Tensor weight = made(at::sin(at::arange(70 * width)).view({70, width})),
                       bias = made(at::cos(at::arange(70))),
                       input = made(at::cos(at::arange(8 * width) * 3).view({8, width}));
      const at::Tensor expected =
          input.to(at::kDouble).matmul(weight.to(at::kDouble).t()) + bias.to(at::kDouble);
      const double tolerance = type == at::kFloat ? 1e-5 : 0.05;
      const at::Tensor all = nn::linear_map(input, weight, bias);
      EXPECT_TRUE(at::allclose(all.to(at::kDouble), expected, tolerance, tolerance)) << width;
      for (int64_t i = 0; i < 8; ++i) {
        EXPECT_TRUE(nn::linear_map(input[i], weight, bias).equal(all[i])) << width << " " << i;
      }
    }
  }
}

TEST(LinearMap, OfFewVectorsIsThatOfMany) {
  for (const c10::Device device : devices()) check_linear_map(device);
}

// ---- a cache, rows, layouts ----

ModelSpec tiny(ModelKind kind, int64_t positions = 48, int64_t hidden = 32) {
  ModelSpec spec{.kind = kind, .layers = 4, .hidden = hidden, .heads = 4};
  if (kind == ModelKind::llama) spec.kv_heads = 2;
  return spec.resolved(positions, /*tokenizer_vocab=*/51);
}

std::map<std::string, ModelSpec> families(int64_t hidden) {
  std::map<std::string, ModelSpec> all{{"gpt", tiny(ModelKind::gpt, 48, hidden)},
                                       {"llama", tiny(ModelKind::llama, 48, hidden)}};
  all["window"] = all["qwen2"] = all["qwen3"] = all["llama"];
  all["window"].window = 5;
  all["qwen2"].qkv_bias = true;
  all["qwen3"].qk_norm = true;
  all["qwen3"].head_dim = hidden == 32 ? 12 : 64;
  return all;
}

constexpr double kStd = 0.3;  // larger than that of a training: tokens are far apart

// Weights that do not depend on the layout.
nn::InitializeRule values(const ModelSpec& spec) {
  return
      [rule = initial_values(spec)](const at::Tensor& parameter, const nn::init::Source& source) {
        rule(parameter, source);
        if (parameter.dim() > 1) parameter.mul_(kStd / 0.02);
        return true;
      };
}

LanguageModel make_model(const ModelSpec& spec, c10::Device device = c10::kCPU) {
  LanguageModel model(spec, {.tensors = at::TensorOptions(device)});
  const at::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters())
    values(spec)(item.value(), {.seed = 3, .name = item.key()});
  model->eval();
  return model;
}

// The most likely tokens, each computed from the whole text.
Tokens without_cache(const ModelSpec& spec, Tokens text, int64_t count,
                     c10::Device device = c10::kCPU) {
  LanguageModel model = make_model(spec, device);
  const at::NoGradGuard no_grad;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor logits = model->forward(at::tensor(text).unsqueeze(0).to(device))[0][-1];
    text.push_back(logits.argmax().item<int64_t>());
  }
  return {text.end() - count, text.end()};
}

const std::vector<TextRequest> kRequests{{.prompt = {1, 2, 3}, .stream = 0},
                                         {.prompt = {7}, .stream = 1},
                                         {.prompt = {9, 8, 7, 6, 5, 4, 3, 2, 1}, .stream = 2},
                                         {.prompt = {1, 2, 3}, .stream = 3},
                                         {.prompt = {50, 50, 1, 0}, .stream = 4}};

std::vector<Tokens> texts(TextModel& model, const ModelSpec& spec, TextOptions options,
                          std::span<const TextRequest> requests = kRequests) {
  options.positions = spec.positions;
  std::vector<Tokens> all(requests.size());
  generate_texts(model, requests, options, [&](const NewToken& token) {
    Tokens& mine = all[token.request];
    EXPECT_EQ(token.index, static_cast<int64_t>(mine.size()));
    EXPECT_EQ(token.log.token < 0, options.top >= 0);
    mine.push_back(token.token);
    // Texts end at different times.
    return mine.size() < 30 - 4 * token.request;
  });
  return all;
}

// With the logarithms of probabilities the token is drawn from logits; without, where they are.
void check_tokens(const std::string& name, const ModelSpec& spec, c10::Device device) {
  LanguageModel model = make_model(spec, device);
  std::vector<Tokens> expected;
  for (size_t i = 0; i < kRequests.size(); ++i) {
    expected.push_back(
        without_cache(spec, kRequests[i].prompt, 30 - 4 * static_cast<int64_t>(i), device));
  }
  for (const int64_t chunk : {2, 5, 512}) {
    for (const int64_t top : {-1, 0}) {
      const auto found =
          texts(*text_model(*model), spec,
                {.generate = {.tokens = 40, .temperature = 0}, .chunk = chunk, .top = top});
      for (size_t i = 0; i < kRequests.size(); ++i)
        EXPECT_EQ(found[i], expected[i]) << name << " " << i << " " << device;
    }
  }
}

TEST(Generate, TokensOfACacheAreThoseOfTheWholeText) {
  for (const c10::Device device : devices()) {
    for (const auto& [name, spec] : families(32)) check_tokens(name, spec, device);
    if (device.is_cpu()) continue;
    // Heads that the kernels for a device are made for.
    for (const auto& [name, spec] : families(128)) check_tokens(name, spec, device);
  }
}

TEST(Generate, ATextDoesNotDependOnThoseBesideIt) {
  for (const c10::Device device : devices()) {
    const ModelSpec spec = tiny(ModelKind::llama, 48, 128);
    LanguageModel model = make_model(spec, device);
    const TextOptions options{
        .generate = {.tokens = 40, .temperature = 1.2, .top_k = 0, .seed = 7}};
    const auto together = texts(*text_model(*model), spec, options);
    EXPECT_NE(together[0], together[3]);  // the same prompt, another stream
    for (const int64_t rows : {1, 2, 4}) {
      TextOptions fewer = options;
      fewer.rows = rows;
      EXPECT_EQ(texts(*text_model(*model), spec, fewer), together) << rows << " " << device;
    }
  }
}

// Keys that no token sees any more are dropped, and those that are seen are moved.
TEST(Generate, AWindowIsKeptOverLongTexts) {
  for (const c10::Device device : devices()) {
    ModelSpec spec = tiny(ModelKind::llama, 400, device.is_cpu() ? 32 : 128);
    spec.window = 5;
    LanguageModel model = make_model(spec, device);
    Tokens found;
    generate(*model, {1, 2, 3}, {.tokens = 330, .temperature = 0}, [&](int64_t token) {
      found.push_back(token);
      return true;
    });
    EXPECT_EQ(found, without_cache(spec, {1, 2, 3}, 330, device)) << device;
  }
}

TEST(Generate, ATextLongerThanTheModelGoesOnFromItsLastHalf) {
  const ModelSpec spec = tiny(ModelKind::gpt, 16);
  LanguageModel model = make_model(spec);
  Tokens text{1, 2, 3};
  generate(*model, text, {.tokens = 30, .temperature = 0}, [&](int64_t token) {
    text.push_back(token);
    return true;
  });
  ASSERT_EQ(text.size(), 33U);
  // 17 tokens are too many for the 18th: it sees the last 8.
  EXPECT_EQ(without_cache(spec, {text.begin() + 9, text.begin() + 17}, 1)[0], text[17]);
  EXPECT_EQ(without_cache(spec, {text.begin() + 9, text.begin() + 18}, 1)[0], text[18]);
}

TEST(Generate, RefusesPromptsThatDoNotFit) {
  LanguageModel model = make_model(tiny(ModelKind::gpt, 16));
  const auto refused = [&](const Tokens& prompt) {
    EXPECT_THROW(generate(*model, prompt, {}, [](int64_t) { return true; }), ConfigError);
  };
  refused({});
  refused({-1});
  refused({51});
  refused(Tokens(16, 1));
}

TEST(Generate, ATextInsideAnotherIsRefused) {
  for (const c10::Device device : devices()) {
    LanguageModel model = make_model(tiny(ModelKind::gpt, 48, 128), device);
    const auto outer = [&](int64_t) {
      generate(*model, {4, 5}, {.tokens = 3}, [](int64_t) { return true; });
      return true;
    };
    EXPECT_THROW(generate(*model, {1, 2, 3}, {.tokens = 8}, outer), ConfigError) << device;
    // Afterwards it is as it was.
    Tokens found;
    generate(*model, {1, 2, 3}, {.tokens = 8, .temperature = 0}, [&](int64_t token) {
      found.push_back(token);
      return true;
    });
    EXPECT_EQ(found, without_cache(model->spec(), {1, 2, 3}, 8, device)) << device;
  }
}

struct Layout {
  layout::ParallelDims dims = {};
  bool shard = false, offload = false;
};

parallel::Pipeline shared_model(const ModelSpec& spec, const Layout& given,
                                const std::shared_ptr<Decoding>& decoding,
                                const comm::Group& group) {
  layout::ParallelConfig config{.dims = given.dims,
                                .memory = layout::MemoryStrategy::basic,
                                .schedule = layout::PipelineSchedule::one_f_one_b};
  if (given.dims.tp > 1) config.tensor_plan = config::tensor_plan(spec);
  parallel::PipelineOptions others{
      .advanced = {.initializer = parallel::MaterializeOptions{.seed = 3, .rule = values(spec)}}};
  if (given.shard) {
    config.sharding = layout::ShardingStrategy::full_shard;
    others.data = parallel::FullyShardOptions{.use_orig_params = true};
  }
  if (given.offload) {
    parallel::FullyShardOptions options{.use_orig_params = true};
    options.offload = layout::OffloadOptions{.device_limit = 64 << 20};
    others.data = options;
  }
  return parallel::parallelize(
      language_model_layers(spec, {}, std::make_shared<nn::RandomContext>(), decoding), config,
      group, others);
}

TEST(Generate, EveryLayoutWritesTheSame) {
  const std::map<std::string, Layout> layouts{{"tp 2", {.dims = {.tp = 2}}},
                                              {"pp 2", {.dims = {.pp = 2}}},
                                              {"tp 2 pp 2", {.dims = {.tp = 2, .pp = 2}}},
                                              {"shard", {.dims = {.dp = 2}, .shard = true}},
                                              {"offload", {.offload = true}}};
  for (const ModelKind kind : {ModelKind::gpt, ModelKind::llama}) {
    const ModelSpec spec = tiny(kind);
    LanguageModel model = make_model(spec);
    for (const double temperature : {0.0, 1.0}) {
      const TextOptions options{.generate = {.tokens = 40, .temperature = temperature}, .top = 2};
      const auto expected = texts(*text_model(*model), spec, options);
      for (const auto& [name, given] : layouts) {
        comm::run_threads(static_cast<int>(given.dims.world_size()), [&](const comm::Group& group) {
          const auto decoding = std::make_shared<Decoding>();
          const auto pipeline = shared_model(spec, given, decoding, group);
          EXPECT_EQ(texts(*text_model(pipeline, decoding, spec), spec, options), expected) << name;
        });
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::model
