// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/elements.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace lockstep::formats {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

uint16_t narrowed(double value, DType to, DType from = DType::float64) {
  std::vector<std::byte> stored(size_of(from)), out(2);
  convert(DType::float64, std::as_bytes(std::span(&value, 1)), from, stored);
  convert(from, stored, to, out);
  uint16_t bits = 0;
  std::memcpy(&bits, out.data(), 2);
  return bits;
}

double widened(uint16_t bits, DType from) {
  std::vector<double> out(1);
  decode(from, std::as_bytes(std::span(&bits, 1)), out);
  return out[0];
}

// Between each two neighbours: the middle goes to the even one, the rest to the nearer.
TEST(Elements, RoundingIsToNearestEven) {
  for (const DType to : {DType::float16, DType::bfloat16}) {
    const int largest = to == DType::float16 ? 0x7bff : 0x7f7f;
    for (int bits = 0; bits < largest; bits += 7) {
      const auto low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
      const double a = widened(low, to), b = widened(high, to), middle = (a + b) / 2;
      EXPECT_EQ(narrowed(middle, to), bits % 2 == 0 ? low : high);
      // Closer to the middle than a float can say: two roundings must be one.
      EXPECT_EQ(narrowed(std::nextafter(middle, 0.0), to), low);
      EXPECT_EQ(narrowed(std::nextafter(middle, 1e300), to), high);
      EXPECT_EQ(narrowed(-middle, to), (bits % 2 == 0 ? low : high) | 0x8000);
      EXPECT_EQ(narrowed(a, to, DType::float32), low);
      EXPECT_EQ(narrowed(a, to), low);
    }
  }
}

TEST(Elements, OverflowIsCountedAndNanStays) {
  const std::vector<float> values{1e38F, -65520.0F, 65519.0F, INFINITY, NAN, -NAN};
  std::vector<std::byte> out(12);
  EXPECT_EQ(convert(DType::float32, bytes_of(values), DType::float16, out), 2);
  std::vector<double> numbers(6);
  decode(DType::float16, out, numbers);
  EXPECT_EQ(numbers[0], INFINITY);
  EXPECT_EQ(numbers[1], -INFINITY);
  EXPECT_EQ(numbers[2], 65504.0);
  EXPECT_EQ(numbers[3], INFINITY);
  EXPECT_TRUE(std::isnan(numbers[4]) && std::isnan(numbers[5]));
  const std::vector<double> large{1e300, 3.4e38, NAN};
  EXPECT_EQ(convert(DType::float64, bytes_of(large), DType::bfloat16, std::span(out).first(6)), 2);
  EXPECT_EQ(convert(DType::float64, bytes_of(large), DType::float32, out), 1);
}

TEST(Elements, EveryTypeIsDecoded) {
  const auto one = [](DType dtype, auto value) {
    std::vector<double> out(1);
    decode(dtype, std::as_bytes(std::span(&value, 1)), out);
    return out[0];
  };
  EXPECT_EQ(one(DType::float64, 0.1), 0.1);
  EXPECT_EQ(one(DType::float32, 0.5F), 0.5);
  EXPECT_EQ(one(DType::int64, int64_t{-7}), -7);
  EXPECT_EQ(one(DType::int32, int32_t{-7}), -7);
  EXPECT_EQ(one(DType::int8, int8_t{-7}), -7);
  EXPECT_EQ(one(DType::uint8, uint8_t{200}), 200);
  EXPECT_EQ(one(DType::boolean, uint8_t{1}), 1);
  EXPECT_EQ(one(DType::bfloat16, uint16_t{0xbf80}), -1);
  EXPECT_EQ(one(DType::float16, uint16_t{0xbc00}), -1);
}

template <class T>
void transposes() {
  const int64_t rows = 37, columns = 71;  // more than a block, and not a multiple of one
  std::vector<T> values;
  for (int64_t i = 0; i < rows * columns; ++i) values.push_back(static_cast<T>(i * 31));
  const Matrix matrix{bytes_of(values), rows, columns, sizeof(T)};
  for (const layout::Range wanted : {layout::Range{0, columns}, {5, 70}, {70, 71}, {3, 3}}) {
    std::vector<T> out(static_cast<size_t>(rows * wanted.size()));
    transpose(matrix, wanted, std::as_writable_bytes(std::span(out)));
    for (int64_t c = wanted.begin; c < wanted.end; ++c) {
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_EQ(out[static_cast<size_t>((c - wanted.begin) * rows + r)],
                  values[static_cast<size_t>(r * columns + c)]);
      }
    }
  }
}

TEST(Elements, PiecesAreOfWholeRows) {
  const std::vector<uint8_t> values{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};  // (2, 5)
  const Matrix matrix{bytes_of(values), 2, 5, 1};
  const auto pieces = [&](int64_t most) {
    std::vector<std::vector<int>> all;
    transpose_in_pieces(matrix, most, [&](std::span<const std::byte> piece) {
      all.emplace_back();
      for (const std::byte value : piece) all.back().push_back(static_cast<int>(value));
    });
    return all;
  };
  using Pieces = std::vector<std::vector<int>>;
  EXPECT_EQ(pieces(5), (Pieces{{0, 5, 1, 6}, {2, 7, 3, 8}, {4, 9}}));
  EXPECT_EQ(pieces(1), (Pieces{{0, 5}, {1, 6}, {2, 7}, {3, 8}, {4, 9}}));
  EXPECT_EQ(pieces(100), (Pieces{{0, 5, 1, 6, 2, 7, 3, 8, 4, 9}}));
}

TEST(Elements, ColumnsBecomeRows) {
  transposes<uint8_t>();
  transposes<uint16_t>();
  transposes<float>();
  transposes<double>();
}

}  // namespace
}  // namespace lockstep::formats
