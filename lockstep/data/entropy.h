// SPDX-License-Identifier: Apache-2.0
// What a trivial model reaches on the data: the numbers to hold a training loss against.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/data/corpus.h"

namespace lockstep::data {

// In nats per token, as a loss is.
struct Entropy {
  double unigram = 0;  // the loss of a model that knows how frequent each token is
  double bigram = 0;   // and that of one that knows it for each token before
  int64_t tokens = 0;  // that were counted
};

// Of at most the first `limit_tokens` tokens; four bytes of memory for each, unless all are bytes.
// Counted and judged on the same tokens, so with large vocabularies and little data the bigram
// value is too low. Nothing where fewer than two tokens or an id outside [0, 65536) is met.
std::optional<Entropy> entropy(const Corpus& corpus, int64_t limit_tokens = int64_t{1} << 24);

}  // namespace lockstep::data
