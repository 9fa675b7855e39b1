// SPDX-License-Identifier: Apache-2.0
// The arithmetic of kernels.cpp, operation by operation; built without fused multiply-add, so that
// the bits are the CPU's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/optim/kernels/cuda_rules.h"
#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim::detail::cuda {

namespace {

template <class T>
using Value = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr bool kHasMaster = sizeof(T) == 2;

__device__ float load(__half stored) { return __half2float(stored); }
__device__ float load(__nv_bfloat16 stored) { return __bfloat162float(stored); }
__device__ void store(__half* to, float value) { *to = __float2half_rn(value); }
__device__ void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T lane[N];
};

// Whether a parameter is its rounded master; a NaN need not be.
__device__ bool is_rounded(__half param, float master) {
  return __half_as_ushort(param) == __half_as_ushort(__float2half_rn(master));
}
__device__ bool is_rounded(__nv_bfloat16 param, float master) {
  return __bfloat16_as_ushort(param) == __bfloat16_as_ushort(__float2bfloat16_rn(master));
}

// The bits of a pass that multiplies gradients in memory.
__device__ double scaled(double gradient, double factor) { return gradient * factor; }
__device__ float scaled(float gradient, float factor) { return gradient * factor; }
template <class T>
__device__ float scaled(T gradient, float factor) {
  T rounded;
  store(&rounded, load(gradient) * factor);
  return load(rounded);
}

// Moments as they are, and in bfloat16.
template <class V, int N>
__device__ Pack<V, N> load_moments(const Pack<V, N>* from) {
  return *from;
}
template <class V, int N>
__device__ Pack<V, N> load_moments(const Pack<uint16_t, N>* from) {
  const Pack<uint16_t, N> stored = *from;
  Pack<V, N> moments;
#pragma unroll
  for (int k = 0; k < N; ++k)
    moments.lane[k] = __uint_as_float(static_cast<uint32_t>(stored.lane[k]) << 16);
  return moments;
}

// Words of elements i ... i + N - 1: those of one block, where they are neighbours that fill it.
template <int N>
__device__ Lanes<uint32_t> words_of(const MomentDraws& draws, int64_t i) {
  static_assert(N == 1 || N == 4);
  Lanes<uint32_t> words;
  const auto first = static_cast<uint64_t>(draws.place(i));
  if (N == 4 && first % 4 == 0 && draws.place(i + 3) == draws.place(i) + 3)
    return random_words(draws.key, first / 4);
#pragma unroll
  for (int k = 0; k < N; ++k)
    words.lane[k] = random_word(draws.key, static_cast<uint64_t>(draws.place(i + k)));
  return words;
}

// What one kernel updates; 4 KB is the most that a kernel may be given.
template <class Part>
struct Parts {
  static constexpr unsigned kMost = std::is_same_v<Part, UpdatePart> ? 64 : 40;
  Part part[kMost];
  unsigned first_block[kMost];  // of each part
  unsigned count = 0;
};
static_assert(sizeof(Parts<UpdatePart>) < 4096 - 128);
static_assert(sizeof(Parts<RoundedUpdatePart>) < 4096 - 128);

// The last part that begins at this block or before.
template <class Part>
__device__ unsigned part_of(const Parts<Part>& parts, unsigned block) {
  unsigned begin = 0, end = parts.count;
  while (end - begin > 1) {
    const unsigned middle = (begin + end) / 2;
    (parts.first_block[middle] <= block ? begin : end) = middle;
  }
  return begin;
}

// N elements a thread. Of an element with a master, the parameter wins where it is not its rounded
// master: someone else has written it.
template <int N, class P, class G, class Part, class Rule>
__global__ void update_kernel(Parts<Part> parts, Rule rule) {
  constexpr bool kIsRounded = std::is_same_v<Part, RoundedUpdatePart>;
  using V = Value<P>;
  using Stored = std::conditional_t<kIsRounded, uint16_t, V>;  // a moment
  const unsigned which = part_of(parts, blockIdx.x);
  const Operands operands = parts.part[which].operands;
  const int64_t block = blockIdx.x - parts.first_block[which];
  const int64_t i = (block * blockDim.x + threadIdx.x) * N;
  if (i >= parts.part[which].count) return;
  auto* params = reinterpret_cast<Pack<P, N>*>(static_cast<P*>(operands.param) + i);
  auto* means = reinterpret_cast<Pack<Stored, N>*>(static_cast<Stored*>(operands.first) + i);
  auto* squares = reinterpret_cast<Pack<Stored, N>*>(static_cast<Stored*>(operands.second) + i);
  const auto grad = *reinterpret_cast<const Pack<G, N>*>(static_cast<const G*>(operands.grad) + i);
  Pack<P, N> param = *params;
  Pack<V, N> mean = {}, square = {};
  if constexpr (Rule::kMoments > 0) mean = load_moments<V, N>(means);
  if constexpr (Rule::kMoments > 1) square = load_moments<V, N>(squares);
  if constexpr (kHasMaster<P>) {
    auto* masters = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.master) + i);
    Pack<V, N> master = *masters;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float weight =
          is_rounded(param.lane[k], master.lane[k]) ? master.lane[k] : load(param.lane[k]);
      master.lane[k] =
          rule(weight, scaled(grad.lane[k], rule.grad_factor), mean.lane[k], square.lane[k]);
      store(&param.lane[k], master.lane[k]);
    }
    *masters = master;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      param.lane[k] =
          rule(param.lane[k], scaled(grad.lane[k], rule.grad_factor), mean.lane[k], square.lane[k]);
    }
  }
  *params = param;
  if constexpr (kIsRounded) {
    const Lanes<uint32_t> words = words_of<N>(parts.part[which].draws, i);
    Pack<Stored, N> rounded_mean, rounded_square;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      rounded_mean.lane[k] = stochastic_bfloat16(mean.lane[k], for_exp_avg(words.lane[k]));
      rounded_square.lane[k] = stochastic_bfloat16(square.lane[k], for_exp_avg_sq(words.lane[k]));
    }
    *means = rounded_mean;
    *squares = rounded_square;
  } else {
    if constexpr (Rule::kMoments > 0) *means = mean;
    if constexpr (Rule::kMoments > 1) *squares = square;
  }
}

constexpr int kPack = 4;
constexpr int64_t kThreads = 256;

bool is_packed(const UpdatePart& part) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 32 == 0; };
  const Operands& operands = part.operands;
  return part.count % kPack == 0 && aligned(operands.param) && aligned(operands.grad) &&
         aligned(operands.master) && aligned(operands.first) && aligned(operands.second);
}

// All parts that are packed, or all that are not.
template <int N, class P, class G, class Part, class Rule>
void launch(std::span<const Part> given, const Rule& rule, cudaStream_t stream) {
  Parts<Part> parts;
  int64_t blocks = 0;
  const auto flush = [&] {
    if (parts.count == 0) return;
    update_kernel<N, P, G><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(parts, rule);
    parts.count = 0;
    blocks = 0;
  };
  for (const Part& part : given) {
    if (part.count == 0 || is_packed(part) != (N > 1)) continue;
    const int64_t threads = part.count / N, more = (threads + kThreads - 1) / kThreads;
    if (parts.count == Parts<Part>::kMost || blocks + more > INT32_MAX) flush();
    parts.part[parts.count] = part;
    parts.first_block[parts.count++] = static_cast<unsigned>(blocks);
    blocks += more;
  }
  flush();
}

template <class P, class G, class Part, class Rule>
void launch_all(std::span<const Part> parts, const Rule& rule, cudaStream_t stream) {
  launch<kPack, P, G>(parts, rule, stream);
  launch<1, P, G>(parts, rule, stream);
}

template <class P, class Part, class Rule>
void launch_for(std::span<const Part> parts, const Rule& rule, DType param, DType grad,
                cudaStream_t stream) {
  if constexpr (kHasMaster<P>) {
    if (grad != param) return launch_all<P, float>(parts, rule, stream);
  }
  launch_all<P, P>(parts, rule, stream);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw Error(std::string("[") + what + "] CUDA: " + cudaGetErrorString(error));
}

// launch.template operator()<P>() for the type that `dtype` names.
template <class Launch>
void for_dtype(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::float64:
      return launch.template operator()<double>();
    case DType::float32:
      return launch.template operator()<float>();
    case DType::float16:
      return launch.template operator()<__half>();
    case DType::bfloat16:
      return launch.template operator()<__nv_bfloat16>();
    default:
      check(false, "updates are for floating dtypes");
  }
}

}  // namespace

void launch_adamw(std::span<const UpdatePart> parts, const AdamWFactors& factors, DType param,
                  DType grad, void* stream) {
  for_dtype(param, [&]<class P>() {
    launch_for<P>(parts, optim::cuda::AdamWRule<Value<P>>(factors), param, grad,
                  static_cast<cudaStream_t>(stream));
  });
  check_launch("AdamW");
}

void launch_adamw(std::span<const RoundedUpdatePart> parts, const AdamWFactors& factors,
                  DType param, DType grad, void* stream) {
  for_dtype(param, [&]<class P>() {
    if constexpr (std::is_same_v<P, double>) {
      check(false, "moments of float64 parameters are float64");
    } else {
      launch_for<P>(parts, optim::cuda::AdamWRule<float>(factors), param, grad,
                    static_cast<cudaStream_t>(stream));
    }
  });
  check_launch("AdamW");
}

void launch_sgd(std::span<const UpdatePart> parts, SgdKind kind, const SgdFactors& factors,
                DType param, DType grad, void* stream) {
  for_dtype(param, [&]<class P>() {
    optim::cuda::for_sgd<Value<P>>(kind, factors, [&](const auto& rule) {
      launch_for<P>(parts, rule, param, grad, static_cast<cudaStream_t>(stream));
    });
  });
  check_launch("SGD");
}

}  // namespace lockstep::optim::detail::cuda
