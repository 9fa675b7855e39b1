// SPDX-License-Identifier: Apache-2.0
// cuBLASLt has matrices by columns: of the transposed result, the first operand is b.
#include "lockstep/nn/kernels/product_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::nn::cuda {
namespace {

constexpr size_t kWorkspace = 32 << 20;  // bytes that an algorithm may take
constexpr int64_t kSmallest = 16;        // of a matrix's sizes
constexpr size_t kMostTimed = 256;       // sizes on a device; models have tens
constexpr int kMostAlgorithms = 16, kRounds = 3;

// cuBLASLt does not take something of a product.
struct NotTaken {};

void require(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw NotTaken();
}

template <class T, cublasStatus_t (*destroy)(T)>
struct Destroy {
  using pointer = T;
  void operator()(T object) const { destroy(object); }
};
template <class T, cublasStatus_t (*destroy)(T)>
using Owned = std::unique_ptr<T, Destroy<T, destroy>>;
using Descriptor = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

std::optional<cudaDataType_t> type_of(at::ScalarType type) {
  const std::string_view name = c10::toString(type);  // older versions do not have all of them
  if (type == at::kBFloat16) return CUDA_R_16BF;
  if (type == at::kHalf) return CUDA_R_16F;
  if (name == "Float8_e4m3fn") return CUDA_R_8F_E4M3;
  if (name == "Float8_e5m2") return CUDA_R_8F_E5M2;
  return std::nullopt;
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

struct Operand {
  cudaDataType_t type;
  int64_t rows, columns, stride;  // of the matrix as it lies in memory, by rows
  bool turned;                    // it lies there transposed
};

std::optional<Operand> operand_of(const at::Tensor& tensor) {
  const auto type = type_of(tensor.scalar_type());
  if (!type || tensor.dim() != 2 || tensor.layout() != at::kStrided || !is_aligned(tensor))
    return {};
  const bool turned = tensor.stride(1) != 1;
  const int64_t rows = tensor.size(turned ? 1 : 0), columns = tensor.size(turned ? 0 : 1),
                stride = tensor.stride(turned ? 1 : 0);
  if (tensor.stride(turned ? 0 : 1) != 1 || stride < columns ||
      std::min(rows, columns) < kSmallest || stride * tensor.element_size() % 16 != 0)
    return {};
  return Operand{*type, rows, columns, stride, turned};
}

Layout layout_of(const Operand& operand) {
  cublasLtMatrixLayout_t made = nullptr;
  require(cublasLtMatrixLayoutCreate(&made, operand.type, operand.columns, operand.rows,
                                     operand.stride));
  return Layout(made);
}

// All that an algorithm depends on.
using Key = std::array<int64_t, 15>;

class Product {
 public:
  Product(const at::Tensor& a, const at::Tensor& b, Operand first, Operand second,
          const ProductOptions& options)
      : a_(a), b_(b), options_(options), first_(second), second_(first) {
    const Operand result{*type_of(options.type), a.size(0), b.size(1), b.size(1), false};
    a_layout_ = layout_of(first_);
    b_layout_ = layout_of(second_);
    out_layout_ = layout_of(result);
    cublasLtMatmulDesc_t made = nullptr;
    require(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    descriptor_.reset(made);
    set(CUBLASLT_MATMUL_DESC_TRANSA, first_.turned ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, second_.turned ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (options.bias.defined()) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(options.bias.data_ptr()));
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, *type_of(options.bias.scalar_type()));
    }
    if (options.a_scale.defined()) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
          static_cast<const void*>(options.b_scale.data_ptr()));
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
          static_cast<const void*>(options.a_scale.data_ptr()));
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(options.fast));
    }
  }

  Key key() const {
    return {a_.device().index(),
            first_.type,
            second_.type,
            static_cast<int>(options_.type),
            first_.rows,
            first_.columns,
            first_.stride,
            first_.turned,
            second_.rows,
            second_.columns,
            second_.stride,
            second_.turned,
            options_.bias.defined(),
            options_.added.defined(),
            options_.fast};
  }

  std::vector<cublasLtMatmulHeuristicResult_t> proposals(cublasLtHandle_t handle) const {
    cublasLtMatmulPreference_t made = nullptr;
    require(cublasLtMatmulPreferenceCreate(&made));
    const Preference preference(made);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      require(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
    // Parts of a sum are added in float32.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (const auto alignment :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(alignment, uint32_t{16});
    }
    std::vector<cublasLtMatmulHeuristicResult_t> found(kMostAlgorithms);
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, descriptor_.get(), a_layout_.get(), b_layout_.get(), out_layout_.get(),
        out_layout_.get(), made, kMostAlgorithms, found.data(), &count);
    found.resize(status == CUBLAS_STATUS_SUCCESS ? count : 0);
    std::erase_if(found, [](const auto& each) { return each.state != CUBLAS_STATUS_SUCCESS; });
    return found;
  }

  at::Tensor new_result() const {
    return at::empty({a_.size(0), b_.size(1)}, a_.options().dtype(options_.type));
  }

  bool compute(cublasLtHandle_t handle, const cublasLtMatmulHeuristicResult_t& chosen,
               const at::Tensor& out) {
    const float one = 1, added = options_.added.defined() ? 1 : 0;
    const auto bytes = static_cast<int64_t>(chosen.workspaceSize);
    if (bytes > 0 && !has_workspace(bytes)) return false;
    return cublasLtMatmul(handle, descriptor_.get(), &one, b_.data_ptr(), a_layout_.get(),
                          a_.data_ptr(), b_layout_.get(), &added,
                          options_.added.defined() ? options_.added.data_ptr() : out.data_ptr(),
                          out_layout_.get(), out.data_ptr(), out_layout_.get(), &chosen.algo,
                          bytes > 0 ? workspace_.data_ptr() : nullptr, chosen.workspaceSize,
                          c10::cuda::getCurrentCUDAStream()) == CUBLAS_STATUS_SUCCESS;
  }

  // About as many as a GPU does in a few milliseconds.
  int repeats() const {
    const double operations = 2.0 * a_.size(0) * a_.size(1) * b_.size(1);
    return static_cast<int>(std::clamp(1e12 / operations, 2.0, 20.0));
  }

 private:
  // Where there is no memory for it, the product is torch's.
  bool has_workspace(int64_t bytes) {
    if (workspace_.defined() && workspace_.numel() >= bytes) return true;
    try {
      workspace_ = at::empty({bytes}, a_.options().dtype(at::kByte));
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
    return true;
  }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    require(cublasLtMatmulDescSetAttribute(descriptor_.get(), attribute, &value, sizeof value));
  }

  const at::Tensor &a_, &b_;
  const ProductOptions& options_;
  Operand first_, second_;
  at::Tensor workspace_;
  Descriptor descriptor_;
  Layout a_layout_, b_layout_, out_layout_;
};

struct Events {
  cudaEvent_t first = nullptr, last = nullptr;
  Events() {
    C10_CUDA_CHECK(cudaEventCreate(&first));
    C10_CUDA_CHECK(cudaEventCreate(&last));
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    cudaEventDestroy(first);
    cudaEventDestroy(last);
  }
};

using Choice = std::optional<cublasLtMatmulHeuristicResult_t>;

// The fastest by the shortest of a few times each, taken in turn. cuBLAS's first proposal stays
// where another gains less than what such times vary by. What is added stays as it is.
Choice fastest(Product& product, cublasLtHandle_t handle) {
  constexpr float kGain = 0.98F;
  const auto proposals = product.proposals(handle);
  if (proposals.empty()) return {};
  const at::Tensor out = product.new_result();
  const Events events;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  std::vector<float> times(proposals.size(), std::numeric_limits<float>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < proposals.size(); ++i) {
      if (!product.compute(handle, proposals[i], out)) continue;
      C10_CUDA_CHECK(cudaEventRecord(events.first, stream));
      for (int j = product.repeats(); j > 0; --j) product.compute(handle, proposals[i], out);
      C10_CUDA_CHECK(cudaEventRecord(events.last, stream));
      C10_CUDA_CHECK(cudaEventSynchronize(events.last));
      float time = 0;
      C10_CUDA_CHECK(cudaEventElapsedTime(&time, events.first, events.last));
      times[i] = std::min(times[i], time);
    }
  }
  const size_t best = std::min_element(times.begin(), times.end()) - times.begin();
  if (times[best] == std::numeric_limits<float>::infinity()) return {};
  return proposals[times[best] < kGain * times[0] ? best : 0];
}

bool is_recording_a_graph() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Of one device.
class Choices {
 public:
  Choices() { require(cublasLtCreate(&handle_)); }

  std::optional<at::Tensor> compute(Product& product, const at::Tensor& into) {
    const Key key = product.key();
    std::optional<Choice> choice;
    bool may_time = false;
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = choices_.find(key); found != choices_.end()) choice = found->second;
      may_time = choices_.size() < kMostTimed;
    }
    if (!choice) {
      if (!may_time || is_recording_a_graph()) return {};
      // Not under the mutex: the operands may wait for a collective that another thread of this
      // process has not begun yet. Of two that time the same, the first counts.
      const Choice found = fastest(product, handle_);
      const std::lock_guard lock(mutex_);
      choice = choices_.emplace(key, found).first->second;
    }
    if (!*choice) return {};
    at::Tensor out = into.defined() ? into : product.new_result();
    if (!product.compute(handle_, **choice, out)) return {};
    if (into.defined()) into.unsafeGetTensorImpl()->bump_version();
    return out;
  }

 private:
  cublasLtHandle_t handle_ = nullptr;  // until the process ends
  std::mutex mutex_;
  std::map<Key, Choice> choices_;
};

Choices& choices_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, std::unique_ptr<Choices>> all;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = all.find(device); found != all.end()) return *found->second;
  }
  auto made = std::make_unique<Choices>();  // not under the mutex: it may wait for the device
  const std::lock_guard lock(mutex);
  return *all.emplace(device, std::move(made)).first->second;
}

// A vector of the result's type, or what has its sizes.
bool can_add(const at::Tensor& tensor, const at::Tensor& a, at::IntArrayRef sizes,
             at::ScalarType type) {
  return !tensor.defined() ||
         (tensor.scalar_type() == type && tensor.device() == a.device() &&
          tensor.sizes() == sizes && tensor.is_contiguous() && is_aligned(tensor));
}

}  // namespace

std::optional<at::Tensor> timed_product(const at::Tensor& a, const at::Tensor& b,
                                        const ProductOptions& options) {
  if (!a.is_cuda() || a.device() != b.device() || !type_of(options.type)) return {};
  const auto first = operand_of(a), second = operand_of(b);
  const bool in_8_bits = a.element_size() == 1 && b.element_size() == 1;
  if (!first || !second || a.size(1) != b.size(0) || in_8_bits != options.a_scale.defined() ||
      (!in_8_bits && first->type != second->type) ||
      b.size(1) * at::elementSize(options.type) % 16 != 0 ||
      !can_add(options.bias, a, {b.size(1)}, options.type) ||
      !can_add(options.added, a, {a.size(0), b.size(1)}, options.type) ||
      !can_add(options.into, a, {a.size(0), b.size(1)}, options.type))
    return {};
  const c10::cuda::CUDAGuard guard(a.device());
  try {
    Product product(a, b, *first, *second, options);
    return choices_of(a.device().index()).compute(product, options.into);
  } catch (const NotTaken&) {
    return {};
  }
}

}  // namespace lockstep::nn::cuda
