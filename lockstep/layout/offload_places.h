// SPDX-License-Identifier: Apache-2.0
// Which of a rank's bytes rest where between their uses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/layout/offload.h"

namespace lockstep::layout {

enum class Tier { device, host, disk };
std::string_view name_of(Tier tier);

struct OffloadPlaces {
  struct Unit {
    Tier params = Tier::device, grads = Tier::device;
    std::vector<Tier> states = {};
    bool operator==(const Unit&) const = default;
  };
  std::vector<Unit> units = {};
  int64_t resting = 0;    // bytes on the device from step to step
  int64_t on_device = 0;  // with the working set
  int64_t on_host = 0, on_disk = 0;

  bool operator==(const OffloadPlaces&) const = default;
};

// Bytes of one unit on this rank at rest, and of its optimizer state in slices that move by
// themselves. States are given as they are kept on the host (encoded) and on the device.
struct OffloadUnit {
  std::string name = {};
  int64_t params = 0, grads = 0;
  // On the host, where they are encoded there; not set: the same.
  std::optional<int64_t> host_params = {}, host_grads = {};
  int64_t params_on_host() const { return host_params.value_or(params); }
  int64_t grads_on_host() const { return host_grads.value_or(grads); }
  // Of the gathered parameters while the unit is used, in addition to `params` where these rest on
  // the device. Parameters that rest elsewhere have a line of at least their own size.
  int64_t line = 0;
  struct Slice {
    int64_t on_device = 0, on_host = 0;
    bool operator==(const Slice&) const = default;
  };
  std::vector<Slice> states = {};
  // Where it rests already, when places are decided again: of all units, or of none.
  std::optional<OffloadPlaces::Unit> now = {};
  bool operator==(const OffloadUnit&) const = default;
};

// Units in the order in which a forward uses them; those used first keep what can stay. `working`:
// bytes that the device must have for what is being used (gathered lines, gradients and state on
// their way, and activations once a step has shown them). The options are resolved and valid.
//
// Nothing moves while everything, the working set included, is within threshold x device_limit and
// the parameters, with two lines, within param_budget. Else what may move (the switches say which
// kinds) keeps threshold x (1 - aggressiveness) x device_limit, less what cannot move: room that is
// filled with parameters, then gradients, then states, each kind from the first unit up to the one
// that does not fit, parameters only as far as param_budget holds them and the two largest lines.
//
// Of what moves, all is on the host, if it is within host_budget. With a disk, states go there from
// the last slice of the last unit on until the rest is within host_budget and threshold x
// host_limit, less `host_reserve` bytes for what is on its way there. ConfigError, with the
// numbers, where device or host cannot hold what they must.
//
// Where units rest somewhere already, the same is decided for what is still on the device, except
// that parameters stay where they are, that nothing comes nearer to the device, and that a device
// which cannot hold what it must is no error: all that may leave it then does.
OffloadPlaces place(const std::vector<OffloadUnit>& units, int64_t working,
                    const OffloadOptions& options, int64_t host_reserve = 0);

}  // namespace lockstep::layout
