// SPDX-License-Identifier: Apache-2.0
// Gradients of several parameters side by side in memory that the whole group can reach.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel::detail {

struct Parameter {
  std::string name;
  at::Tensor tensor;
  bool sparse = false;  // its gradient travels as indices and rows
};

struct Bucket : GradientBucket {
  std::vector<size_t> members;  // places in the list of parameters
  bool sparse = false;          // one parameter, no flat memory
  std::string tag;              // names it in messages about its collective
};

using BucketPlan = std::vector<std::vector<size_t>>;  // the members of each

// Which parameters share a bucket. Takes them in `order`; a bucket holds one dtype on one device
// and at most its limit (the first limit for the first bucket of each kind), or one larger tensor.
// Buckets come in the order in which they fill.
BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const size_t> order,
                        size_t first_bytes, size_t bytes);

// Collective: allocates symmetric memory for parameters on the CPU.
std::vector<Bucket> make_buckets(std::span<const Parameter> parameters, const BucketPlan& plan,
                                 const comm::Group& group);

}  // namespace lockstep::parallel::detail
