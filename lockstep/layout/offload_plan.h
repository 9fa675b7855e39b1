// SPDX-License-Identifier: Apache-2.0
// What of a rank's model rests where, and what its device holds while it trains. One decision, from
// sizes alone, for the run that makes the memory and for the plan that predicts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/dtype.h"
#include "lockstep/layout/flat_layout.h"
#include "lockstep/layout/offload.h"
#include "lockstep/layout/offload_places.h"
#include "lockstep/layout/offload_ring.h"

namespace lockstep::layout {

// Where optimizer state is updated, if the options decide it; a run measures it else.
std::optional<UpdateSite> decided_site(const OffloadOptions& options);

struct OffloadMachine {
  bool cuda = false;
  int64_t device_grain = 1, host_grain = 1;  // bytes: allocations are multiples of these
  UpdateSite site = UpdateSite::cpu;         // not automatic
};
// What this machine's CPU or a CUDA device is like. A site that a run would measure is the likely
// one: the device on CUDA, the CPU elsewhere.
OffloadMachine offload_machine(const OffloadOptions& options, bool cuda);

// Parameters of one kind in one unit, as this rank has them.
struct OffloadFlat {
  std::string name = {}, unit = {};
  DType param = DType::float32;    // the shard's
  DType compute = DType::float32;  // of gathered parameters
  DType reduce = DType::float32;   // of gradients on their way
  DType grad = DType::float32;     // of the shard's gradients
  int64_t num_parameters = 0;
  int64_t shard = 0, size = 0;  // elements: this rank's, and gathered
  bool shared = false;          // ranks share it
  bool stays = false;           // on the device: small tensors that all units use
  bool trained = true;
  // False: the optimizer does not update its tensors, which have a place planned all the same.
  bool has_state = true;
  struct Tensor {
    int64_t count = 0;  // elements
    bool embedding = false;
  };
  std::vector<Tensor> tensors = {};  // that the optimizer updates
};

// What `part` has of each tensor, in the order of the tensors; `is_embedding` is asked for their
// indices.
std::vector<OffloadFlat::Tensor> optimized_tensors(std::span<const Shape> shapes,
                                                   const FlatLayout& layout, int part,
                                                   const std::function<bool(size_t)>& is_embedding);

// Bytes, by kind.
struct KindBytes {
  int64_t params = 0, grads = 0, states = 0;
  int64_t sum() const { return params + grads + states; }
  KindBytes& operator+=(const KindBytes& other);
};

struct OffloadPlan {
  OffloadOptions options = {};
  OffloadMachine machine = {};
  struct Flat {
    OffloadFlat sizes = {};
    OffloadUnit bytes = {};
    int64_t gradient_line = 0;  // bytes of its gradients on their way
    Tier params = Tier::device, grads = Tier::device;
    // How these are kept: what the options say, on the host.
    codec::Codec param_codec = codec::Codec::none, grad_codec = codec::Codec::none;
    std::vector<StatePlan> states = {};  // of sizes.tensors
  };
  std::vector<Flat> flats = {};
  int64_t ring = 0;  // bytes that it takes if it is made: if anything moves
  // What the device must have at the least for what is being used, and the activations that the
  // decision was made with: none before the first step, which shows them.
  int64_t working = 0, activations = 0;

  // On the device: what rests there, and what is used at a time, which is gathered parameters with
  // those that are fetched ahead, gradients on their way, and the ring.
  KindBytes resting = {}, used = {};
  // On the host: what rests there, copies of parameters for updates by the CPU included (states),
  // and gradients on their way.
  KindBytes on_host = {};
  int64_t host_used = 0;
  int64_t on_disk = 0;
  // Bytes of the host that optimizer state may have, once it is known what LZ4 makes of it.
  int64_t state_room = 0;
  // Unreduced gradients of micro-batches before the last, under no_sync().
  int64_t unreduced_on_device = 0, unreduced_on_host = 0;
};

// `flats` in the order in which a forward uses them; `options` resolved and valid. ConfigError,
// with the numbers, where budgets are too small.
OffloadPlan plan_offload(std::vector<OffloadFlat> flats, const OffloadOptions& options,
                         const OffloadMachine& machine);
// Gives the plan's flats their places, by place(), with its working set and activations; and counts
// what is where then.
void place_flats(OffloadPlan& plan, int64_t host_reserve = 0);
void recount(OffloadPlan& plan);
// What the device has at most: what rests there, what is being used, and these activations.
int64_t pressure(const OffloadPlan& plan, int64_t activations);
// Activations of so many bytes take more of the device than they did when the plan was made, and
// with them the device has more than threshold x device_limit.
bool breaks_margin(const OffloadPlan& plan, int64_t activations);
// Bytes on the device that may still leave it, parameters aside.
int64_t may_leave(const OffloadPlan& plan);
// The decision of plan_offload(), made again with the activations that a step has shown. Parameters
// stay, nothing comes nearer to the device, and gradients that leave it now are not encoded, so
// that no value changes. Where the host has no room for gradients, optimizer state moves alone.
// ConfigError, with the numbers, where it has none for that either.
OffloadPlan plan_again(const OffloadPlan& plan, int64_t activations);
// The parameters of these flats (one bool for each) rest on the host: ranks that share parameters
// agree on where they rest.
void move_to_host(OffloadPlan& plan, const std::vector<bool>& flats);

// Elements of parameters and gradients that LZ4 packs together, and the bytes that it makes of so
// many elements of `width` bytes at most, with a table of where each pack ends.
inline constexpr int64_t kPackedElements = int64_t{1} << 20;
int64_t packed_values_bound(int64_t elements, size_t width);

// How the parameters of a tensor of `count` elements are kept, where `wanted` is asked for: 8 bits
// are not for small tensors and embeddings, which have bf16.
codec::Codec weight_codec(codec::Codec wanted, int64_t count, bool embedding);

// Blocks for gradients on their way: one that is filled while the other is reduced. Updates that
// are made in backward may fall behind for a while.
int64_t num_gradient_blocks(bool in_backward, bool cuda);
// Units to fetch beyond the one that is used: those that have `prefetch` parameters together, at
// least one.
size_t units_ahead(std::span<const size_t> parameters, int prefetch);

}  // namespace lockstep::layout
