// SPDX-License-Identifier: Apache-2.0
// For nvcc: the arithmetic of the codecs on CUDA, operation by operation; built without fused
// multiply-add, so that the bits are the CPU's. A warp has one block of kBlock elements, a lane
// eight of them in a row: 16 bytes a load, and the largest magnitude by shuffles alone. Private:
// not installed.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "lockstep/codec/dynamic_map.h"
#include "lockstep/codec/master.h"
#include "lockstep/core/error.h"

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

// Elements of 16 bits.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ float widen(double stored) { return static_cast<float>(stored); }
__device__ float widen(float stored) { return stored; }
__device__ float widen(F16 stored) { return __half2float(__ushort_as_half(stored.bits)); }
__device__ float widen(Bf16 stored) {
  return __uint_as_float(static_cast<uint32_t>(stored.bits) << 16);
}

template <class T>
__device__ T narrow(float value);
template <>
__device__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ F16 narrow<F16>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
__device__ Bf16 narrow<Bf16>(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = value != value ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(rounded >> 16)};
}

template <class T>
__device__ void load_widened(const void* array, const Lane& lane, float (&values)[kEach]) {
  T stored[kEach];
  load(array, lane, stored);
#pragma unroll
  for (int k = 0; k < kEach; ++k) values[k] = widen(stored[k]);
}
template <class T>
__device__ void store_narrowed(void* array, const Lane& lane, const float (&values)[kEach]) {
  T stored[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) stored[k] = narrow<T>(values[k]);
  store(array, lane, stored);
}

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
    case Codec::fp16:
      load_widened<F16>(moment.codes, lane, values);
      break;
    case Codec::bf16:
      load_widened<Bf16>(moment.codes, lane, values);
      break;
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
    case Codec::fp16:
      store_narrowed<F16>(moment.codes, lane, values);
      break;
    case Codec::bf16:
      store_narrowed<Bf16>(moment.codes, lane, values);
      break;
    default:
      encode_block<kHasNegative>(moment, block, lane, values);
  }
}

// ---- coded parameters: see codec/master.cpp ----

struct CodedWeight {
  Moment codes;
  int8_t* remainder;
};

__device__ float remainder_unit(const Moment& weight, int64_t block) {
  return fabsf(weight.scales[block]) *
         (weight.codec == Codec::int8 ? codec::kEvenUnit : codec::kDynamicUnit);
}

__device__ void join_coded(const CodedWeight& coded, int64_t block, const Lane& lane,
                           float (&values)[kEach]) {
  int8_t remainders[kEach];
  load(coded.remainder, lane, remainders);
  decode<true>(coded.codes, block, lane, values);
  if (coded.codes.codec == Codec::bf16) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      values[k] =
          __uint_as_float(__float_as_uint(values[k]) + static_cast<uint32_t>(remainders[k] * 256));
    }
    return;
  }
  const float unit = remainder_unit(coded.codes, block);
#pragma unroll
  for (int k = 0; k < kEach; ++k) values[k] = values[k] + static_cast<float>(remainders[k]) * unit;
}

__device__ void split_coded(const CodedWeight& coded, int64_t block, const Lane& lane,
                            float (&values)[kEach]) {
  encode<true>(coded.codes, block, lane, values);
  __syncwarp();  // the scale is one lane's
  float decoded[kEach];
  decode<true>(coded.codes, block, lane, decoded);
  int8_t remainders[kEach];
  if (coded.codes.codec == Codec::bf16) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const auto beyond =
          static_cast<int32_t>(__float_as_uint(values[k]) - __float_as_uint(decoded[k]));
      const int32_t units = (beyond + 128) >> 8;
      remainders[k] = static_cast<int8_t>(units > 127 ? 127 : units < -127 ? -127 : units);
    }
  } else {
    const float unit = remainder_unit(coded.codes, block);
    const bool even = coded.codes.codec == Codec::int8;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      float units = unit > 0 ? __fdiv_rn(values[k] - decoded[k], unit) : 0;
      if (!even) units = units + copysignf(codec::kCutOff, units);
      units = units > 127.f ? 127.f : units < -127.f ? -127.f : units;
      remainders[k] = static_cast<int8_t>(even ? __float2int_rn(units) : __float2int_rz(units));
    }
  }
  store(coded.remainder, lane, remainders);
}

// ---- launches ----

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

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw Error(std::string("[") + what + "] CUDA: " + cudaGetErrorString(error));
}

}  // namespace
}  // namespace lockstep::optim::cuda
