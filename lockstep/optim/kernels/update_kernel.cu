// SPDX-License-Identifier: Apache-2.0
// The arithmetic of kernels.cpp, operation by operation; built without fused multiply-add, so that
// the bits are the CPU's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
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

__device__ double load(double stored) { return stored; }
__device__ float load(float stored) { return stored; }
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

// N elements a thread. Of an element with a master, the parameter wins where it is not its rounded
// master: someone else has written it.
template <int N, class P, class G, class Rule>
__global__ void update_kernel(Operands operands, Rule rule, int64_t count) {
  using V = Value<P>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  auto* params = reinterpret_cast<Pack<P, N>*>(static_cast<P*>(operands.param) + i);
  auto* means = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.first) + i);
  auto* squares = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.second) + i);
  const auto grad = *reinterpret_cast<const Pack<G, N>*>(static_cast<const G*>(operands.grad) + i);
  Pack<P, N> param = *params;
  Pack<V, N> mean = {}, square = {};
  if constexpr (Rule::kMoments > 0) mean = *means;
  if constexpr (Rule::kMoments > 1) square = *squares;
  if constexpr (kHasMaster<P>) {
    auto* masters = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.master) + i);
    Pack<V, N> master = *masters;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float weight =
          is_rounded(param.lane[k], master.lane[k]) ? master.lane[k] : load(param.lane[k]);
      master.lane[k] = rule(weight, load(grad.lane[k]), mean.lane[k], square.lane[k]);
      store(&param.lane[k], master.lane[k]);
    }
    *masters = master;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      param.lane[k] = rule(param.lane[k], load(grad.lane[k]), mean.lane[k], square.lane[k]);
    }
  }
  *params = param;
  if constexpr (Rule::kMoments > 0) *means = mean;
  if constexpr (Rule::kMoments > 1) *squares = square;
}

template <class P, class G, class Rule>
void launch(const Operands& operands, const Rule& rule, int64_t count, cudaStream_t stream) {
  constexpr int kPack = 4;
  constexpr int64_t kThreads = 256;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 32 == 0; };
  const bool packed = count % kPack == 0 && aligned(operands.param) && aligned(operands.grad) &&
                      aligned(operands.master) && aligned(operands.first) &&
                      aligned(operands.second);
  const int64_t threads = packed ? count / kPack : count;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  if (packed) {
    update_kernel<kPack, P, G><<<blocks, kThreads, 0, stream>>>(operands, rule, count);
  } else {
    update_kernel<1, P, G><<<blocks, kThreads, 0, stream>>>(operands, rule, count);
  }
}

template <class P, class Rule>
void launch_for(const Operands& operands, const Rule& rule, DType param, DType grad, int64_t count,
                cudaStream_t stream) {
  if constexpr (kHasMaster<P>) {
    if (grad != param) return launch<P, float>(operands, rule, count, stream);
  }
  launch<P, P>(operands, rule, count, stream);
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

void launch_adamw(const Operands& operands, const AdamWFactors& factors, DType param, DType grad,
                  int64_t count, void* stream) {
  for_dtype(param, [&]<class P>() {
    launch_for<P>(operands, optim::cuda::AdamWRule<Value<P>>(factors), param, grad, count,
                  static_cast<cudaStream_t>(stream));
  });
  check_launch("AdamW");
}

void launch_sgd(const Operands& operands, SgdKind kind, const SgdFactors& factors, DType param,
                DType grad, int64_t count, void* stream) {
  for_dtype(param, [&]<class P>() {
    optim::cuda::for_sgd<Value<P>>(kind, factors, [&](const auto& rule) {
      launch_for<P>(operands, rule, param, grad, count, static_cast<cudaStream_t>(stream));
    });
  });
  check_launch("SGD");
}

}  // namespace lockstep::optim::detail::cuda
