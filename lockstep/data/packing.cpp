// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/packing.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::data {
namespace {

// The space in each row, in a tree whose inner nodes have the larger of their two children's: the
// first row that has room is found in a number of steps that is the logarithm of that of rows.
class OpenRows {
 public:
  OpenRows(size_t most, int32_t space) : leaves_(std::bit_ceil(most)), space_(2 * leaves_, space) {}

  // Takes `count` of the first row that has them.
  size_t take(int32_t count) {
    size_t node = 1;
    while (node < leaves_) {
      node *= 2;
      if (space_[node] < count) ++node;
    }
    space_[node] -= count;
    const size_t row = node - leaves_;
    for (node /= 2; node > 0; node /= 2)
      space_[node] = std::max(space_[2 * node], space_[2 * node + 1]);
    return row;
  }

 private:
  size_t leaves_;
  std::vector<int32_t> space_;
};

// Stable, by a number below `bound`, in time and memory that grow with both.
template <class Key>
std::vector<size_t> sorted_by(size_t count, size_t bound, Key key) {
  std::vector<size_t> next(bound + 1);
  for (size_t i = 0; i < count; ++i) ++next[key(i) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[next[key(i)]++] = i;
  return order;
}

std::vector<PackedPiece> pieces_of(std::span<const Example> examples, int64_t seq_len,
                                   bool continues) {
  std::vector<PackedPiece> pieces;
  pieces.reserve(examples.size());
  for (const Example& each : examples) {
    const int64_t inputs = each.end - each.begin - 1;
    for (int64_t done = 0; done < inputs && (done == 0 || continues); done += seq_len) {
      const int64_t count = std::min(inputs - done, seq_len);
      const int64_t unanswered = std::clamp<int64_t>(each.unanswered() - done, 0, count);
      pieces.push_back(
          {each.begin + done, static_cast<int32_t>(count), static_cast<int32_t>(unanswered)});
    }
  }
  return pieces;
}

}  // namespace

Packing::Packing(std::span<const Example> examples, int64_t seq_len, bool continues)
    : seq_len_(seq_len) {
  if (seq_len < 1 || seq_len > std::numeric_limits<int32_t>::max() / 2)
    throw ConfigError(format("packed rows of {} tokens, must be in [1, 2^30)", seq_len));
  const std::vector<PackedPiece> pieces = pieces_of(examples, seq_len, continues);
  const auto longest_first =
      sorted_by(pieces.size(), static_cast<size_t>(seq_len) + 1,
                [&](size_t i) { return static_cast<size_t>(seq_len - pieces[i].count); });
  // Not more than two rows are needed where half of each is full, so this many are enough.
  for (const PackedPiece& piece : pieces) used_ += piece.count;
  const auto most =
      static_cast<size_t>(std::min(static_cast<int64_t>(pieces.size()), 2 * (used_ / seq_len) + 2));
  OpenRows open(std::max<size_t>(most, 1), static_cast<int32_t>(seq_len));
  std::vector<size_t> row_of(pieces.size());  // in the order of longest_first
  size_t rows = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    row_of[i] = open.take(pieces[longest_first[i]].count);
    rows = std::max(rows, row_of[i] + 1);
  }
  row_begins_.assign(rows + 1, 0);
  for (const size_t row : row_of) ++row_begins_[row + 1];
  std::partial_sum(row_begins_.begin(), row_begins_.end(), row_begins_.begin());
  pieces_.reserve(pieces.size());
  for (const size_t i : sorted_by(pieces.size(), rows, [&](size_t i) { return row_of[i]; }))
    pieces_.push_back(pieces[longest_first[i]]);
}

std::span<const PackedPiece> Packing::row(int64_t row) const {
  const auto begin = row_begins_.at(static_cast<size_t>(row));
  const auto end = row_begins_.at(static_cast<size_t>(row) + 1);
  return std::span(pieces_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

Corpus Corpus::packed(int64_t seq_len) const {
  if (!has_examples())
    throw ConfigError("packed rows need examples or documents(), not a stream of tokens");
  Corpus result = *this;
  result.packing_ = std::make_shared<Packing>(examples(), seq_len, has_documents());
  return result;
}

}  // namespace lockstep::data
