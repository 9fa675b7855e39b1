// SPDX-License-Identifier: Apache-2.0
// A group over an engine of c10d: the Gloo group that we make, or one that a program has made.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "lockstep/comm/backend.h"

namespace lockstep::comm::gloo {

// What c10d's engines are: a ProcessGroup in libtorch 1.13, a Backend from 2.0 on.
using Engine = std::conditional_t<std::is_base_of_v<c10d::Backend, c10d::ProcessGroupGloo>,
                                  c10d::Backend, c10d::ProcessGroup>;

// Gives the engine's next collectives this tag, and those that follow it.
using TagSetter = std::function<void(uint32_t)>;

// The engine's ranks must be the membership's, in its order, and take tensors of the CPU. Splits
// are Gloo groups. Where tags can be set, collectives that ranks do not agree on never meet in the
// engine, so that it may have them before it is known that they do.
std::shared_ptr<detail::GroupImpl> make_process_group(detail::Membership membership,
                                                      std::string backend,
                                                      c10::intrusive_ptr<Engine> engine,
                                                      TagSetter set_tag = {});

}  // namespace lockstep::comm::gloo
