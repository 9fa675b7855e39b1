// SPDX-License-Identifier: Apache-2.0
// AdamW and SGD on state that is kept in another form than it is computed in.
//
// The state of a slice of a parameter is one block of bytes: the moments and, for a parameter of 16
// bits, its float32 master. AdamW keeps only what the master of a bfloat16 parameter has beyond the
// parameter itself: the parameter is the upper half of the master, rounded to nearest even, and 16
// bits of difference are kept with it; of the two ties that 16 bits cannot tell apart, one is
// marked by the sign of exp_avg_sq, which is never negative. So nothing is lost, and the master
// takes two bytes. (Where exp_avg_sq is kept in 8 bits there is no sign: such a master loses the
// last of its bits.) Where someone else has written the parameter, the low half stays: the master
// is within half a unit of what was written. Other masters are whole, and follow the rule of
// kernels.h. Results have the bits of the kernels there. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "lockstep/codec/master.h"
#include "lockstep/codec/packed_state.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

using codec::Master;
using codec::master_of;
using codec::packed_layout;
using codec::PackedFormat;
using codec::PackedLayout;

struct PackedSlice {
  void* param;
  const void* grad;
  std::byte* state;
  int64_t elements;
  codec::CodedArray weight = {};  // instead of `param`, where PackedFormat::weight says so
};

// What one step of SGD has for all elements of a parameter: plain without moments.
struct SgdUpdate {
  detail::SgdKind kind;
  detail::SgdFactors factors;
};
// The rule, which PackedFormat::moments fits, and its numbers.
using PackedFactors = std::variant<AdamWFactors, SgdUpdate>;

// One pass over memory by torch's threads. `state` is aligned to 4 bytes, and to 8 for float64.
void packed_update(const PackedFormat& format, const PackedSlice& slice,
                   const PackedFactors& factors);

// State as optimizers show it, and back: arrays of slice.elements, of float64 for a parameter of
// float64 and else of float32. SGD's momentum_buffer is exp_avg; `master` is for parameters of 16
// bits and coded ones. pack() also writes a parameter that is not its rounded master, unless the
// master is whole: that one wins. Null pointers: unpack() leaves out; pack() takes zeros, and for
// `master` the parameter.
struct UnpackedState {
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
};
void unpack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state);
void pack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state);

namespace cuda {
// The same bits, on CUDA memory; queued on the stream.
void launch_packed_update(const PackedFormat& format, const PackedSlice& slice,
                          const PackedFactors& factors, void* stream);
// What a model computes with of a coded parameter, as `dtype`: float32, float16 or bfloat16.
void launch_decode(const codec::CodedArray& array, int64_t elements, DType dtype, void* values,
                   void* stream);
}  // namespace cuda

}  // namespace lockstep::optim
