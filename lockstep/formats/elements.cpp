// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/float16.h"

namespace lockstep::formats {
namespace {

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// Two roundings are one if the first goes to the neighbour whose last bit is set: that it was not
// exact stays visible to the second, which has fewer bits by far.
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || std::isnan(value)) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  if ((bits & 1) == 0) {
    // The other neighbour: towards zero where rounding went away from it.
    const bool away = std::abs(static_cast<double>(nearest)) > std::abs(value);
    bits = away ? bits - 1 : bits + 1;
  }
  return std::bit_cast<float>(bits);
}

template <class From, class To>
To rounded(From value) {
  if constexpr (std::is_same_v<To, double>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_same_v<To, float>) {
    return static_cast<float>(value);
  } else if constexpr (std::is_same_v<From, double>) {
    return narrow<To>(round_to_odd(value));
  } else {
    return narrow<To>(value);
  }
}

double as_number(double value) { return value; }
double as_number(float value) { return static_cast<double>(value); }
double as_number(Half value) { return static_cast<double>(widen(value)); }
double as_number(BFloat16 value) { return static_cast<double>(widen(value)); }

template <class From, class To>
int64_t convert_all(std::span<const std::byte> from, std::span<std::byte> to) {
  // What 16 bits hold, a float holds.
  using Wide = std::conditional_t<std::is_same_v<From, double>, double, float>;
  int64_t overflowed = 0;
  for (size_t i = 0; i < from.size() / sizeof(From); ++i) {
    const From stored = load<From>(from.data() + i * sizeof(From));
    Wide value = 0;
    if constexpr (std::is_same_v<From, Wide>) {
      value = stored;
    } else {
      value = widen(stored);
    }
    const To result = rounded<Wide, To>(value);
    overflowed += std::isfinite(value) && std::isinf(as_number(result)) ? 1 : 0;
    std::memcpy(to.data() + i * sizeof(To), &result, sizeof(To));
  }
  return overflowed;
}

// Calls the function with a value of the floating type.
template <class Function>
int64_t with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::float64:
      return function(double{});
    case DType::float32:
      return function(float{});
    case DType::float16:
      return function(Half{});
    case DType::bfloat16:
      return function(BFloat16{});
    default:
      throw std::logic_error("lockstep bug: only floating types are converted");
  }
}

template <class T>
void decode_all(std::span<const std::byte> bytes, std::span<double> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const T value = load<T>(bytes.data() + i * sizeof(T));
    if constexpr (std::is_integral_v<T>) {
      out[i] = static_cast<double>(value);
    } else {
      out[i] = as_number(value);
    }
  }
}

template <class T>
void transpose_all(const Matrix& matrix, const layout::Range& columns, std::byte* out) {
  // Blocks small enough for the cache: one side of a transposition always jumps.
  constexpr int64_t kBlock = 32;
  for (int64_t row = 0; row < matrix.rows; row += kBlock) {
    const int64_t row_end = std::min(row + kBlock, matrix.rows);
    for (int64_t begin = columns.begin; begin < columns.end; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, columns.end);
      for (int64_t c = begin; c < end; ++c) {
        for (int64_t r = row; r < row_end; ++r) {
          const auto from = static_cast<size_t>(r * matrix.columns + c);
          const auto to = static_cast<size_t>((c - columns.begin) * matrix.rows + r);
          std::memcpy(out + to * sizeof(T), matrix.bytes.data() + from * sizeof(T), sizeof(T));
        }
      }
    }
  }
}

}  // namespace

void decode(DType dtype, std::span<const std::byte> bytes, std::span<double> out) {
  check(bytes.size() == out.size() * size_of(dtype), "decode: as many numbers as elements");
  switch (dtype) {
    case DType::float64:
      return decode_all<double>(bytes, out);
    case DType::float32:
      return decode_all<float>(bytes, out);
    case DType::float16:
      return decode_all<Half>(bytes, out);
    case DType::bfloat16:
      return decode_all<BFloat16>(bytes, out);
    case DType::int64:
      return decode_all<int64_t>(bytes, out);
    case DType::int32:
      return decode_all<int32_t>(bytes, out);
    case DType::int8:
      return decode_all<int8_t>(bytes, out);
    case DType::uint8:
    case DType::boolean:
      return decode_all<uint8_t>(bytes, out);
  }
}

int64_t convert(DType from_type, std::span<const std::byte> from, DType to_type,
                std::span<std::byte> to) {
  check(from.size() / size_of(from_type) == to.size() / size_of(to_type),
        "convert: as many elements on both sides");
  if (from_type == to_type) {
    std::copy(from.begin(), from.end(), to.begin());
    return 0;
  }
  return with_type(from_type, [&](auto source) {
    return with_type(to_type, [&](auto target) {
      return convert_all<decltype(source), decltype(target)>(from, to);
    });
  });
}

void transpose(const Matrix& matrix, const layout::Range& columns, std::span<std::byte> out) {
  check(out.size() == static_cast<size_t>(matrix.rows * columns.size()) * matrix.width,
        "transpose: room for the columns");
  switch (matrix.width) {
    case 1:
      return transpose_all<uint8_t>(matrix, columns, out.data());
    case 2:
      return transpose_all<uint16_t>(matrix, columns, out.data());
    case 4:
      return transpose_all<uint32_t>(matrix, columns, out.data());
    default:
      return transpose_all<uint64_t>(matrix, columns, out.data());
  }
}

void transpose_in_pieces(const Matrix& matrix, int64_t max_numel,
                         const std::function<void(std::span<const std::byte>)>& function) {
  const int64_t step = std::max<int64_t>(1, max_numel / std::max<int64_t>(1, matrix.rows));
  std::vector<std::byte> piece;
  for (int64_t begin = 0; begin < matrix.columns; begin += step) {
    const layout::Range columns{begin, std::min(begin + step, matrix.columns)};
    piece.resize(static_cast<size_t>(matrix.rows * columns.size()) * matrix.width);
    transpose(matrix, columns, piece);
    function(piece);
  }
}

}  // namespace lockstep::formats
