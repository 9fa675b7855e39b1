// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/bucket.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::parallel::detail {
namespace {

int64_t aligned(int64_t count, int64_t element_size) {
  const int64_t unit = layout::kBucketAlignment / element_size;
  return (count + unit - 1) / unit * unit;
}

// Where a parameter's elements fill their memory without gaps the gradient has its strides, which
// is what optimizers and autograd prefer.
at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense())
    return flat.as_strided(parameter.sizes(), parameter.strides(), offset);
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

at::Tensor allocate(int64_t count, const at::Tensor& like, const comm::Group& group) {
  // Padding is reduced with the rest, so it must hold numbers.
  const auto dtype = memory::dtype_of(like, "ddp");
  return comm::symmetric_empty(std::span(&count, 1), dtype, group, like.device()).zero_();
}

}  // namespace

BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const size_t> order,
                        size_t first_bytes, size_t bytes) {
  struct Open {
    std::vector<size_t> members;
    size_t bytes = 0;
    size_t limit = 0;
  };
  BucketPlan plan;
  std::vector<std::pair<std::pair<at::ScalarType, c10::Device>, Open>> open;  // few: a list will do
  for (const size_t index : order) {
    const at::Tensor& tensor = parameters[index].tensor;
    if (parameters[index].sparse) {
      plan.push_back({index});
      continue;
    }
    const std::pair key(tensor.scalar_type(), tensor.device());
    auto found = std::find_if(open.begin(), open.end(), [&](auto& e) { return e.first == key; });
    if (found == open.end())
      found = open.insert(open.end(), {key, Open{.members = {}, .bytes = 0, .limit = first_bytes}});
    Open& bucket = found->second;
    const auto close = [&] {
      plan.push_back(std::move(bucket.members));
      bucket = {.members = {}, .bytes = 0, .limit = bytes};
    };
    // A large one goes alone: together with what waits, both would be late.
    if (!bucket.members.empty() && bucket.bytes + tensor.nbytes() > bucket.limit) close();
    bucket.members.push_back(index);
    bucket.bytes += tensor.nbytes();
    if (bucket.bytes >= bucket.limit) close();
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) plan.push_back(std::move(bucket.members));
  }
  // By when the last gradient arrives: a sparse one comes before a bucket that is still open.
  std::vector<size_t> arrival(parameters.size());
  for (size_t place = 0; place < order.size(); ++place) arrival[order[place]] = place;
  std::sort(plan.begin(), plan.end(),
            [&](const auto& a, const auto& b) { return arrival[a.back()] < arrival[b.back()]; });
  return plan;
}

std::vector<Bucket> make_buckets(std::span<const Parameter> parameters, const BucketPlan& plan,
                                 const comm::Group& group) {
  std::vector<Bucket> buckets;
  int num_dense = 0;
  for (const auto& members : plan) {
    Bucket bucket;
    bucket.members = members;
    bucket.sparse = parameters[members[0]].sparse;
    std::vector<int64_t> offsets;
    int64_t count = 0;
    for (const size_t index : members) {
      const at::Tensor& tensor = parameters[index].tensor;
      bucket.names.push_back(parameters[index].name);
      offsets.push_back(count);
      count += aligned(tensor.numel(), tensor.element_size());
    }
    bucket.tag = format("gradient bucket {} ({}{})", buckets.size(), bucket.names[0],
                        members.size() > 1 ? " .. " + bucket.names.back() : "");
    if (!bucket.sparse) {
      bucket.index = num_dense++;
      bucket.flat = allocate(count, parameters[members[0]].tensor, group);
      for (size_t i = 0; i < members.size(); ++i) {
        bucket.gradients.push_back(
            gradient_view(bucket.flat, offsets[i], parameters[members[i]].tensor));
      }
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

}  // namespace lockstep::parallel::detail
