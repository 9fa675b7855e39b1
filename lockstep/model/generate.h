// SPDX-License-Identifier: Apache-2.0
// Text from a language model, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/model/language_model.h"

namespace lockstep::model {

struct GenerateOptions {
  int64_t tokens = 400;
  double temperature = 0.8;  // 0: always the most likely one
  int64_t top_k = 40;        // only the k most likely are drawn from; 0: all
  uint64_t seed = 1;
  int64_t vocab = 0;  // only tokens below this; 0: all that the model has
};

// Calls `emit` with each new token, until it returns false. The model sees the last
// spec().positions tokens, and is in eval mode. The prompt must not be empty.
void generate(LanguageModelImpl& model, std::vector<int64_t> prompt, const GenerateOptions& options,
              const std::function<bool(int64_t token)>& emit);

}  // namespace lockstep::model
