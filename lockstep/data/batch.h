// SPDX-License-Identifier: Apache-2.0
// Rows of tokens for a model, and what it should say to each.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/data/corpus.h"

namespace lockstep::data {

// The target of padding. Cross entropy, ours and libtorch's by default, leaves it out.
inline constexpr int64_t kIgnoredTarget = -100;

// `count` inputs from `begin` on and their targets, padded to seq_len.
struct Row {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t seq_len = 0;
  int64_t vocab = 0;
};

// (rows, seq_len), row by row. target[i] is the token after input[i].
struct Batch {
  std::vector<int64_t> input, target;
  int64_t rows = 0;

  // Throws ConfigError for an id outside [0, vocab), with its place in the files.
  void add(const Corpus& corpus, const Row& row);
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

// `rows` windows from `first_window` on. What is beyond the data is padding, whole rows too, so
// ranks with different shares of the windows can call this equally often.
Batch evaluation_batch(const Corpus& corpus, const EvaluationRows& which);

}  // namespace lockstep::data
