// SPDX-License-Identifier: Apache-2.0
// AdamW on state that is kept in another form than it is computed in.
//
// The state of a slice of a parameter is one block of bytes: exp_avg, exp_avg_sq and, for a
// parameter of bfloat16, what its float32 master has beyond the parameter itself. The parameter is
// the upper half of the master, rounded to nearest even, and 16 bits of difference are kept beside
// it; of the two ties that 16 bits cannot tell apart, one is marked by the sign of exp_avg_sq,
// which is never negative. So nothing is lost, and the master takes two bytes. (Where exp_avg_sq is
// kept in 8 bits there is no sign: such a master loses the last of its bits.) Results have the bits
// of AdamW's kernels. Where someone else has written the parameter, the low half stays: the master
// is within half a unit of what was written. Private: not installed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/codec/master.h"
#include "lockstep/codec/packed_state.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

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

// One pass over memory by torch's threads. `state` is aligned to 4 bytes.
void packed_adamw(const PackedFormat& format, const PackedSlice& slice,
                  const AdamWFactors& factors);

// State as optimizers show it, and back: float32 arrays of slice.elements; `master` only for
// bfloat16 and coded parameters. pack() also writes the parameter where it is not its rounded
// master. Null pointers: unpack() leaves out; pack() takes zeros, and for `master` the parameter.
struct UnpackedState {
  float* exp_avg;
  float* exp_avg_sq;
  float* master;
};
void unpack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state);
void pack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state);

namespace cuda {
// The same bits, on CUDA memory; queued on the stream.
void launch_packed_adamw(const PackedFormat& format, const PackedSlice& slice,
                         const AdamWFactors& factors, void* stream);
// What a model computes with of a coded parameter, as `dtype`: float32 or bfloat16.
void launch_decode(const codec::CodedArray& array, int64_t elements, DType dtype, void* values,
                   void* stream);
}  // namespace cuda

}  // namespace lockstep::optim
