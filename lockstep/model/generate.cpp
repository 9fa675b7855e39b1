// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/language_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/philox.h"

namespace lockstep::model {
namespace {

// Of logits (V): the index whose share of the probability holds `point` of [0, 1).
int64_t draw(const at::Tensor& logits, const GenerateOptions& options, double point) {
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  const int64_t count =
      options.top_k == 0 ? logits.size(0) : std::min(options.top_k, logits.size(0));
  const auto [values, indices] = logits.to(at::kDouble).topk(count);
  const at::Tensor sums = (values / options.temperature).softmax(0).cumsum(0);
  const int64_t place = sums.le(point).sum().item<int64_t>();
  return indices[std::min(place, count - 1)].item<int64_t>();
}

}  // namespace

void generate(LanguageModelImpl& model, std::vector<int64_t> prompt, const GenerateOptions& options,
              const std::function<bool(int64_t token)>& emit) {
  if (prompt.empty()) throw ConfigError("[generate] the prompt is empty, must have a token");
  if (options.temperature < 0 || options.top_k < 0) {
    throw ConfigError(format("[generate] temperature is {}, top_k {}, must be at least 0",
                             options.temperature, options.top_k));
  }
  for (const int64_t token : prompt) {
    if (token < 0 || token >= model.spec().vocab) {
      throw ConfigError(format("[generate] the prompt has a token {}, the model's vocabulary {}",
                               token, model.spec().vocab));
    }
  }
  const at::NoGradGuard no_grad;
  model.eval();
  const at::Device device = model.parameters().front().device();
  for (int64_t i = 0; i < options.tokens; ++i) {
    const int64_t length =
        std::min<int64_t>(static_cast<int64_t>(prompt.size()), model.spec().positions);
    const at::Tensor seen =
        at::tensor(at::ArrayRef<int64_t>(prompt).slice(prompt.size() - static_cast<size_t>(length)),
                   at::kLong);
    at::Tensor logits = model.forward(seen.to(device).unsqueeze(0))[0][-1].cpu();
    if (options.vocab > 0) logits = logits.narrow(0, 0, std::min(options.vocab, logits.size(0)));
    const RandomKey key =
        random_key(options.seed, "generate", "", {.step = static_cast<uint32_t>(i)});
    const int64_t token = draw(logits, options, uniform(key, 0));
    prompt.push_back(token);
    if (!emit(token)) return;
  }
}

}  // namespace lockstep::model
