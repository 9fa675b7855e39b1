// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/reduce_kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lockstep/core/float16.h"

#ifndef LOCKSTEP_ISA
#define LOCKSTEP_ISA baseline
#endif

namespace lockstep::fabric::LOCKSTEP_ISA {
namespace {

struct Bool {
  uint8_t value;
};

// How a stored element becomes a number to compute with, and back.
template <class T>
struct Element {
  using Value = T;
  static Value load(T stored) { return stored; }
  static T store(Value value) { return value; }
};
template <class T>
struct NarrowFloat {
  using Value = float;
  static float load(T stored) { return widen(stored); }
  static T store(float value) { return narrow<T>(value); }
};
template <>
struct Element<Half> : NarrowFloat<Half> {};
template <>
struct Element<BFloat16> : NarrowFloat<BFloat16> {};
template <>
struct Element<Bool> {
  using Value = uint8_t;
  static uint8_t load(Bool stored) { return stored.value != 0; }
  static Bool store(uint8_t value) { return {value}; }
};

// An average of whole numbers: a sum that cannot overflow, divided once, toward zero.
template <class T>
struct WideInteger {
  __extension__ using Widest = __int128;
  using Value = std::conditional_t<sizeof(T) == 8, Widest, int64_t>;
  static Value load(T stored) { return stored; }
  static T store(Value value) { return static_cast<T>(value); }
};
template <class T, bool kAverage>
using FormOf = std::conditional_t<kAverage && std::is_integral_v<T>, WideInteger<T>, Element<T>>;

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {  // wraps around, in unsigned arithmetic because signed
                                            // overflow is undefined
      using U = std::make_unsigned_t<V>;
      return static_cast<V>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};
struct Product {
  template <class V>
  static V apply(V a, V b) {
    if constexpr (std::is_integral_v<V>) {
      using U = std::conditional_t<sizeof(V) < 4, uint32_t, std::make_unsigned_t<V>>;
      return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};
// A NaN on either side is the result, as in torch.
struct Min {
  template <class V>
  static V apply(V a, V b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class V>
  static V apply(V a, V b) {
    return a > b || a != a ? a : b;
  }
};
struct Any {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};
struct All {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};

constexpr size_t kBlock = 512;  // elements held in the first-level cache while a tree is combined

template <class T, class E, class Op>
class Tree {
  using V = typename E::Value;

 public:
  // Combines inputs [first, last) of one block into `out`.
  static void combine(const std::byte* const* inputs, size_t first, size_t last, size_t offset,
                      size_t count, V* out) {
    const size_t width = last - first;
    if (width == 1) {
      const T* a = at(inputs[first], offset);
      for (size_t i = 0; i < count; ++i) out[i] = E::load(a[i]);
    } else if (width == 2) {
      const T *a = at(inputs[first], offset), *b = at(inputs[first + 1], offset);
      for (size_t i = 0; i < count; ++i) out[i] = Op::apply(E::load(a[i]), E::load(b[i]));
    } else {
      V right[kBlock];
      const size_t middle = first + std::bit_floor(width - 1);
      combine(inputs, first, middle, offset, count, out);
      combine(inputs, middle, last, offset, count, right);
      for (size_t i = 0; i < count; ++i) out[i] = Op::apply(out[i], right[i]);
    }
  }

 private:
  static const T* at(const std::byte* base, size_t offset) {
    return reinterpret_cast<const T*>(base) + offset;
  }
};

template <class T, class Op, bool kAverage>
void run(std::byte* const* outputs, size_t num_outputs, const std::byte* const* inputs,
         size_t num_inputs, size_t count) {
  using E = FormOf<T, kAverage>;
  using V = typename E::Value;
  const auto finish = [num_inputs](V value) {
    if constexpr (kAverage) value = static_cast<V>(value / static_cast<V>(num_inputs));
    return E::store(value);
  };
  if (num_inputs == 2 &&
      num_outputs <= 2) {  // one pass, no block buffer; an output may be an input, index by index
    const T *a = reinterpret_cast<const T*>(inputs[0]), *b = reinterpret_cast<const T*>(inputs[1]);
    T* out = reinterpret_cast<T*>(outputs[0]);
    T* second = reinterpret_cast<T*>(outputs[num_outputs - 1]);
    if (num_outputs == 1) {
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) out[i] = finish(Op::apply(E::load(a[i]), E::load(b[i])));
    } else {
#pragma GCC ivdep
      for (size_t i = 0; i < count; ++i) {
        const T value = finish(Op::apply(E::load(a[i]), E::load(b[i])));
        out[i] = value;
        second[i] = value;
      }
    }
    return;
  }
  for (size_t offset = 0; offset < count; offset += kBlock) {
    const size_t size = std::min(kBlock, count - offset);
    V values[kBlock];
    Tree<T, E, Op>::combine(inputs, 0, num_inputs, offset, size, values);
    T* first = reinterpret_cast<T*>(outputs[0]) + offset;
    for (size_t i = 0; i < size; ++i) first[i] = finish(values[i]);
    for (size_t k = 1; k < num_outputs; ++k)
      std::memcpy(reinterpret_cast<T*>(outputs[k]) + offset, first, size * sizeof(T));
  }
}

template <class T>
ReduceKernel find(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return run<T, Sum, false>;
    case ReduceOp::avg:
      return run<T, Sum, true>;
    case ReduceOp::product:
      return run<T, Product, false>;
    case ReduceOp::min:
      return run<T, Min, false>;
    case ReduceOp::max:
      return run<T, Max, false>;
  }
  return nullptr;
}

}  // namespace

ReduceKernel find_kernel(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float64:
      return find<double>(op);
    case DType::float32:
      return find<float>(op);
    case DType::float16:
      return find<Half>(op);
    case DType::bfloat16:
      return find<BFloat16>(op);
    case DType::int64:
      return find<int64_t>(op);
    case DType::int32:
      return find<int32_t>(op);
    case DType::int8:
      return find<int8_t>(op);
    case DType::uint8:
      return find<uint8_t>(op);
    case DType::boolean:
      switch (op) {
        case ReduceOp::sum:
        case ReduceOp::max:
          return run<Bool, Any, false>;
        case ReduceOp::product:
        case ReduceOp::min:
          return run<Bool, All, false>;
        case ReduceOp::avg:
          return nullptr;
      }
  }
  return nullptr;
}

}  // namespace lockstep::fabric::LOCKSTEP_ISA
