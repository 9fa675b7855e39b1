// SPDX-License-Identifier: Apache-2.0
// What differs between two checkpoints of the same tensors, whatever layouts they were saved from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/formats/checkpoint_reader.h"

namespace lockstep::formats {

struct TensorDifference {
  int64_t elements = 0;
  int64_t differing = 0;
  // The largest among those that differ: |a - b|, and that over the larger of |a| and |b|. NaN is
  // counted instead.
  double absolute = 0, relative = 0;
  int64_t nan_a = 0, nan_b = 0;

  bool operator==(const TensorDifference&) const = default;
};

struct CompareOptions {
  // Not set: elements are equal if their bits are, or their values where the types differ. Set:
  // also if they differ by at most this, or both are NaN.
  std::optional<double> tolerance = std::nullopt;
};

// Both must have the tensor, with one shape. Reads it in pieces of some MiB. Throws as
// CheckpointReader does.
TensorDifference compare(CheckpointReader& a, CheckpointReader& b, const std::string& tensor,
                         const CompareOptions& options = {});

}  // namespace lockstep::formats
