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

template <class V>
struct Factors {
  V decay, beta1, rest1, beta2, rest2, eps, step_size, root_scale;
};

template <class V>
__device__ V updated(V weight, V grad, V& mean, V& square, const Factors<V>& factors) {
  mean = mean * factors.beta1 + factors.rest1 * grad;
  square = square * factors.beta2 + factors.rest2 * grad * grad;
  return weight * factors.decay -
         factors.step_size * mean / (sqrt(square) * factors.root_scale + factors.eps);
}

template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T lane[N];
};

// N elements a thread. Of an element with a master, the parameter wins where it is not its rounded
// master: someone else has written it.
template <int N, class P, class G>
__global__ void adamw_kernel(Operands operands, Factors<Value<P>> factors, int64_t count) {
  using V = Value<P>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  auto* params = reinterpret_cast<Pack<P, N>*>(static_cast<P*>(operands.param) + i);
  auto* means = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.first) + i);
  auto* squares = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.second) + i);
  const auto grad = *reinterpret_cast<const Pack<G, N>*>(static_cast<const G*>(operands.grad) + i);
  Pack<P, N> param = *params;
  Pack<V, N> mean = *means, square = *squares;
  if constexpr (kHasMaster<P>) {
    auto* masters = reinterpret_cast<Pack<V, N>*>(static_cast<V*>(operands.master) + i);
    Pack<V, N> master = *masters;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      P rounded;
      store(&rounded, master.lane[k]);
      const float seen = load(param.lane[k]);
      const float weight = load(rounded) == seen ? master.lane[k] : seen;
      master.lane[k] =
          updated<V>(weight, load(grad.lane[k]), mean.lane[k], square.lane[k], factors);
      store(&param.lane[k], master.lane[k]);
    }
    *masters = master;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      param.lane[k] =
          updated<V>(param.lane[k], load(grad.lane[k]), mean.lane[k], square.lane[k], factors);
    }
  }
  *params = param;
  *means = mean;
  *squares = square;
}

template <class P, class G>
void launch(const Operands& operands, const AdamWFactors& wide, int64_t count,
            cudaStream_t stream) {
  using V = Value<P>;
  const Factors<V> factors{static_cast<V>(wide.decay),     static_cast<V>(wide.beta1),
                           static_cast<V>(1 - wide.beta1), static_cast<V>(wide.beta2),
                           static_cast<V>(1 - wide.beta2), static_cast<V>(wide.eps),
                           static_cast<V>(wide.step_size), static_cast<V>(wide.root_scale)};
  constexpr int kPack = 4;
  constexpr int64_t kThreads = 256;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 32 == 0; };
  const bool packed = count % kPack == 0 && aligned(operands.param) && aligned(operands.grad) &&
                      aligned(operands.master) && aligned(operands.first) &&
                      aligned(operands.second);
  const int64_t threads = packed ? count / kPack : count;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  if (packed) {
    adamw_kernel<kPack, P, G><<<blocks, kThreads, 0, stream>>>(operands, factors, count);
  } else {
    adamw_kernel<1, P, G><<<blocks, kThreads, 0, stream>>>(operands, factors, count);
  }
}

template <class P>
void launch_for(const Operands& operands, const AdamWFactors& factors, DType param, DType grad,
                int64_t count, cudaStream_t stream) {
  if constexpr (kHasMaster<P>) {
    if (grad != param) return launch<P, float>(operands, factors, count, stream);
  }
  launch<P, P>(operands, factors, count, stream);
}

}  // namespace

void launch_adamw(const Operands& operands, const AdamWFactors& factors, DType param, DType grad,
                  int64_t count, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (param) {
    case DType::float64:
      launch_for<double>(operands, factors, param, grad, count, queue);
      break;
    case DType::float32:
      launch_for<float>(operands, factors, param, grad, count, queue);
      break;
    case DType::float16:
      launch_for<__half>(operands, factors, param, grad, count, queue);
      break;
    case DType::bfloat16:
      launch_for<__nv_bfloat16>(operands, factors, param, grad, count, queue);
      break;
    default:
      check(false, "AdamW is for floating dtypes");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw Error(std::string("[AdamW] CUDA: ") + cudaGetErrorString(error));
}

}  // namespace lockstep::optim::detail::cuda
