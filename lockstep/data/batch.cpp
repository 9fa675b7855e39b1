// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch.h"

#include <algorithm>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

void Batch::add(const Corpus& corpus, const Row& row) {
  const auto [begin, count, seq_len, vocab, unanswered] = row;
  const size_t start = input.size(), length = static_cast<size_t>(count);
  input.resize(start + static_cast<size_t>(seq_len), 0);
  target.resize(start + static_cast<size_t>(seq_len), kIgnoredTarget);
  ++rows;
  if (count == 0) return;
  const std::span in = std::span(input).subspan(start, length);
  const std::span out = std::span(target).subspan(start, length);
  corpus.read(begin, in);
  std::copy(in.begin() + 1, in.end(), out.begin());
  corpus.read(begin + count, out.last(1));

  for (int64_t i = 0; i <= count; ++i) {
    const int64_t token = i < count ? in[static_cast<size_t>(i)] : out.back();
    if (token < 0 || token >= vocab) {
      throw ConfigError(
          format("token {} at position {} of the data ({}) is outside the model's vocabulary of {}",
                 token, begin + i, corpus.locate(begin + i), vocab));
    }
  }
  std::ranges::fill(out.first(static_cast<size_t>(unanswered)), kIgnoredTarget);
}

int64_t sample_count(const Corpus& corpus, int64_t seq_len) {
  const auto examples = static_cast<int64_t>(corpus.examples().size());
  return corpus.has_examples() ? examples : window_count(corpus.size(), seq_len);
}

Row sample_row(const Corpus& corpus, int64_t sample, const Row& shape) {
  Row row = shape;
  if (!corpus.has_examples()) {
    row.begin = sample * row.seq_len;
    row.count = row.seq_len;
    return row;
  }
  const Example& example = corpus.examples()[static_cast<size_t>(sample)];
  row.begin = example.begin;
  row.count = example.inputs(row.seq_len);
  row.unanswered = std::min(example.unanswered(), row.count);
  return row;
}

int64_t evaluation_windows(int64_t tokens, int64_t seq_len) {
  if (seq_len < 1) throw ConfigError(format("seq_len is {}, must be at least 1", seq_len));
  return tokens < 2 ? 0 : (tokens - 1 + seq_len - 1) / seq_len;
}

int64_t evaluation_windows(const Corpus& corpus, int64_t seq_len) {
  const int64_t windows = evaluation_windows(corpus.size(), seq_len);  // checks seq_len, too
  return corpus.has_examples() ? static_cast<int64_t>(corpus.examples().size()) : windows;
}

Batch evaluation_batch(const Corpus& corpus, const EvaluationRows& which) {
  if (which.seq_len < 1 || which.first_window < 0 || which.rows < 0) {
    throw ConfigError(
        format("evaluation: {} windows of {} tokens from window {} on; none may be "
               "negative, and the length must be at least 1",
               which.rows, which.seq_len, which.first_window));
  }
  Batch batch;
  const Row shape{.seq_len = which.seq_len, .vocab = which.vocab};
  for (int64_t row = 0; row < which.rows; ++row) {
    const int64_t window = which.first_window + row;
    if (corpus.has_examples()) {
      const bool exists = window < evaluation_windows(corpus, which.seq_len);
      batch.add(corpus, exists ? sample_row(corpus, window, shape) : shape);
      continue;
    }
    const int64_t begin = window * which.seq_len;
    const int64_t count = std::clamp<int64_t>(corpus.size() - 1 - begin, 0, which.seq_len);
    batch.add(corpus, {begin, count, which.seq_len, which.vocab});
  }
  return batch;
}

}  // namespace lockstep::data
