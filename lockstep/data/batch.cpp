// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch.h"

#include <algorithm>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::data {

void Batch::add(const Corpus& corpus, const Row& row) {
  const auto [begin, count, seq_len, vocab] = row;
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
}

int64_t evaluation_windows(int64_t tokens, int64_t seq_len) {
  if (seq_len < 1) throw ConfigError(format("seq_len is {}, must be at least 1", seq_len));
  return tokens < 2 ? 0 : (tokens - 1 + seq_len - 1) / seq_len;
}

Batch evaluation_batch(const Corpus& corpus, const EvaluationRows& which) {
  if (which.seq_len < 1 || which.first_window < 0 || which.rows < 0) {
    throw ConfigError(
        format("evaluation: {} windows of {} tokens from window {} on; none may be "
               "negative, and the length must be at least 1",
               which.rows, which.seq_len, which.first_window));
  }
  Batch batch;
  for (int64_t row = 0; row < which.rows; ++row) {
    const int64_t begin = (which.first_window + row) * which.seq_len;
    const int64_t count = std::clamp<int64_t>(corpus.size() - 1 - begin, 0, which.seq_len);
    batch.add(corpus, {begin, count, which.seq_len, which.vocab});
  }
  return batch;
}

}  // namespace lockstep::data
