// SPDX-License-Identifier: Apache-2.0
// Attention in rows that hold several documents. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/nn/attention.h"
#include "lockstep/nn/context/attention_tiles.h"
#include "lockstep/nn/context/context.h"

namespace lockstep::nn {

// The documents that a run of queries sees: on the device, where queries and keys of each end, as
// flash attention takes them; and where its keys begin.
struct KeyRun {
  at::Tensor query_borders = {}, key_borders = {};  // (documents + 1) int32
  int64_t begin = 0, count = 0, longest_query = 0, longest_keys = 0;
};

// The documents of B rows of T tokens, which lie one after the other: N = B * T tokens.
struct Documents {
  int64_t rows = 0;
  int64_t longest = 0, window = 0;
  at::Tensor positions;  // (M) int64 on the device, from 0 in each document: of this rank's tokens
  at::Tensor starts;     // (N) int64 on the CPU: the first token of each one's document
  at::Tensor borders = {};  // (documents + 1) int32 on the device, from 0 to N
  // Ranks that share the tokens of each row, and which of them are here; none: all are.
  comm::Group group = {};
  std::vector<QueryRun> runs = {};
  std::vector<KeyRun> keys = {};
  std::shared_ptr<const Ring> ring = {};  // where they attend in a ring
};

// From the position of each token in its document, (B, T) int64 on the CPU. A row begins a document
// whatever its first position is. ConfigError for positions that neither rise by one nor are 0. The
// positions are those of whole rows, also where ranks share them as context_places() says. With a
// `window` above 0 a token sees at most that many, of its own document.
Documents documents_of(const at::Tensor& positions, c10::Device device, int64_t window = 0,
                       const ContextRanks& ranks = {});

// causal_attention() in which tokens see only those of their own document. q is (1, H, M, D), k and
// v (1, K, M, D), of this rank's tokens. Collective where ranks share rows. The work grows with the
// squares of the documents' lengths, but on CUDA in other types than bfloat16 and half with that of
// T.
at::Tensor document_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const Documents& documents);

}  // namespace lockstep::nn
