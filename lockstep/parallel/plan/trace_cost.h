// SPDX-License-Identifier: Apache-2.0
// What a layer costs, from the allocations of its forward and backward. Private: not installed.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "lockstep/memory/counting/allocation_log.h"
#include "lockstep/plan/run_description.h"

namespace lockstep::parallel::detail {

// The allocations of one forward and backward of a layer, in order.
struct Trace {
  std::vector<memory::AllocationEvent> events = {};
  size_t forward_end = 0;  // events before this one are forward's
  size_t half_end = 0;     // of a backward in two halves: those before this one are the first's
  // Which block each input and output has. None: memory of another tensor, or no bytes.
  std::vector<std::optional<size_t>> inputs = {}, outputs = {};

  bool operator==(const Trace&) const = default;
};

// With gradients of parameters that stay where they are made, or that are added to others.
struct LayerTraces {
  Trace keeping = {}, adding = {};
  // The same with a backward in two halves; empty where no schedule asks for it.
  Trace split_keeping = {}, split_adding = {};
};

// Of traces of the same layer with a and b rows, what one with `rows` would be: each block grows by
// the same number of bytes for each row. Nothing where they are not the same blocks in the same
// order.
std::optional<Trace> scaled(const Trace& of_a, const Trace& of_b, int64_t a, int64_t b,
                            int64_t rows);

// What of a layer goes to the disk between its forward and its backward.
enum class OnDisk { nothing, inputs, all };

// Where the inputs of a layer are between its forward and its backward.
struct InputPlaces {
  std::vector<bool> counted_before = {};  // the layer before keeps them, and has counted them
  bool held = false;                      // by the stage, even if the layer does not need them
  OnDisk on_disk = OnDisk::nothing;
};

plan::LayerCost cost_of(const LayerTraces& traces, const InputPlaces& inputs);

// Which outputs the layer keeps for its backward.
std::vector<bool> kept_outputs(const Trace& trace, const InputPlaces& inputs);

}  // namespace lockstep::parallel::detail
