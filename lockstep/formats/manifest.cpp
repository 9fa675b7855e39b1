// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/manifest.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"

namespace lockstep::formats {
namespace {

using layout::Box;

constexpr size_t kListed = 4;  // boxes that a message lists

std::string missing(const TensorRecord& tensor) {
  std::vector<Box> rest = {Box::whole(tensor.shape)};
  for (const auto& slice : tensor.slices) rest = layout::subtract(rest, slice.box);
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(rest.size(), kListed); ++i) texts.push_back(rest[i].describe());
  return join(texts) + (rest.size() > kListed ? format(" and {} more", rest.size() - kListed) : "");
}

// Two slices that overlap, or nulls. Sorted along the dimension in which most of them differ, a
// slice is compared only with those that begin before it ends.
std::pair<const SliceRecord*, const SliceRecord*> overlapping(const TensorRecord& tensor) {
  size_t dim = 0;
  size_t most = 0;
  for (size_t d = 0; d < Box::whole(tensor.shape).ranges.size(); ++d) {
    std::set<int64_t> begins;
    for (const auto& slice : tensor.slices) begins.insert(slice.box.ranges[d].begin);
    if (begins.size() > most) std::tie(dim, most) = std::pair(d, begins.size());
  }
  std::vector<const SliceRecord*> sorted;
  for (const auto& slice : tensor.slices) sorted.push_back(&slice);
  std::sort(sorted.begin(), sorted.end(), [&](const auto* a, const auto* b) {
    return a->box.ranges[dim].begin < b->box.ranges[dim].begin;
  });
  for (size_t i = 0; i < sorted.size(); ++i) {
    const auto end = sorted[i]->box.ranges[dim].end;
    for (size_t j = i + 1; j < sorted.size() && sorted[j]->box.ranges[dim].begin < end; ++j) {
      if (!sorted[i]->box.intersect(sorted[j]->box).empty()) return {sorted[i], sorted[j]};
    }
  }
  return {nullptr, nullptr};
}

// First what one slice can have wrong, so that later sums cannot overflow.
void validate_slice(const TensorRecord& tensor, const SliceRecord& slice, const std::string& what) {
  const auto whole = Box::whole(tensor.shape);
  const auto where = format("{}: slice {} in {}", what, slice.box.describe(), slice.file);
  if (slice.box.ranges.size() != whole.ranges.size()) {
    throw CheckpointError(format("{}: has {} dimensions, must have {}", where,
                                 slice.box.ranges.size(), whole.ranges.size()));
  }
  for (size_t dim = 0; dim < whole.ranges.size(); ++dim) {
    const auto& range = slice.box.ranges[dim];
    if (range.begin < 0 || range.begin > range.end || range.end > whole.ranges[dim].end) {
      throw CheckpointError(format("{}: lies outside the tensor", where));
    }
  }
  if (slice.box.empty() && slice.box != whole) {
    throw CheckpointError(format("{}: is empty; slices without elements are left out", where));
  }
}

void validate_tensor(const TensorRecord& tensor, const std::string& what) {
  if (!byte_size(tensor.dtype, tensor.shape)) {
    throw CheckpointError(
        format("{}: needs a known type and a whole number of bytes below 2^63", what));
  }
  int64_t held = 0;
  for (const auto& slice : tensor.slices) {
    validate_slice(tensor, slice, what);
    held += slice.box.numel();
  }
  const auto numel = layout::numel_of(tensor.shape);
  if (const auto [a, b] = overlapping(tensor); a != nullptr) {
    throw CheckpointError(format("{}: slices {} in {} and {} in {} overlap", what,
                                 a->box.describe(), a->file, b->box.describe(), b->file));
  }
  if (held != numel || tensor.slices.empty()) {
    throw CheckpointError(format("{}: slices hold {} of {} elements; missing: {}", what, held,
                                 numel, missing(tensor)));
  }
  if (numel == 0 && tensor.slices.size() != 1) {
    throw CheckpointError(
        format("{}: has no elements and {} slices, must have 1", what, tensor.slices.size()));
  }
}

}  // namespace

layout::Shape slice_shape(const layout::Shape& whole, const Box& box) {
  layout::Shape shape;
  for (size_t dim = 0; dim < whole.size(); ++dim) shape.push_back(box.ranges[dim].size());
  return shape;
}

layout::Shape slice_offsets(const layout::Shape& whole, const Box& box) {
  layout::Shape offsets;
  for (size_t dim = 0; dim < whole.size(); ++dim) offsets.push_back(box.ranges[dim].begin);
  return offsets;
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name.front() != '.' &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

void Manifest::validate(const std::string& origin) const {
  if (step < 0) throw CheckpointError(format("{}: step {}, must be at least 0", origin, step));
  for (const auto& [name, record] : files) {
    if (!is_plain_file_name(name) || name == "manifest.json") {
      throw CheckpointError(format("{}: file '{}' must be a plain name", origin, name));
    }
    if (record.blocks.size() != io::num_blocks(record.bytes)) {
      throw CheckpointError(format("{}: file {}: {} bytes with {} checksums, must have {}", origin,
                                   name, record.bytes, record.blocks.size(),
                                   io::num_blocks(record.bytes)));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    const auto what =
        format("{}: tensor {} {} {}", origin, name, tensor.dtype, layout::describe(tensor.shape));
    if (name.empty()) throw CheckpointError(format("{}: has no name", what));
    validate_tensor(tensor, what);
    std::set<std::string_view> places;
    for (const auto& slice : tensor.slices) {
      if (files.count(slice.file) == 0) {
        throw CheckpointError(format("{}: file {} is not in the list of files", what, slice.file));
      }
      if (!places.insert(slice.file).second) {
        throw CheckpointError(format("{}: has two slices in {}, must have one", what, slice.file));
      }
    }
  }
}

void Manifest::merge(const Manifest& part) {
  if (part.step != step) {
    throw CheckpointError(
        format("[manifest] parts of steps {} and {} cannot be one checkpoint", step, part.step));
  }
  for (const auto& [name, tensor] : part.tensors) {
    auto& mine =
        tensors.try_emplace(name, TensorRecord{tensor.dtype, tensor.shape, {}}).first->second;
    if (mine.dtype != tensor.dtype || mine.shape != tensor.shape) {
      throw CheckpointError(format("[manifest] tensor {} is {} {} in one part and {} {} in another",
                                   name, mine.dtype, layout::describe(mine.shape), tensor.dtype,
                                   layout::describe(tensor.shape)));
    }
    mine.slices.insert(mine.slices.end(), tensor.slices.begin(), tensor.slices.end());
  }
  for (const auto& [name, record] : part.files) {
    if (!files.emplace(name, record).second) {
      throw CheckpointError(format("[manifest] file {} is in two parts", name));
    }
  }
  for (const auto& [key, value] : part.state) {
    if (const auto mine = state.emplace(key, value).first; mine->second != value) {
      throw CheckpointError(format("[manifest] state {} is {} in one part and {} in another", key,
                                   mine->second, value));
    }
  }
}

}  // namespace lockstep::formats
