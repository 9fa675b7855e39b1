// SPDX-License-Identifier: Apache-2.0
// Collectives and point-to-point operations on tensors.
//
// All return at once with the Work to wait for; until then leave the tensors alone. Results are
// bit-identical on all ranks and from run to run. float64/32/16, bfloat16, int64/32/8, uint8 and
// bool; 16-bit floats are summed in float32; avg of whole numbers drops the remainder; for bool,
// sum and max mean "any", product and min "all", avg is an error. A tensor is a handle: outputs are
// taken by const reference so that views can be passed, and written.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/fabric/operation.h"

namespace lockstep::comm {

using fabric::ReduceOp;

struct CollectiveOptions {
  std::optional<milliseconds> timeout = std::nullopt;  // the group's, if not given
  std::string tag = {};  // names the data in messages; ranks must agree on it
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::sum;
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};
struct RootedOptions {
  int root = 0;
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};
struct RootedReduceOptions {
  int root = 0;
  ReduceOp op = ReduceOp::sum;
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};
// Elements of each rank's block, in rank order; empty means equal blocks. The same on every rank.
struct GatherOptions {
  std::vector<int64_t> counts = {};
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::sum;
  std::vector<int64_t> counts = {};
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};
// Elements of the block for, and from, each rank; empty means equal blocks.
struct AllToAllOptions {
  std::vector<int64_t> input_counts = {};
  std::vector<int64_t> output_counts = {};
  std::optional<milliseconds> timeout = std::nullopt;
  std::string tag = {};
};

// In place.
[[nodiscard]] Work all_reduce(const at::Tensor& tensor, const Group& group,
                              ReduceOptions options = {});
// In place at the root; elsewhere the tensor is only read.
[[nodiscard]] Work reduce(const at::Tensor& tensor, const Group& group,
                          RootedReduceOptions options = {});
// Read at the root, written elsewhere.
[[nodiscard]] Work broadcast(const at::Tensor& tensor, const Group& group,
                             RootedOptions options = {});
// `output` holds the blocks of all ranks end to end. `input` may be this rank's block of `output`.
[[nodiscard]] Work all_gather(const at::Tensor& output, const at::Tensor& input, const Group& group,
                              GatherOptions options = {});
// `input` holds a block for every rank end to end. `output` may be this rank's block of `input`.
[[nodiscard]] Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const Group& group, ReduceScatterOptions options = {});
[[nodiscard]] Work all_to_all(const at::Tensor& output, const at::Tensor& input, const Group& group,
                              AllToAllOptions options = {});
// `output` is used at the root only, `input` everywhere; blocks are equal.
[[nodiscard]] Work gather(const at::Tensor& output, const at::Tensor& input, const Group& group,
                          RootedOptions options = {});
// `input` is used at the root only, `output` everywhere; blocks are equal.
[[nodiscard]] Work scatter(const at::Tensor& output, const at::Tensor& input, const Group& group,
                           RootedOptions options = {});
// Messages between two ranks arrive in the order they were sent. Independent of collectives and of
// other pairs.
[[nodiscard]] Work send(const at::Tensor& tensor, int to, const Group& group,
                        CollectiveOptions options = {});
[[nodiscard]] Work recv(const at::Tensor& tensor, int from, const Group& group,
                        CollectiveOptions options = {});
[[nodiscard]] Work barrier(const Group& group, CollectiveOptions options = {});

// Sums whose bits do not depend on the backend: the fixed binary tree over ranks that thread and
// shm always use. Other backends only move the blocks, and the arithmetic happens in wait(), so all
// ranks wait for several of these in the same order. 16-bit floats travel as such, and are summed
// in float32 and rounded once.
[[nodiscard]] Work all_reduce_ordered(const at::Tensor& tensor, const Group& group,
                                      ReduceOptions options = {});
// As with reduce_scatter, `output` may be this rank's block of `input`.
[[nodiscard]] Work reduce_scatter_ordered(const at::Tensor& output, const at::Tensor& input,
                                          const Group& group, ReduceScatterOptions options = {});

}  // namespace lockstep::comm
