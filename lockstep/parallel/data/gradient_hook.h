// SPDX-License-Identifier: Apache-2.0
// What happens to gradients between backward and the optimizer, where plain averaging is not
// wanted.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// The gradients of a few parameters, end to end in one flat tensor (with padding between them).
struct GradientBucket {
  int index = 0;  // among those that hooks see; 0 is the first of a step
  at::Tensor flat;
  std::vector<std::string> names;     // of the parameters
  std::vector<at::Tensor> gradients;  // views of `flat` in the parameters' shapes
};

// Begins to replace the gradients of a bucket by their average over the group, and returns what
// completes it (or nothing, if all is done). Called during backward when the bucket is full; what
// it returns is called at the end of backward. Both happen in the same bucket order on all ranks,
// so both may use collectives of the group. A hook with state serves one wrapper: make one for
// each.
using GradientHook = std::function<std::function<void()>(GradientBucket&, const comm::Group&)>;

// Sees the gradients of this rank, flat as in a bucket and with the names of their parameters,
// before each reduction; during backward, on its threads. It must not change them.
using GradientObserver =
    std::function<void(const at::Tensor& flat, const std::vector<std::string>& names)>;

namespace hooks {

// Gradients travel as 16-bit floats: half the bytes. Each rank's share of the average is rounded,
// shares are added in float32, and the sum is rounded again.
GradientHook fp16();
GradientHook bf16();

struct PowerSgdOptions {
  int rank = 1;               // of the approximation; more is closer and dearer
  int64_t start_step = 1000;  // plain averages before that many steps
  // Compress a gradient of r x c only if (r + c) * rank * this < r * c.
  double min_compression = 2.0;
  bool error_feedback = true;  // what a step leaves out is added to the next
  bool warm_start = true;      // begin with the last step's factor
  uint64_t seed = 0;           // of the first factors; the same on all ranks
};
// Sends two thin factors of every gradient matrix in its place (Vogels et al., 2019).
GradientHook power_sgd(PowerSgdOptions options = {});

// Inside a host gradients are averaged in full precision; the hosts' averages, of which each rank
// has a share, are averaged by `inner`, so that only these are compressed. It sees shares of
// buckets without the parameters' names and shapes: fp16() and bf16() do not need them. Empty: full
// precision there too. On one host this is plain averaging.
GradientHook across_hosts(GradientHook inner);

// "none", "fp16", "bf16", "power-sgd", "fp16-across-hosts", "bf16-across-hosts": for programs that
// take the name from a user.
GradientHook by_name(std::string_view name);

}  // namespace hooks
}  // namespace lockstep::parallel
