// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/flat_layout.h"

namespace lockstep::layout {

std::vector<int64_t> FlatLayout::counts() const {
  std::vector<int64_t> counts;
  for (const Range& block : blocks) counts.push_back(block.size());
  return counts;
}

FlatLayout lay_out(std::span<const Shape> shapes, int64_t parts, int64_t alignment) {
  FlatLayout layout;
  for (const Shape& shape : shapes) {
    layout.offsets.push_back(layout.size);
    layout.size += (numel_of(shape) + alignment - 1) / alignment * alignment;
  }
  layout.rows = cut_rows(shapes, parts);
  // From the back: a part ends where the next one that has anything begins.
  layout.blocks.resize(layout.rows.size());
  int64_t end = layout.size;
  for (size_t part = layout.rows.size(); part-- > 0;) {
    int64_t begin = end;
    if (!layout.rows[part].empty()) {
      const RowShard& first = layout.rows[part].front();
      const Shape& shape = shapes[static_cast<size_t>(first.tensor)];
      const int64_t row_size = shape.empty() ? 1 : numel_of(shape) / shape[0];
      begin = layout.offsets[static_cast<size_t>(first.tensor)] + first.rows.begin * row_size;
    }
    layout.blocks[part] = {begin, end};
    end = begin;
  }
  return layout;
}

}  // namespace lockstep::layout
