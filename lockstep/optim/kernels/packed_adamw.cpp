// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/packed_adamw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/core/float16.h"
#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/kernels/packed_kernels.h"

namespace lockstep::optim {
namespace {

using codec::Codec;
using codec::Sign;

// Decoded at a time: with the parameter and its gradient they fit a first-level cache.
constexpr int64_t kChunk = 2048;
static_assert(kChunk % codec::kBlock == 0 && detail::Blocks::kElements % kChunk == 0);

bool has_master(const PackedFormat& format) { return format.param == DType::bfloat16; }

bool is_coded(const PackedFormat& format) { return format.weight != Codec::none; }

bool is_8_bits(Codec codec) { return codec == Codec::int8 || codec == Codec::quantization; }

detail::Tie tie_of(const PackedFormat& format) {
  if (!has_master(format)) return detail::Tie::none;
  return is_8_bits(format.exp_avg_sq) ? detail::Tie::round : detail::Tie::mark;
}

// One moment of a slice, as floats, a chunk at a time.
class Moment {
 public:
  Moment(Codec codec, Sign sign, std::byte* encoded, int64_t elements)
      : codec_(codec), sign_(sign), encoded_(encoded), elements_(elements) {}

  // In `scratch`, or where they are if they are kept so.
  float* decoded(int64_t begin, int64_t end, float* scratch) const {
    if (codec_ == Codec::none) return reinterpret_cast<float*>(encoded_) + begin;
    codec::decode(codec_, sign_, encoded_, scratch, {elements_, begin, end});
    return scratch;
  }
  // `values` are what decoded() gave or would give.
  void encode(int64_t begin, int64_t end, const float* values) const {
    if (values == reinterpret_cast<float*>(encoded_) + begin) return;
    codec::encode(codec_, sign_, values, encoded_, {elements_, begin, end});
  }

 private:
  Codec codec_;
  Sign sign_;
  std::byte* encoded_;
  int64_t elements_;
};

struct Parts {
  Parts(const PackedFormat& format, const PackedSlice& slice)
      : layout(packed_layout(format, slice.elements)),
        exp_avg(format.exp_avg, Sign::any, slice.state + layout.exp_avg, slice.elements),
        exp_avg_sq(format.exp_avg_sq, Sign::non_negative, slice.state + layout.exp_avg_sq,
                   slice.elements),
        remainder(has_master(format) ? reinterpret_cast<uint16_t*>(slice.state + layout.remainder)
                                     : nullptr) {}

  PackedLayout layout;
  Moment exp_avg, exp_avg_sq;
  uint16_t* remainder;
};

// body(begin, end) for chunks of the slice, on torch's threads.
template <class Body>
void for_each_chunk(const PackedSlice& slice, const Body& body) {
  detail::Blocks blocks;
  blocks.add(slice.elements);
  blocks.for_each([&](const detail::Block& block) {
    for (int64_t begin = block.begin; begin < block.end; begin += kChunk) {
      body(begin, std::min(begin + kChunk, block.end));
    }
  });
}

std::byte* at(void* data, DType dtype, int64_t element) {
  return static_cast<std::byte*>(data) + static_cast<size_t>(element) * size_of(dtype);
}

}  // namespace

void packed_adamw(const PackedFormat& format, const PackedSlice& slice,
                  const AdamWFactors& factors) {
  const detail::PackedAdamWKernel kernel =
      detail::packed_kernels().adamw(format.param, format.grad, tie_of(format));
  check(kernel != nullptr, "packed AdamW is for float32 and bfloat16");
  const Parts parts(format, slice);
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    alignas(64) float means[kChunk], squares[kChunk], weights[kChunk];
    const auto coded = is_coded(format) ? slice.weight.from(begin) : codec::CodedArray{};
    if (is_coded(format)) codec::join(coded, weights, end - begin);
    float* exp_avg = parts.exp_avg.decoded(begin, end, means);
    float* exp_avg_sq = parts.exp_avg_sq.decoded(begin, end, squares);
    kernel({.param = is_coded(format) ? static_cast<void*>(weights)
                                      : at(slice.param, format.param, begin),
            .grad = at(const_cast<void*>(slice.grad), format.grad, begin),
            .remainder = parts.remainder == nullptr ? nullptr : parts.remainder + begin,
            .exp_avg = exp_avg,
            .exp_avg_sq = exp_avg_sq},
           factors, end - begin);
    parts.exp_avg.encode(begin, end, exp_avg);
    parts.exp_avg_sq.encode(begin, end, exp_avg_sq);
    if (is_coded(format)) codec::split(weights, coded, end - begin);
  });
}

void unpack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state) {
  const Parts parts(format, slice);
  const bool marks = tie_of(format) == detail::Tie::mark;
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    float scratch[kChunk];
    if (state.exp_avg != nullptr) {
      const float* means = parts.exp_avg.decoded(begin, end, scratch);
      std::copy(means, means + (end - begin), state.exp_avg + begin);
    }
    const float* squares = parts.exp_avg_sq.decoded(begin, end, scratch);
    if (state.exp_avg_sq != nullptr) {
      for (int64_t i = begin; i < end; ++i) state.exp_avg_sq[i] = std::fabs(squares[i - begin]);
    }
    if (state.master != nullptr && is_coded(format))
      codec::join(slice.weight.from(begin), state.master + begin, end - begin);
    if (state.master != nullptr && has_master(format)) {
      detail::packed_kernels().join(at(slice.param, format.param, begin), parts.remainder + begin,
                                    marks ? squares : nullptr, state.master + begin, end - begin);
    }
  });
}

void pack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state) {
  const Parts parts(format, slice);
  const bool marks = tie_of(format) == detail::Tie::mark;
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    float values[kChunk] = {}, master[kChunk];
    if (state.exp_avg != nullptr) std::copy_n(state.exp_avg + begin, count, values);
    parts.exp_avg.encode(begin, end, values);
    std::fill_n(values, count, 0.f);
    if (state.exp_avg_sq != nullptr) std::copy_n(state.exp_avg_sq + begin, count, values);
    if (has_master(format)) {
      auto* param = reinterpret_cast<BFloat16*>(at(slice.param, format.param, begin));
      if (state.master != nullptr) {
        std::copy_n(state.master + begin, count, master);
      } else {
        std::transform(param, param + count, master, [](BFloat16 value) { return widen(value); });
      }
      detail::packed_kernels().split(master, param, parts.remainder + begin,
                                     marks ? values : nullptr, count);
    }
    parts.exp_avg_sq.encode(begin, end, values);
    if (state.master != nullptr && is_coded(format))
      codec::split(state.master + begin, slice.weight.from(begin), count);
  });
}

}  // namespace lockstep::optim
