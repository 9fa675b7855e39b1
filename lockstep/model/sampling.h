// SPDX-License-Identifier: Apache-2.0
// From logits to the next token. Private: not installed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/model/language_model.h"

namespace lockstep::model {

struct Candidate {
  int64_t token = 0;
  double probability = 0;
};

// Throws ConfigError, with the values and the rule.
void validate(const GenerateOptions& options);

// Scores of tokens that the text has, divided by the penalty where they are above 0, else
// multiplied.
void penalize(std::span<float> logits, std::span<const int64_t> text, double penalty);

// What may be drawn, with probabilities that sum to 1: most likely first; of equals the smaller
// token first. With temperature 0 the most likely alone.
std::vector<Candidate> candidates(std::span<const float> logits, const GenerateOptions& options);

// The candidate whose share of [0, 1) holds `point`, without putting all of them in order.
int64_t draw(std::span<const float> logits, const GenerateOptions& options, double point);

// Logarithms of the probabilities that the logits alone stand for: of `token`, and of the `count`
// most likely, best first.
struct LogProbabilities {
  double token = 0;
  std::vector<Candidate> top = {};  // probability: its logarithm
};
LogProbabilities log_probabilities(std::span<const float> logits, int64_t token, int64_t count);

}  // namespace lockstep::model
