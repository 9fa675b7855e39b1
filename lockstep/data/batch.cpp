// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/packing.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {
namespace {

Row row_of(const Corpus& corpus, int64_t sample, const Row& shape) {
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

const Packing& packing_of(const Corpus& corpus, int64_t seq_len) {
  const Packing& packing = *corpus.packing();
  if (packing.seq_len() == seq_len) return packing;
  throw ConfigError(format("the data is packed into rows of {} tokens, must be of seq_len {}",
                           packing.seq_len(), seq_len));
}

}  // namespace

void Batch::fill(const Corpus& corpus, const Row& row, size_t start) {
  const int64_t begin = row.begin, count = row.count;
  if (count == 0) return;
  const std::span in = std::span(input).subspan(start, static_cast<size_t>(count));
  const std::span out = std::span(target).subspan(start, static_cast<size_t>(count));
  corpus.read(begin, in);
  std::copy(in.begin() + 1, in.end(), out.begin());
  corpus.read(begin + count, out.last(1));

  for (int64_t i = 0; i <= count; ++i) {
    const int64_t token = i < count ? in[static_cast<size_t>(i)] : out.back();
    if (token < 0 || token >= row.vocab) {
      throw ConfigError(
          format("token {} at position {} of the data ({}) is outside the model's vocabulary of {}",
                 token, begin + i, corpus.locate(begin + i), row.vocab));
    }
  }
  std::ranges::fill(out.first(static_cast<size_t>(row.unanswered)), kIgnoredTarget);
}

void Batch::add(const Corpus& corpus, const Row& row) {
  const size_t start = input.size(), length = static_cast<size_t>(row.seq_len);
  input.resize(start + length, 0);
  target.resize(start + length, kIgnoredTarget);
  ++rows;
  fill(corpus, row, start);
}

void Batch::add_sample(const Corpus& corpus, std::optional<int64_t> sample, const Row& shape) {
  const size_t start = input.size(), end = start + static_cast<size_t>(shape.seq_len);
  if (corpus.packing() == nullptr)
    return add(corpus, sample ? row_of(corpus, *sample, shape) : shape);
  add(corpus, shape);
  positions.resize(end);
  size_t at = start;
  const auto place = [&](size_t count) {
    std::iota(positions.begin() + static_cast<int64_t>(at),
              positions.begin() + static_cast<int64_t>(at + count), 0);
    at += count;
  };
  if (sample) {
    for (const PackedPiece& piece : corpus.packing()->row(*sample)) {
      fill(corpus, {piece.begin, piece.count, shape.seq_len, shape.vocab, piece.unanswered}, at);
      place(static_cast<size_t>(piece.count));
    }
  }
  place(end - at);
}

int64_t sample_count(const Corpus& corpus, int64_t seq_len) {
  if (corpus.packing() != nullptr) return packing_of(corpus, seq_len).rows();
  const auto examples = static_cast<int64_t>(corpus.examples().size());
  return corpus.has_examples() ? examples : window_count(corpus.size(), seq_len);
}

SampleSize sample_size(const Corpus& corpus, int64_t sample, int64_t seq_len) {
  if (corpus.packing() == nullptr) {
    const Row row = row_of(corpus, sample, {.seq_len = seq_len});
    return {row.count - row.unanswered, row.count};
  }
  SampleSize size;
  for (const PackedPiece& piece : packing_of(corpus, seq_len).row(sample)) {
    size.targets += piece.count - piece.unanswered;
    size.inputs += piece.count;
  }
  return size;
}

int64_t evaluation_windows(int64_t tokens, int64_t seq_len) {
  if (seq_len < 1) throw ConfigError(format("seq_len is {}, must be at least 1", seq_len));
  return tokens < 2 ? 0 : (tokens - 1 + seq_len - 1) / seq_len;
}

int64_t evaluation_windows(const Corpus& corpus, int64_t seq_len) {
  const int64_t windows = evaluation_windows(corpus.size(), seq_len);  // checks seq_len, too
  return corpus.has_examples() ? sample_count(corpus, seq_len) : windows;
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
      batch.add_sample(corpus, exists ? std::optional(window) : std::nullopt, shape);
      continue;
    }
    const int64_t begin = window * which.seq_len;
    const int64_t count = std::clamp<int64_t>(corpus.size() - 1 - begin, 0, which.seq_len);
    batch.add(corpus, {begin, count, which.seq_len, which.vocab});
  }
  return batch;
}

}  // namespace lockstep::data
