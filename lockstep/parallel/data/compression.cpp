// SPDX-License-Identifier: Apache-2.0
// Gradient hooks that send fewer bytes: 16-bit floats, and the table of hooks by name.
#include <ATen/ATen.h>

#include <map>
#include <memory>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel::hooks {
namespace {

// One buffer for each bucket, in memory that the group reaches, made when first needed.
class NarrowBuffers {
 public:
  explicit NarrowBuffers(DType dtype) : dtype_(dtype) {}

  at::Tensor& of(const GradientBucket& bucket, const comm::Group& group) {
    const int64_t count = bucket.flat.numel();
    const auto fits = [&](const at::Tensor& buffer) {
      return buffer.defined() && buffer.numel() == count && buffer.device() == bucket.flat.device();
    };
    if (fits(buffers_[bucket.index])) return buffers_[bucket.index];
    if (bucket.index == 0) buffers_.clear();  // of buckets that are no more
    at::Tensor& buffer = buffers_[bucket.index];
    buffer = comm::symmetric_empty(std::span(&count, 1), dtype_, group, bucket.flat.device());
    return buffer;
  }

 private:
  DType dtype_;
  std::map<int, at::Tensor> buffers_;
};

GradientHook narrow(DType dtype) {
  return [dtype, buffers = std::make_shared<NarrowBuffers>(dtype)](GradientBucket& bucket,
                                                                   const comm::Group& group) {
    const at::Tensor narrow = buffers->of(bucket, group);
    // Shares, not sums: a gradient may be too large for float16 where the average is not.
    narrow.copy_(bucket.flat.div_(group.size()));
    // Ordered, because backends with reductions of their own would widen it again.
    comm::Work work = comm::all_reduce_ordered(
        narrow, group, {.tag = format("gradient bucket {} as {}", bucket.index, name_of(dtype))});
    return [work, narrow, flat = bucket.flat]() mutable {
      work.wait();
      flat.copy_(narrow);
    };
  };
}

}  // namespace

GradientHook fp16() { return narrow(DType::float16); }
GradientHook bf16() { return narrow(DType::bfloat16); }

GradientHook by_name(std::string_view name) {
  if (name == "none") return {};
  if (name == "fp16") return fp16();
  if (name == "bf16") return bf16();
  if (name == "power-sgd") return power_sgd();
  if (name == "fp16-across-hosts") return across_hosts(fp16());
  if (name == "bf16-across-hosts") return across_hosts(bf16());
  throw ConfigError(format(
      "[ddp] gradient hook is '{}', must be none, fp16, bf16, power-sgd, fp16-across-hosts or "
      "bf16-across-hosts",
      name));
}

}  // namespace lockstep::parallel::hooks
