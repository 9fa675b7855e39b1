// SPDX-License-Identifier: Apache-2.0
// The arithmetic of packed_kernels.cpp and of the codecs, operation by operation; built without
// fused multiply-add, so that the bits are the CPU's. A warp has one block of kBlock elements, a
// lane eight of them in a row: 16 bytes a load, and the largest magnitude by shuffles alone.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "lockstep/codec/dynamic_map.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/kernels/packed_adamw.h"

namespace lockstep::optim::cuda {

namespace {

using codec::Codec;
using codec::DynamicMap;

constexpr int kLanes = 32, kEach = codec::kBlock / kLanes, kWarps = 8;
constexpr unsigned kAll = 0xffffffff;
constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000, kNan = 0x7fc00000;

__device__ const DynamicMap kAnySign = codec::make_dynamic_map(true);
__device__ const DynamicMap kNonNegative = codec::make_dynamic_map(false);

// One moment as it is kept.
struct Moment {
  Codec codec;
  std::byte* codes;
  float* scales;
};

struct PackedAdamWJob {
  void* param;
  const void* grad;
  uint16_t* remainder;
  Moment exp_avg, exp_avg_sq;
  Moment weight;  // a coded parameter
  int8_t* weight_remainder;
  int64_t elements;
  bool marks;   // exp_avg_sq has a sign to spare
  bool vector;  // everything is aligned to 16 bytes
  float decay, beta1, rest1, beta2, rest2, eps, step_size, root_scale;
};

// The elements of a lane: [begin, end), at most kEach.
struct Lane {
  int64_t begin, end;
  bool vector;
};

template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Eight {
  T values[kEach];
};

template <class T>
__device__ void load(const void* array, const Lane& lane, T (&values)[kEach]) {
  const T* from = static_cast<const T*>(array) + lane.begin;
  if (lane.vector) {
    const auto all = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
    for (int k = 0; k < kEach; ++k) values[k] = all.values[k];
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) values[k] = lane.begin + k < lane.end ? from[k] : T{};
  }
}

template <class T>
__device__ void store(void* array, const Lane& lane, const T (&values)[kEach]) {
  T* to = static_cast<T*>(array) + lane.begin;
  if (lane.vector) {
    Eight<T> all;
#pragma unroll
    for (int k = 0; k < kEach; ++k) all.values[k] = values[k];
    *reinterpret_cast<Eight<T>*>(to) = all;
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (lane.begin + k < lane.end) to[k] = values[k];
    }
  }
}

__device__ float widen(uint16_t bfloat16) {
  return __uint_as_float(static_cast<uint32_t>(bfloat16) << 16);
}
__device__ uint16_t narrow(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = value != value ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>(rounded >> 16);
}

__device__ float load_float(float stored) { return stored; }
__device__ float load_float(uint16_t stored) { return widen(stored); }

// ---- codecs ----

template <bool kHasNegative>
__device__ const DynamicMap& map_of() {
  return kHasNegative ? kAnySign : kNonNegative;
}

template <bool kHasNegative>
__device__ void decode(const Moment& moment, int64_t block, const Lane& lane,
                       float (&values)[kEach]) {
  switch (moment.codec) {
    case Codec::none:
      load(moment.codes, lane, values);
      break;
    case Codec::fp16: {
      uint16_t codes[kEach];
      load(moment.codes, lane, codes);
#pragma unroll
      for (int k = 0; k < kEach; ++k) values[k] = __half2float(__ushort_as_half(codes[k]));
      break;
    }
    case Codec::bf16: {
      uint16_t codes[kEach];
      load(moment.codes, lane, codes);
#pragma unroll
      for (int k = 0; k < kEach; ++k) values[k] = widen(codes[k]);
      break;
    }
    case Codec::int8: {
      uint8_t codes[kEach];
      load(moment.codes, lane, codes);
      const float scale = moment.scales[block];
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const float step = kHasNegative ? static_cast<int8_t>(codes[k]) : codes[k];
        values[k] = step * (1 / (kHasNegative ? 127.f : 255.f)) * scale;
      }
      break;
    }
    default: {
      uint8_t codes[kEach];
      load(moment.codes, lane, codes);
      const float scale = moment.scales[block];
#pragma unroll
      for (int k = 0; k < kEach; ++k) values[k] = map_of<kHasNegative>().values[codes[k]] * scale;
    }
  }
}

template <bool kHasNegative>
__device__ uint8_t even_code(float ratio) {
  if (!kHasNegative) ratio = ratio > 0 ? ratio : 0;
  // 1.5 * 2^23: the sum is rounded to a whole number, which is in its last bits.
  const float sum = ratio * (kHasNegative ? 127.f : 255.f) + 12582912.f;
  return static_cast<uint8_t>(__float_as_uint(sum));
}

template <bool kHasNegative>
__device__ uint8_t dynamic_code(float ratio) {
  const DynamicMap& map = map_of<kHasNegative>();
  if (!kHasNegative) ratio = ratio > 0 ? ratio : 0;
  // DynamicMap::distance() and step(), which are for the host.
  const uint32_t bits = __float_as_uint(ratio) & ~kSign;
  const uint32_t distance =
      (bits > DynamicMap::kFirst ? bits : DynamicMap::kFirst) - DynamicMap::kFirst;
  const int step = static_cast<int>((map.cells[distance >> 16] + (distance & 0xffff)) >> 16);
  if (kHasNegative && (__float_as_uint(ratio) & kSign) != 0) {
    return static_cast<uint8_t>(map.zero - (step < map.last_negative ? step : map.last_negative));
  }
  return static_cast<uint8_t>(map.zero + step);
}

// int8 and quantization, by all lanes of a warp together. What a lane has beyond the end becomes
// zero, which does not change the largest magnitude.
template <bool kHasNegative>
__device__ void encode_block(const Moment& moment, int64_t block, const Lane& lane,
                             float (&values)[kEach]) {
  const bool dynamic = moment.codec == Codec::quantization;
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (lane.begin + k >= lane.end) values[k] = 0;
    const uint32_t bits = __float_as_uint(values[k]) & ~kSign;
    if (bits > largest) largest = bits;
  }
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAll, largest, distance);
    if (other > largest) largest = other;
  }
  uint8_t codes[kEach];
  float scale;
  if (largest == 0 || largest >= kInfinity) {
    scale = __uint_as_float(largest == 0 ? 0 : kNan);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      codes[k] = dynamic ? static_cast<uint8_t>(map_of<kHasNegative>().zero) : 0;
    }
  } else {
    bool positive = false;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      positive |= __float_as_uint(values[k]) == largest;
    }
    positive = __any_sync(kAll, positive);
    scale = __uint_as_float(dynamic && kHasNegative && !positive ? largest | kSign : largest);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float ratio = __fdiv_rn(values[k], scale);
      codes[k] = dynamic ? dynamic_code<kHasNegative>(ratio) : even_code<kHasNegative>(ratio);
    }
  }
  store(moment.codes, lane, codes);
  if (threadIdx.x % kLanes == 0) moment.scales[block] = scale;
}

template <bool kHasNegative>
__device__ void encode(const Moment& moment, int64_t block, const Lane& lane,
                       float (&values)[kEach]) {
  switch (moment.codec) {
    case Codec::none:
      store(moment.codes, lane, values);
      break;
    case Codec::fp16: {
      uint16_t codes[kEach];
#pragma unroll
      for (int k = 0; k < kEach; ++k) codes[k] = __half_as_ushort(__float2half_rn(values[k]));
      store(moment.codes, lane, codes);
      break;
    }
    case Codec::bf16: {
      uint16_t codes[kEach];
#pragma unroll
      for (int k = 0; k < kEach; ++k) codes[k] = narrow(values[k]);
      store(moment.codes, lane, codes);
      break;
    }
    default:
      encode_block<kHasNegative>(moment, block, lane, values);
  }
}

// ---- masters: see packed_kernels.cpp ----

__device__ float joined(uint16_t param, uint16_t remainder, uint32_t above) {
  const uint32_t upper = static_cast<uint32_t>(param) << 16;
  const uint32_t whole = upper + static_cast<uint32_t>(static_cast<int16_t>(remainder)) + above;
  return __uint_as_float(((whole ^ upper) & kSign) != 0 ? upper : whole);
}

// ---- coded parameters: see codec/master.cpp ----

__device__ float remainder_unit(const Moment& weight, int64_t block) {
  return fabsf(weight.scales[block]) *
         (weight.codec == Codec::int8 ? codec::kEvenUnit : codec::kDynamicUnit);
}

__device__ void join_coded(const PackedAdamWJob& job, int64_t block, const Lane& lane,
                           float (&values)[kEach]) {
  int8_t remainders[kEach];
  load(job.weight_remainder, lane, remainders);
  decode<true>(job.weight, block, lane, values);
  if (job.weight.codec == Codec::bf16) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      values[k] =
          __uint_as_float(__float_as_uint(values[k]) + static_cast<uint32_t>(remainders[k] * 256));
    }
    return;
  }
  const float unit = remainder_unit(job.weight, block);
#pragma unroll
  for (int k = 0; k < kEach; ++k) values[k] = values[k] + static_cast<float>(remainders[k]) * unit;
}

__device__ void split_coded(const PackedAdamWJob& job, int64_t block, const Lane& lane,
                            float (&values)[kEach]) {
  encode<true>(job.weight, block, lane, values);
  __syncwarp();  // the scale is one lane's
  float coded[kEach];
  decode<true>(job.weight, block, lane, coded);
  int8_t remainders[kEach];
  if (job.weight.codec == Codec::bf16) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const auto beyond =
          static_cast<int32_t>(__float_as_uint(values[k]) - __float_as_uint(coded[k]));
      const int32_t units = (beyond + 128) >> 8;
      remainders[k] = static_cast<int8_t>(units > 127 ? 127 : units < -127 ? -127 : units);
    }
  } else {
    const float unit = remainder_unit(job.weight, block);
    const bool even = job.weight.codec == Codec::int8;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      float units = unit > 0 ? __fdiv_rn(values[k] - coded[k], unit) : 0;
      if (!even) units = units + copysignf(codec::kCutOff, units);
      units = units > 127.f ? 127.f : units < -127.f ? -127.f : units;
      remainders[k] = static_cast<int8_t>(even ? __float2int_rn(units) : __float2int_rz(units));
    }
  }
  store(job.weight_remainder, lane, remainders);
}

// P is float, or uint16_t for bfloat16; G likewise. kCoded: the parameter is float in two parts.
template <class P, class G, bool kCoded>
__global__ void __launch_bounds__(kWarps* kLanes) packed_adamw_kernel(PackedAdamWJob job) {
  constexpr bool kHasMaster = sizeof(P) == 2;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (block * codec::kBlock >= job.elements) return;  // a whole warp
  const int64_t begin = block * codec::kBlock + threadIdx.x % kLanes * kEach;
  const int64_t end = begin + kEach < job.elements ? begin + kEach : job.elements;
  const Lane lane{begin, end, job.vector && end - begin == kEach};

  P params[kEach];
  G grads[kEach];
  uint16_t remainders[kEach];
  float means[kEach], squares[kEach];
  if constexpr (kCoded) {
    join_coded(job, block, lane, params);
  } else {
    load(job.param, lane, params);
  }
  load(job.grad, lane, grads);
  if constexpr (kHasMaster) load(job.remainder, lane, remainders);
  decode<true>(job.exp_avg, block, lane, means);
  decode<false>(job.exp_avg_sq, block, lane, squares);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float grad = load_float(grads[k]);
    float weight = load_float(params[k]), square = squares[k];
    if constexpr (kHasMaster) {
      const uint32_t bits = __float_as_uint(square);
      weight = joined(params[k], remainders[k], job.marks ? (bits & kSign) >> 15 : 0);
      if (job.marks) square = __uint_as_float(bits & ~kSign);
    }
    const float mean = means[k] * job.beta1 + job.rest1 * grad;
    square = square * job.beta2 + job.rest2 * grad * grad;
    const float updated =
        weight * job.decay -
        __fdiv_rn(job.step_size * mean, __fsqrt_rn(square) * job.root_scale + job.eps);
    means[k] = mean;
    if constexpr (kHasMaster) {
      const uint32_t bits = __float_as_uint(updated);
      const bool tie = (bits & 0x1ffff) == 0x8000;
      params[k] = narrow(updated);
      remainders[k] = static_cast<uint16_t>(bits - (tie && !job.marks ? 1 : 0));
      if (job.marks) {
        square = __uint_as_float(__float_as_uint(square) | (tie ? kSign : 0));
      }
    } else {
      params[k] = updated;
    }
    squares[k] = square;
  }
  if constexpr (kCoded) {
    split_coded(job, block, lane, params);
  } else {
    store(job.param, lane, params);
  }
  if constexpr (kHasMaster) store(job.remainder, lane, remainders);
  encode<true>(job.exp_avg, block, lane, means);
  encode<false>(job.exp_avg_sq, block, lane, squares);
}

bool is_8_bits(Codec codec) { return codec == Codec::int8 || codec == Codec::quantization; }

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The scales follow the codes, which are padded to 4 bytes.
Moment moment_at(Codec codec, std::byte* codes, int64_t elements) {
  std::byte* scales = codes + (static_cast<size_t>(elements) + 3) / 4 * 4;
  return {codec, codes, is_8_bits(codec) ? reinterpret_cast<float*>(scales) : nullptr};
}

unsigned grid_for(int64_t elements) {
  const int64_t blocks = (elements + codec::kBlock - 1) / codec::kBlock;
  return static_cast<unsigned>((blocks + kWarps - 1) / kWarps);
}

// What a model computes with, as T: float, or uint16_t for bfloat16.
template <class T>
__global__ void __launch_bounds__(kWarps* kLanes)
    decode_kernel(Moment weight, int64_t elements, bool vector, T* values) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (block * codec::kBlock >= elements) return;
  const int64_t begin = block * codec::kBlock + threadIdx.x % kLanes * kEach;
  const int64_t end = begin + kEach < elements ? begin + kEach : elements;
  const Lane lane{begin, end, vector && end - begin == kEach};
  float decoded[kEach];
  decode<true>(weight, block, lane, decoded);
  T stored[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if constexpr (sizeof(T) == 2) {
      stored[k] = narrow(decoded[k]);
    } else {
      stored[k] = decoded[k];
    }
  }
  store(values, lane, stored);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw Error(std::string("[") + what + "] CUDA: " + cudaGetErrorString(error));
}

template <class P, class G, bool kCoded = false>
void launch(const PackedAdamWJob& job, cudaStream_t stream) {
  packed_adamw_kernel<P, G, kCoded><<<grid_for(job.elements), kWarps * kLanes, 0, stream>>>(job);
}

}  // namespace

void launch_packed_adamw(const PackedFormat& format, const PackedSlice& slice,
                         const AdamWFactors& factors, void* stream) {
  if (slice.elements == 0) return;
  const PackedLayout layout = packed_layout(format, slice.elements);
  const bool has_master = format.param == DType::bfloat16;
  const bool coded = format.weight != Codec::none;
  PackedAdamWJob job{};
  job.param = slice.param;
  job.grad = slice.grad;
  job.remainder =
      has_master ? reinterpret_cast<uint16_t*>(slice.state + layout.remainder) : nullptr;
  job.exp_avg = moment_at(format.exp_avg, slice.state + layout.exp_avg, slice.elements);
  job.exp_avg_sq = moment_at(format.exp_avg_sq, slice.state + layout.exp_avg_sq, slice.elements);
  job.elements = slice.elements;
  job.marks = has_master && !is_8_bits(format.exp_avg_sq);
  job.weight = {format.weight, slice.weight.codes, slice.weight.scales};
  job.weight_remainder = slice.weight.remainder;
  const void* param = coded ? slice.weight.codes : slice.param;
  job.vector = is_aligned(param) && is_aligned(slice.grad) && is_aligned(slice.state) &&
               is_aligned(slice.weight.remainder);
  job.decay = static_cast<float>(factors.decay);
  job.beta1 = static_cast<float>(factors.beta1);
  job.rest1 = static_cast<float>(1 - factors.beta1);
  job.beta2 = static_cast<float>(factors.beta2);
  job.rest2 = static_cast<float>(1 - factors.beta2);
  job.eps = static_cast<float>(factors.eps);
  job.step_size = static_cast<float>(factors.step_size);
  job.root_scale = static_cast<float>(factors.root_scale);

  const auto queue = static_cast<cudaStream_t>(stream);
  const bool float_grad = format.grad == DType::float32;
  const bool half_grad = format.grad == DType::bfloat16;
  if (coded && float_grad) {
    launch<float, float, true>(job, queue);
  } else if (coded && half_grad) {
    launch<float, uint16_t, true>(job, queue);
  } else if (format.param == DType::float32 && half_grad) {
    launch<float, uint16_t>(job, queue);
  } else if (format.param == DType::float32 && float_grad) {
    launch<float, float>(job, queue);
  } else if (has_master && float_grad) {
    launch<uint16_t, float>(job, queue);
  } else if (has_master && half_grad) {
    launch<uint16_t, uint16_t>(job, queue);
  } else {
    check(false, "packed AdamW is for float32 and bfloat16");
  }
  check_launch("AdamW");
}

void launch_decode(const codec::CodedArray& array, int64_t elements, DType dtype, void* values,
                   void* stream) {
  if (elements == 0) return;
  const Moment weight{array.codec, array.codes, array.scales};
  const bool vector = is_aligned(array.codes) && is_aligned(values);
  const auto queue = static_cast<cudaStream_t>(stream);
  const dim3 grid(grid_for(elements)), threads(kWarps * kLanes);
  if (dtype == DType::bfloat16) {
    decode_kernel<<<grid, threads, 0, queue>>>(weight, elements, vector,
                                               static_cast<uint16_t*>(values));
  } else {
    check(dtype == DType::float32, "parameters are decoded to float32 and bfloat16");
    decode_kernel<<<grid, threads, 0, queue>>>(weight, elements, vector,
                                               static_cast<float*>(values));
  }
  check_launch("decode");
}

}  // namespace lockstep::optim::cuda
