// SPDX-License-Identifier: Apache-2.0
// One step of a pipeline rank: a computation on a micro-batch, or what moves values around it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::schedule {

enum class Op : uint8_t {
  // Computation. backward is backward_input and backward_weight in one.
  forward,
  backward,
  backward_input,
  backward_weight,
  // Between ranks, from the lowering.
  send_activation,
  recv_activation,
  send_gradient,
  recv_gradient,
  // Of a chunk's parameters and gradients, from the lowering: microbatch is -1.
  unshard,
  reshard,
  reduce,
};

struct Action {
  Op op = Op::forward;
  int microbatch = 0;
  int chunk = 0;

  bool operator==(const Action&) const = default;
};

bool is_computation(Op op);

// "F3.1", with one chunk "F3". F B I W compute, SA RA SG RG send and receive activations and
// gradients; "unshard.1", "reshard.1", "reduce.1", with one chunk the word alone.
std::string name_of(const Action& action, int chunks);

// Reads the name of a computation; with one chunk, ".0" may be left out. Throws ConfigError.
Action parse_action(std::string_view name, int chunks);

}  // namespace lockstep::schedule
