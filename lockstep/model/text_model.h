// SPDX-License-Identifier: Apache-2.0
// Many texts at a time from a language model, however ranks share it. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/model/decoding.h"
#include "lockstep/model/language_model.h"
#include "lockstep/model/sampling.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::model {

// Tokens that go through the model together.
struct TextStep {
  std::vector<nn::TextSpan> spans = {};
  std::vector<int64_t> tokens = {};  // of the spans, one after the other
};

// Numbers made of the logits of each span's last token: `count` of them for each span.
struct TextReader {
  // (spans, V), float32 on the CPU. With `most_likely_of` above 0: (spans, 1), the most likely of
  // the first so many tokens, which is found where the logits are.
  std::function<std::vector<double>(size_t step, const at::Tensor& logits)> read;
  int64_t count = 1;
  int64_t most_likely_of = 0;
};

// A text, of whose tokens those from `from` on are scored.
struct ScoredText {
  std::vector<int64_t> tokens = {};
  int64_t from = 1;
};
struct TextScore {
  double log_likelihood = 0;  // of the scored tokens, after those before them
  bool is_greedy = false;     // each of them was the most likely one
};

// What computes them. Collective over the ranks of a pipeline, which all give the same steps.
class TextModel {
 public:
  virtual ~TextModel() = default;
  // Forgets all texts. The window is the model's.
  virtual void reset(nn::KvCacheOptions options) = 0;
  // Calls read() once for each step on the ranks that have logits, and returns the numbers of each
  // step on all.
  virtual std::vector<std::vector<double>> run(std::span<const TextStep> steps,
                                               const TextReader& reader) = 0;
  // All at once, without a cache. Scores on all ranks.
  virtual std::vector<TextScore> score(std::span<const ScoredText> texts) = 0;
  // Steps that are computed at the same time.
  virtual int steps_at_once() const { return 1; }
  // Tokens of a prompt that are best computed together.
  virtual int64_t chunk() const = 0;
};

std::unique_ptr<TextModel> text_model(LanguageModelImpl& model);
// `decoding` is what the pipeline's layers were made with, `spec` what they are.
std::unique_ptr<TextModel> text_model(const parallel::Pipeline& pipeline,
                                      std::shared_ptr<Decoding> decoding,
                                      const config::ModelSpec& spec);

struct TextRequest {
  std::vector<int64_t> prompt = {};
  // Which random numbers it draws: those of (seed, stream, number of the token).
  int64_t stream = 0;
};

struct NewToken {
  size_t request = 0;  // which one of them
  int64_t index = 0;   // how many new tokens were before it
  LogProbabilities log = {};
  int64_t token = 0;
};

struct TextOptions {
  GenerateOptions generate = {};
  int64_t positions = 0;  // that the model has
  int64_t rows = 16;      // texts at a time
  int64_t chunk = 0;      // tokens of a prompt that are computed together; 0: the model's choice
  int64_t top = 0;        // most likely tokens that log.top has; -1: log is not computed
};

// Calls `emit` with each new token of each text, until it returns false for that text, on all ranks
// alike. Texts begin when others have ended. A text that has as many tokens as the model positions
// continues from its last half.
void generate_texts(TextModel& model, std::span<const TextRequest> requests,
                    const TextOptions& options, const std::function<bool(const NewToken&)>& emit);

}  // namespace lockstep::model
