// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checkpoint_diff.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/elements.h"

namespace lockstep::formats {
namespace {

constexpr int64_t kElementsAtATime = int64_t{1} << 20;  // elements

// A piece of the tensor in one checkpoint.
class Side {
 public:
  Side(CheckpointReader& reader, const std::string& tensor) : reader_(reader), tensor_(tensor) {
    const auto found = reader.manifest().tensors.find(tensor);
    if (found == reader.manifest().tensors.end()) {
      throw ConfigError(format("{}: has no tensor {}", reader.path(), tensor));
    }
    record_ = &found->second;
    const auto dtype = dtype_of(record_->dtype);
    if (!dtype) {
      throw CheckpointError(format("{}: tensor {} is of type {}, which is unknown", reader.path(),
                                   tensor, record_->dtype));
    }
    dtype_ = *dtype;
  }

  void read(const layout::Box& box) {
    const auto count = static_cast<size_t>(box.numel());
    bytes_.resize(count * size_of(dtype_));
    numbers_.resize(count);
    reader_.read(tensor_, box, bytes_);
    decode(dtype_, bytes_, numbers_);
  }

  const layout::Shape& shape() const { return record_->shape; }
  DType dtype() const { return dtype_; }
  const std::vector<double>& numbers() const { return numbers_; }
  const std::byte* element(size_t i) const { return bytes_.data() + i * size_of(dtype_); }
  bool same_bytes(const Side& other) const { return bytes_ == other.bytes_; }

 private:
  CheckpointReader& reader_;
  std::string tensor_;
  const TensorRecord* record_ = nullptr;
  DType dtype_ = DType::float32;
  std::vector<std::byte> bytes_;
  std::vector<double> numbers_;
};

void add_differences(const Side& a, const Side& b, const CompareOptions& options,
                     TensorDifference& total) {
  const bool one_type = a.dtype() == b.dtype();
  for (size_t i = 0; i < a.numbers().size(); ++i) {
    const double x = a.numbers()[i], y = b.numbers()[i];
    const bool both_nan = std::isnan(x) && std::isnan(y);
    const bool equal = one_type ? std::memcmp(a.element(i), b.element(i), size_of(a.dtype())) == 0
                                : x == y || both_nan;
    if (equal) continue;
    const bool has_nan = std::isnan(x) || std::isnan(y);
    const double absolute = has_nan || x == y ? 0 : std::abs(x - y);
    // Large whole numbers may be equal as doubles only.
    const bool close = both_nan || (!has_nan && absolute <= options.tolerance.value_or(0) &&
                                    (x != y || is_floating(a.dtype())));
    if (options.tolerance && close) continue;
    ++total.differing;
    total.absolute = std::max(total.absolute, absolute);
    if (absolute == 0) continue;
    const double larger = std::max(std::abs(x), std::abs(y));
    total.relative = std::max(total.relative, std::isinf(larger) ? larger : absolute / larger);
  }
}

int64_t count_nan(const std::vector<double>& numbers) {
  return std::count_if(numbers.begin(), numbers.end(), [](double x) { return x != x; });
}

}  // namespace

TensorDifference compare(CheckpointReader& a, CheckpointReader& b, const std::string& tensor,
                         const CompareOptions& options) {
  Side left(a, tensor), right(b, tensor);
  if (left.shape() != right.shape()) {
    throw ConfigError(format("tensor {} is {} in {} and {} in {}", tensor,
                             layout::describe(left.shape()), a.path(),
                             layout::describe(right.shape()), b.path()));
  }
  TensorDifference total{.elements = layout::numel_of(left.shape())};
  for (const layout::Box& piece :
       layout::pieces(layout::Box::whole(left.shape()), kElementsAtATime)) {
    left.read(piece);
    right.read(piece);
    total.nan_a += count_nan(left.numbers());
    total.nan_b += count_nan(right.numbers());
    if (left.dtype() == right.dtype() && left.same_bytes(right)) continue;
    add_differences(left, right, options, total);
  }
  return total;
}

}  // namespace lockstep::formats
