// SPDX-License-Identifier: Apache-2.0
// Which modules tensor-parallel ranks share, and how: a plan is a list of rules by module name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/layout/box.h"
#include "lockstep/layout/placement.h"

namespace lockstep::layout {

enum class TensorStyle {
  column,    // a linear map whose outputs are shared out: weight (out, in) by rows, and its bias
  row,       // one whose inputs are: weight by columns; the bias stays whole, the sum is over ranks
  vocab,     // an embedding, or a linear map to as many outputs: by rows, nearly equal shares
  sequence,  // nothing is shared out; with sequence parallelism it sees a part of the sequence
  partial,   // nothing is shared out, but it sees this rank's outputs of a column: a norm of heads
};

struct TensorRule {
  std::string pattern;  // of module names; * stands for any characters: "blocks.*.mlp.up"
  TensorStyle style = TensorStyle::column;
  // column, row: sizes that lie end to end and are shared out one by one, in any unit: the heads of
  // a fused projection {heads, kv_heads, kv_heads}. Empty: all as one, in rows.
  std::vector<int64_t> parts = {};

  bool operator==(const TensorRule&) const = default;
};
using TensorPlan = std::vector<TensorRule>;

// For each of the modules the rule that names it, by its place in the plan, or -1. Throws
// ConfigError for a module that two rules name.
std::vector<int> match(const TensorPlan& plan, std::span<const std::string> modules);
// Throws ConfigError for the first rule that is not `used`.
void require_all_used(const TensorPlan& plan, const std::vector<bool>& used);

// What one rank has of a tensor: ranges of one dimension of it, end to end; or all.
struct TensorSplit {
  Shape global_shape;
  int64_t dim = 0;
  std::vector<Range> ranges = {};  // none: all of the tensor

  bool is_whole() const { return ranges.empty(); }
  Shape local_shape() const;

  // A box of the rank's tensor, cut so that each piece is a box of the whole one.
  struct MappedBox {
    Box local, global;
  };
  std::vector<MappedBox> pieces(const Box& local) const;
};

// Throws ConfigError, with the numbers, where the shares are not equal; with vocab, where some have
// nothing. `parameter` is "weight" or "bias", `module` for messages.
TensorSplit split_of(const TensorRule& rule, std::string_view module, std::string_view parameter,
                     const Shape& shape, int ranks, int rank);

}  // namespace lockstep::layout
