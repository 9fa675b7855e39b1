// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/flat_layout.h"

#include <algorithm>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/layout/placement.h"

namespace lockstep::layout {
namespace {

int64_t aligned(int64_t elements, int64_t alignment) {
  return (elements + alignment - 1) / alignment * alignment;
}

}  // namespace

std::vector<int64_t> FlatLayout::counts() const {
  std::vector<int64_t> counts;
  for (const Range& block : blocks) counts.push_back(block.size());
  return counts;
}

FlatLayout lay_out(std::span<const Shape> shapes, int64_t parts, int64_t alignment) {
  FlatLayout layout;
  for (const Shape& shape : shapes) {
    layout.offsets.push_back(layout.size);
    layout.size += aligned(numel_of(shape), alignment);
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

FlatLayout lay_out(std::span<const Shape> shapes, std::span<const int> owners, int64_t parts,
                   int64_t alignment) {
  if (owners.empty()) return lay_out(shapes, parts, alignment);
  check(owners.size() == shapes.size() && std::is_sorted(owners.begin(), owners.end()) &&
            owners.front() >= 0 && owners.back() < parts,
        "every tensor of a line has an owner among its parts, in ascending order");
  FlatLayout layout;
  layout.rows.resize(static_cast<size_t>(parts));
  layout.blocks.resize(static_cast<size_t>(parts));
  size_t tensor = 0;
  for (size_t part = 0; part < layout.blocks.size(); ++part) {
    const int64_t begin = layout.size;
    for (; tensor < shapes.size() && static_cast<size_t>(owners[tensor]) == part; ++tensor) {
      const Shape& shape = shapes[tensor];
      layout.offsets.push_back(layout.size);
      layout.size += aligned(numel_of(shape), alignment);
      if (numel_of(shape) > 0) {
        layout.rows[part].push_back(
            {static_cast<int64_t>(tensor), {0, shape.empty() ? 1 : shape[0]}});
      }
    }
    layout.blocks[part] = {begin, layout.size};
  }
  return layout;
}

std::vector<size_t> order_of_tensors(size_t count, std::span<const int> owners) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (owners.empty()) return order;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return owners[a] < owners[b]; });
  return order;
}

std::vector<int> owners_of_tensors(std::span<const DealtTensor> tensors, const Deal& deal) {
  std::vector<int> owners(tensors.size(), kEveryRank);
  for (const bool trained : {true, false}) {
    std::vector<std::pair<size_t, int64_t>> dealt;  // tensor and index
    int64_t next = deal.reserved;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].trained != trained || tensors[i].elements < deal.min_elements) continue;
      dealt.emplace_back(i, tensors[i].index ? *tensors[i].index : next++);
    }
    const PartitionMap map(next, deal.world);
    for (const auto& [tensor, index] : dealt) owners[tensor] = map.owner(index);
  }
  return owners;
}

}  // namespace lockstep::layout
