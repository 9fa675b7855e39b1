// SPDX-License-Identifier: Apache-2.0
// Rows of tokens for a model, and what it should say to each.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/corpus.h"

namespace lockstep::data {

// The target of padding and of prompts. Cross entropy, ours and libtorch's by default, leaves it
// out.
inline constexpr int64_t kIgnoredTarget = -100;

// `count` inputs from `begin` on and their targets, padded to seq_len.
struct Row {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t seq_len = 0;
  int64_t vocab = 0;
  int64_t unanswered = 0;  // of the inputs, the first so many have no target that counts
};

// Samples to train on: examples or, of a stream, windows that have all their targets.
int64_t sample_count(const Corpus& corpus, int64_t seq_len);
// The targets of a sample that count, and its inputs that are not padding.
struct SampleSize {
  int64_t targets = 0, inputs = 0;
};
SampleSize sample_size(const Corpus& corpus, int64_t sample, int64_t seq_len);

// (rows, seq_len), row by row. target[i] is the token after input[i].
struct Batch {
  std::vector<int64_t> input = {}, target = {};
  // Of packed rows: the position of each input in its document, which begins where it is 0. Tokens
  // see no other document. Padding is one more document. Empty where rows are not packed.
  std::vector<int64_t> positions = {};
  int64_t rows = 0;
  // Of a BatchReader: targets that count, and inputs that are not padding, in the rows of all ranks
  // for this step. The mean loss of the step divides by the former.
  int64_t step_targets = 0, step_inputs = 0;

  // Throws ConfigError for an id outside [0, vocab), with its place in the files.
  void add(const Corpus& corpus, const Row& row);
  // The row of a sample, of which `shape` has seq_len and vocab; without one, padding.
  void add_sample(const Corpus& corpus, std::optional<int64_t> sample, const Row& shape);

 private:
  void fill(const Corpus& corpus, const Row& row, size_t start);
};

struct EvaluationRows {
  int64_t seq_len = 0;
  int64_t vocab = 0;
  int64_t first_window = 0;
  int64_t rows = 0;
};

// Windows of seq_len, one after another without overlap, that together predict every token but the
// first exactly once. The last may be shorter.
int64_t evaluation_windows(int64_t tokens, int64_t seq_len);
// The same of a corpus. A window of one with examples is an example, or a packed row.
int64_t evaluation_windows(const Corpus& corpus, int64_t seq_len);

// `rows` windows from `first_window` on. What is beyond the data is padding, whole rows too, so
// ranks with different shares of the windows can call this equally often.
Batch evaluation_batch(const Corpus& corpus, const EvaluationRows& which);

}  // namespace lockstep::data
