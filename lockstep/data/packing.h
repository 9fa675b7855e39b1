// SPDX-License-Identifier: Apache-2.0
// Whole documents, or examples, in rows of one length. Private: not installed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/data/corpus.h"

namespace lockstep::data {

// Tokens that follow one another in a row and see no other tokens of it.
struct PackedPiece {
  int64_t begin = 0;  // in the corpus
  int32_t count = 0;  // inputs; the token after them is the last target
  int32_t unanswered = 0;
};

// First fit, longest first: a function of the lengths alone, so every rank has the same rows.
class Packing {
 public:
  // Examples longer than a row are cut at its end. With `continues`, the rest follows as further
  // pieces, so that every token but the first is predicted once.
  Packing(std::span<const Example> examples, int64_t seq_len, bool continues);

  int64_t seq_len() const { return seq_len_; }
  int64_t rows() const { return static_cast<int64_t>(row_begins_.size()) - 1; }
  int64_t used() const { return used_; }  // inputs of all rows that are not padding
  std::span<const PackedPiece> row(int64_t row) const;

 private:
  int64_t seq_len_, used_ = 0;
  std::vector<PackedPiece> pieces_;  // row by row
  std::vector<int64_t> row_begins_;  // in pieces_, and their number
};

}  // namespace lockstep::data
