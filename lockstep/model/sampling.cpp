// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/sampling.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::model {
namespace {

bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.probability > b.probability || (a.probability == b.probability && a.token < b.token);
}

// The first `count` in order.
void sort_first(std::vector<Candidate>& all, size_t count) {
  const auto middle = all.begin() + static_cast<int64_t>(std::min(count, all.size()));
  std::partial_sort(all.begin(), middle, all.end(), is_likelier);
}

void normalize(std::vector<Candidate>& all) {
  double sum = 0;
  for (const Candidate& each : all) sum += each.probability;
  for (Candidate& each : all) each.probability /= sum;
}

std::vector<Candidate> scored(std::span<const float> logits) {
  std::vector<Candidate> all(logits.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = {static_cast<int64_t>(i), logits[i]};
  return all;
}

// How many it takes, most likely first, until their probabilities sum to `mass`. Those are in
// order.
size_t count_of_mass(std::vector<Candidate>& all, double mass) {
  // Of a large vocabulary the first ones usually do.
  for (size_t sorted = std::min<size_t>(256, all.size());; sorted = all.size()) {
    sort_first(all, sorted);
    double sum = 0;
    for (size_t i = 0; i < sorted; ++i) {
      sum += all[i].probability;
      if (sum >= mass) return i + 1;
    }
    if (sorted == all.size()) return sorted;
  }
}

// Up to top_k, with probabilities; in no order.
std::vector<Candidate> most_likely(std::span<const float> logits, const GenerateOptions& options) {
  std::vector<Candidate> all = scored(logits);
  const auto k = static_cast<size_t>(options.top_k);
  if (k > 0 && k < all.size()) {
    sort_first(all, k);
    const double least = all[k - 1].probability;
    // Those that are as likely as the last stay.
    const auto end =
        std::partition(all.begin() + options.top_k, all.end(),
                       [&](const Candidate& each) { return each.probability == least; });
    all.erase(end, all.end());
  }
  const double largest = std::min_element(all.begin(), all.end(), is_likelier)->probability;
  for (Candidate& each : all)
    each.probability = std::exp((each.probability - largest) / options.temperature);
  normalize(all);
  return all;
}

int64_t best_of(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

}  // namespace

void validate(const GenerateOptions& options) {
  const auto require = [](bool holds, const char* name, double value, const char* rule) {
    if (!holds) throw ConfigError(format("[generate] {} is {}, must be {}", name, value, rule));
  };
  require(options.tokens >= 0, "tokens", static_cast<double>(options.tokens), "at least 0");
  require(options.temperature >= 0 && std::isfinite(options.temperature), "temperature",
          options.temperature, "a number of at least 0");
  require(options.top_k >= 0, "top_k", static_cast<double>(options.top_k), "at least 0");
  require(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "above 0 and at most 1");
  require(options.min_p >= 0 && options.min_p <= 1, "min_p", options.min_p, "from 0 to 1");
  require(options.repetition_penalty > 0 && std::isfinite(options.repetition_penalty),
          "repetition_penalty", options.repetition_penalty, "above 0");
}

void penalize(std::span<float> logits, std::span<const int64_t> text, double penalty) {
  if (penalty == 1) return;
  for (const int64_t token : std::unordered_set<int64_t>(text.begin(), text.end())) {
    if (token >= static_cast<int64_t>(logits.size())) continue;
    float& score = logits[static_cast<size_t>(token)];
    score = static_cast<float>(score < 0 ? score * penalty : score / penalty);
  }
}

std::vector<Candidate> candidates(std::span<const float> logits, const GenerateOptions& options) {
  check(!logits.empty(), "there is a token to draw");
  if (options.temperature == 0) return {{best_of(logits), 1}};
  std::vector<Candidate> all = most_likely(logits, options);
  if (options.top_p < 1) {
    all.resize(count_of_mass(all, options.top_p));
    normalize(all);
  }
  std::sort(all.begin(), all.end(), is_likelier);
  if (options.min_p > 0) {
    const double least = options.min_p * all[0].probability;
    std::erase_if(all, [&](const Candidate& each) { return each.probability < least; });
    normalize(all);
  }
  return all;
}

int64_t draw(std::span<const float> logits, const GenerateOptions& options, double point) {
  check(!logits.empty(), "there is a token to draw");
  if (options.temperature == 0) return best_of(logits);
  std::vector<Candidate> all = options.top_p < 1 || options.min_p > 0
                                   ? candidates(logits, options)
                                   : most_likely(logits, options);
  for (size_t sorted = std::min<size_t>(256, all.size());; sorted = all.size()) {
    sort_first(all, sorted);
    double sum = 0;
    for (size_t i = 0; i < sorted; ++i) {
      sum += all[i].probability;
      if (point < sum) return all[i].token;
    }
    if (sorted == all.size()) return all.back().token;
  }
}

LogProbabilities log_probabilities(std::span<const float> logits, int64_t token, int64_t count) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  const double shift = largest + std::log(sum);
  LogProbabilities found{.token = logits[static_cast<size_t>(token)] - shift};
  if (count > 0) {
    found.top = scored(logits);
    sort_first(found.top, static_cast<size_t>(count));
    found.top.resize(std::min(found.top.size(), static_cast<size_t>(count)));
    for (Candidate& each : found.top) each.probability -= shift;
  }
  return found;
}

}  // namespace lockstep::model
