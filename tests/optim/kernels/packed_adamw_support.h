// SPDX-License-Identifier: Apache-2.0
// Slices of packed state to compare.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "lockstep/core/float16.h"
#include "lockstep/optim/kernels/packed_update.h"

namespace lockstep::optim::detail {

inline constexpr codec::Codec kPackedCodecs[] = {codec::Codec::none, codec::Codec::fp16,
                                                 codec::Codec::bf16, codec::Codec::int8,
                                                 codec::Codec::quantization};

inline AdamWFactors factors_of_step(int step) {
  const double lr = 1e-2, beta1 = 0.9, beta2 = 0.999;
  return {.decay = 1 - lr * 0.1,
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = 1e-8,
          .step_size = lr / (1 - std::pow(beta1, step)),
          .root_scale = 1 / std::sqrt(1 - std::pow(beta2, step))};
}

// Of AdamW, or of SGD, by what the state is.
inline PackedFactors factors_for(const PackedFormat& format, int step,
                                 SgdKind kind = SgdKind::momentum) {
  if (format.moments == 2) return factors_of_step(step);
  return SgdUpdate{.kind = format.moments == 0 ? SgdKind::plain : kind,
                   .factors = {.lr = 1e-2,
                               .weight_decay = 0.1,
                               .keep = step == 1 ? 0 : 0.9,
                               .add = step == 1 ? 1 : 0.7,
                               .momentum = 0.9}};
}

// Elements of a dtype in memory of their own, aligned as torch's are.
class Array {
 public:
  Array(DType dtype, const std::vector<float>& values)
      : dtype_(dtype), words_(2 * values.size() + 16) {
    for (size_t i = 0; i < values.size(); ++i) {
      visit([&]<class T>(T* array) {
        if constexpr (sizeof(T) == 2) {
          array[i] = narrow<T>(values[i]);
        } else {
          array[i] = values[i];
        }
      });
    }
  }
  void* data() { return words_.data() + offset(); }
  const void* data() const { return words_.data() + offset(); }
  std::vector<float> values(size_t count) const {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      visit([&]<class T>(const T* array) {
        if constexpr (sizeof(T) == 2) {
          values[i] = widen(array[i]);
        } else {
          values[i] = static_cast<float>(array[i]);
        }
      });
    }
    return values;
  }

 private:
  size_t offset() const { return (64 - reinterpret_cast<uintptr_t>(words_.data()) % 64) % 64 / 4; }
  template <class Body>
  void visit(const Body& body) const {
    void* const array = const_cast<void*>(data());
    if (dtype_ == DType::float64) body(static_cast<double*>(array));
    if (dtype_ == DType::float32) body(static_cast<float*>(array));
    if (dtype_ == DType::float16) body(static_cast<Half*>(array));
    if (dtype_ == DType::bfloat16) body(static_cast<BFloat16*>(array));
  }

  DType dtype_;
  std::vector<float> words_;
};

// Gradients of many sizes, some zero.
inline std::vector<float> random_values(size_t count, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::exp(2 * normal(random)) * normal(random);
    if (random() % 50 == 0) value = 0;
  }
  return values;
}

inline std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

}  // namespace lockstep::optim::detail
