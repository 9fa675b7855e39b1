// SPDX-License-Identifier: Apache-2.0
// The arithmetic of packed_update.cpp, packed_kernels.cpp and of the codecs, operation by
// operation; built without fused multiply-add, so that the bits are the CPU's.
#include <cstdint>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/optim/kernels/cuda_codecs.h"
#include "lockstep/optim/kernels/cuda_rules.h"
#include "lockstep/optim/kernels/packed_update.h"

namespace lockstep::optim::cuda {

namespace {

struct PackedJob {
  void* param;
  const void* grad;
  DType grad_dtype;
  std::byte* master;  // what the state has of it
  Moment exp_avg, exp_avg_sq;
  CodedWeight weight;  // a coded parameter
  int64_t elements;
  bool marks;   // exp_avg_sq has a sign to spare
  bool vector;  // everything is aligned to 16 bytes
};

__device__ void load_gradients(const PackedJob& job, const Lane& lane, float (&values)[kEach]) {
  switch (job.grad_dtype) {
    case DType::float64:
      return load_widened<double>(job.grad, lane, values);
    case DType::float16:
      return load_widened<F16>(job.grad, lane, values);
    case DType::bfloat16:
      return load_widened<Bf16>(job.grad, lane, values);
    default:
      return load_widened<float>(job.grad, lane, values);
  }
}

__device__ float joined(Bf16 param, uint16_t remainder, uint32_t above) {
  const uint32_t upper = static_cast<uint32_t>(param.bits) << 16;
  const uint32_t whole = upper + static_cast<uint32_t>(static_cast<int16_t>(remainder)) + above;
  return __uint_as_float(((whole ^ upper) & kSign) != 0 ? upper : whole);
}

// P is float, F16 or Bf16. kCoded: the parameter is float in two parts.
template <class Rule, class P, bool kCoded>
__global__ void __launch_bounds__(kWarps* kLanes) packed_update_kernel(PackedJob job, Rule rule) {
  // As codec::master_of() says.
  constexpr bool kRemainder = std::is_same_v<P, Bf16> && Rule::kMoments == 2;
  constexpr bool kWhole = sizeof(P) == 2 && !kRemainder;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (block * codec::kBlock >= job.elements) return;  // a whole warp
  const int64_t begin = block * codec::kBlock + threadIdx.x % kLanes * kEach;
  const int64_t end = begin + kEach < job.elements ? begin + kEach : job.elements;
  const Lane lane{begin, end, job.vector && end - begin == kEach};

  P params[kEach];
  float grads[kEach], means[kEach] = {}, squares[kEach] = {}, masters[kEach];
  uint16_t remainders[kEach];
  if constexpr (kCoded) {
    join_coded(job.weight, block, lane, params);
  } else {
    load(job.param, lane, params);
  }
  load_gradients(job, lane, grads);
  if constexpr (kRemainder) load(job.master, lane, remainders);
  if constexpr (kWhole) load(job.master, lane, masters);
  if constexpr (Rule::kMoments > 0) decode<true>(job.exp_avg, block, lane, means);
  if constexpr (Rule::kMoments > 1) decode<false>(job.exp_avg_sq, block, lane, squares);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    float weight = widen(params[k]);
    if constexpr (kWhole) {
      // Where the parameter is not its rounded master someone else has written it, and it wins.
      if (narrow<P>(masters[k]).bits == params[k].bits) weight = masters[k];
    }
    if constexpr (kRemainder) {
      const uint32_t bits = __float_as_uint(squares[k]);
      weight = joined(params[k], remainders[k], job.marks ? (bits & kSign) >> 15 : 0);
      if (job.marks) squares[k] = __uint_as_float(bits & ~kSign);
    }
    const float updated = rule(weight, grads[k], means[k], squares[k]);
    params[k] = narrow<P>(updated);
    if constexpr (kWhole) masters[k] = updated;
    if constexpr (kRemainder) {
      const uint32_t bits = __float_as_uint(updated);
      const bool tie = (bits & 0x1ffff) == 0x8000;
      remainders[k] = static_cast<uint16_t>(bits - (tie && !job.marks ? 1 : 0));
      if (job.marks) squares[k] = __uint_as_float(__float_as_uint(squares[k]) | (tie ? kSign : 0));
    }
  }
  if constexpr (kCoded) {
    split_coded(job.weight, block, lane, params);
  } else {
    store(job.param, lane, params);
  }
  if constexpr (kRemainder) store(job.master, lane, remainders);
  if constexpr (kWhole) store(job.master, lane, masters);
  if constexpr (Rule::kMoments > 0) encode<true>(job.exp_avg, block, lane, means);
  if constexpr (Rule::kMoments > 1) encode<false>(job.exp_avg_sq, block, lane, squares);
}

template <class P, bool kCoded, class Rule>
void launch(const PackedJob& job, const Rule& rule, cudaStream_t stream) {
  packed_update_kernel<Rule, P, kCoded>
      <<<grid_for(job.elements), kWarps * kLanes, 0, stream>>>(job, rule);
}

// Calls launch(rule) with the rule of float32.
template <class Launch>
void for_rule(const PackedFactors& factors, const Launch& launch) {
  if (const auto* const adamw = std::get_if<AdamWFactors>(&factors))
    return launch(AdamWRule<float>(*adamw));
  const auto& sgd = std::get<SgdUpdate>(factors);
  for_sgd<float>(sgd.kind, sgd.factors, launch);
}

// Parameters of float64 have nothing packed.
void launch_float64(const PackedLayout& layout, const PackedSlice& slice,
                    const PackedFactors& factors, void* stream) {
  const detail::Operands operands{.param = slice.param,
                                  .grad = slice.grad,
                                  .master = nullptr,
                                  .first = slice.state + layout.exp_avg,
                                  .second = slice.state + layout.exp_avg_sq};
  constexpr DType kType = DType::float64;
  const detail::cuda::UpdatePart part{operands, slice.elements};
  const std::span<const detail::cuda::UpdatePart> parts(&part, 1);
  if (const auto* const adamw = std::get_if<AdamWFactors>(&factors)) {
    return detail::cuda::launch_adamw(parts, *adamw, kType, kType, stream);
  }
  const auto& sgd = std::get<SgdUpdate>(factors);
  detail::cuda::launch_sgd(parts, sgd.kind, sgd.factors, kType, kType, stream);
}

// What a model computes with, as T: float, F16 or Bf16.
template <class T>
__global__ void __launch_bounds__(kWarps* kLanes)
    decode_kernel(Moment weight, int64_t elements, bool vector, void* values) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (block * codec::kBlock >= elements) return;
  const int64_t begin = block * codec::kBlock + threadIdx.x % kLanes * kEach;
  const int64_t end = begin + kEach < elements ? begin + kEach : elements;
  const Lane lane{begin, end, vector && end - begin == kEach};
  float decoded[kEach];
  decode<true>(weight, block, lane, decoded);
  store_narrowed<T>(values, lane, decoded);
}

}  // namespace

void launch_packed_update(const PackedFormat& format, const PackedSlice& slice,
                          const PackedFactors& factors, void* stream) {
  if (slice.elements == 0) return;
  const PackedLayout layout = packed_layout(format, slice.elements);
  if (format.param == DType::float64) {
    check(format.grad == DType::float64, "gradients of float64 parameters are float64");
    return launch_float64(layout, slice, factors, stream);
  }
  const bool coded = format.weight != Codec::none;
  PackedJob job{};
  job.param = slice.param;
  job.grad = slice.grad;
  job.grad_dtype = format.grad;
  job.master = slice.state + layout.remainder;
  job.exp_avg = moment_at(format.exp_avg, slice.state + layout.exp_avg, slice.elements);
  job.exp_avg_sq = moment_at(format.exp_avg_sq, slice.state + layout.exp_avg_sq, slice.elements);
  job.weight = {{format.weight, slice.weight.codes, slice.weight.scales}, slice.weight.remainder};
  job.elements = slice.elements;
  job.marks = master_of(format) == Master::remainder && !is_8_bits(format.exp_avg_sq);
  const void* param = coded ? slice.weight.codes : slice.param;
  job.vector = is_aligned(param) && is_aligned(slice.grad) && is_aligned(slice.state) &&
               is_aligned(slice.weight.remainder);
  const auto queue = static_cast<cudaStream_t>(stream);
  for_rule(factors, [&](const auto& rule) {
    check(format.moments == rule.kMoments, "the state is that of the rule");
    if (coded) return launch<float, true>(job, rule, queue);
    if (format.param == DType::float32) return launch<float, false>(job, rule, queue);
    if (format.param == DType::float16) return launch<F16, false>(job, rule, queue);
    check(format.param == DType::bfloat16, "updates are for floating dtypes");
    launch<Bf16, false>(job, rule, queue);
  });
  check_launch("offload");
}

void launch_decode(const codec::CodedArray& array, int64_t elements, DType dtype, void* values,
                   void* stream) {
  if (elements == 0) return;
  const Moment weight{array.codec, array.codes, array.scales};
  const bool vector = is_aligned(array.codes) && is_aligned(values);
  const auto queue = static_cast<cudaStream_t>(stream);
  const dim3 grid(grid_for(elements)), threads(kWarps * kLanes);
  if (dtype == DType::bfloat16) {
    decode_kernel<Bf16><<<grid, threads, 0, queue>>>(weight, elements, vector, values);
  } else if (dtype == DType::float16) {
    decode_kernel<F16><<<grid, threads, 0, queue>>>(weight, elements, vector, values);
  } else {
    check(dtype == DType::float32, "parameters are decoded to float32 and 16 bits");
    decode_kernel<float><<<grid, threads, 0, queue>>>(weight, elements, vector, values);
  }
  check_launch("decode");
}

}  // namespace lockstep::optim::cuda
