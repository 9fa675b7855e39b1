// SPDX-License-Identifier: Apache-2.0
// AdamW on packed state against AdamW's own kernel, bit for bit where nothing is lost.
#include "lockstep/optim/kernels/packed_update.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "lockstep/optim/kernels/packed_kernels.h"
#include "tests/optim/kernels/packed_adamw_support.h"

namespace lockstep::optim::detail {
namespace {

using codec::Codec;

struct Packed {
  Packed(const PackedFormat& format, const std::vector<float>& weights)
      : format(format),
        count(weights.size()),
        param(format.param, weights),
        state(packed_layout(format, static_cast<int64_t>(count)).total) {
    pack(format, slice(), {});
  }
  PackedSlice slice(const void* grad = nullptr) {
    return {param.data(), grad, state.data(), static_cast<int64_t>(count)};
  }
  void step(const Array& grad, int step) {
    packed_update(format, slice(grad.data()), factors_of_step(step));
  }
  struct Unpacked {
    std::vector<float> exp_avg, exp_avg_sq, master;
  };
  Unpacked unpacked() {
    Unpacked state{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count)};
    unpack(format, slice(), {state.exp_avg.data(), state.exp_avg_sq.data(), state.master.data()});
    return state;
  }

  PackedFormat format;
  size_t count;
  Array param;
  std::vector<std::byte> state;
};

struct Plain {
  Plain(DType param, DType grad, const std::vector<float>& weights)
      : kernel(kernels().adamw(param, grad)),
        param(param, weights),
        master(this->param.values(weights.size())),
        exp_avg(weights.size()),
        exp_avg_sq(weights.size()) {}
  void step(const Array& grad, int step) {
    kernel({param.data(), grad.data(), master.data(), exp_avg.data(), exp_avg_sq.data()},
           factors_of_step(step), 0, static_cast<int64_t>(master.size()));
  }

  AdamWKernel kernel;
  Array param;
  std::vector<float> master, exp_avg, exp_avg_sq;
};

struct Types {
  DType param, grad;
};
constexpr Types kTypes[] = {{DType::float32, DType::float32},
                            {DType::bfloat16, DType::bfloat16},
                            {DType::bfloat16, DType::float32}};

std::vector<float> weights_of(size_t count) {
  auto weights = random_values(count, 3);
  for (float& weight : weights) weight *= 0.1f;
  return weights;
}

TEST(PackedAdamW, HasTheBitsOfTheKernel) {
  for (const auto [param, grad] : kTypes) {
    for (const size_t count : {size_t{1}, size_t{255}, size_t{2049}, size_t{20011}}) {
      const auto weights = weights_of(count);
      Packed packed({param, grad}, weights);
      Plain plain(param, grad, weights);
      for (int step = 1; step <= 50; ++step) {
        const Array grads(grad, random_values(count, step));
        packed.step(grads, step);
        plain.step(grads, step);
      }
      const auto state = packed.unpacked();
      ASSERT_EQ(bits_of(packed.param.values(count)), bits_of(plain.param.values(count)));
      ASSERT_EQ(bits_of(state.exp_avg), bits_of(plain.exp_avg));
      ASSERT_EQ(bits_of(state.exp_avg_sq), bits_of(plain.exp_avg_sq));
      if (param == DType::float32) continue;
      ASSERT_EQ(bits_of(state.master), bits_of(plain.master));
    }
  }
}

// Infinities and NaN go where they go in the plain kernel, and nowhere else.
TEST(PackedAdamW, WhatIsNotFiniteAsInTheKernel) {
  for (const auto [param, grad] : kTypes) {
    const size_t count = 777;
    const auto weights = weights_of(count);
    Packed packed({param, grad}, weights);
    Plain plain(param, grad, weights);
    for (int step = 1; step <= 3; ++step) {
      auto values = random_values(count, step);
      values[5] = std::numeric_limits<float>::infinity();
      values[300] = -std::numeric_limits<float>::infinity();
      values[776] = std::numeric_limits<float>::quiet_NaN();
      const Array grads(grad, values);
      packed.step(grads, step);
      plain.step(grads, step);
    }
    const auto state = packed.unpacked();
    const auto expect_same = [](const std::vector<float>& ours, const std::vector<float>& theirs) {
      for (size_t i = 0; i < ours.size(); ++i) {
        ASSERT_TRUE(std::isnan(ours[i]) ? std::isnan(theirs[i]) : ours[i] == theirs[i]) << i;
      }
    };
    expect_same(packed.param.values(count), plain.param.values(count));
    expect_same(state.exp_avg, plain.exp_avg);
    expect_same(state.exp_avg_sq, plain.exp_avg_sq);
    if (param == DType::bfloat16) expect_same(state.master, plain.master);
  }
}

// Every low half below many upper ones: even and odd, of either sign, zero, denormal, the largest.
std::vector<float> masters() {
  std::vector<float> masters;
  for (const uint32_t upper : {0x0000u, 0x0001u, 0x0002u, 0x007fu, 0x0080u, 0x3f80u, 0x3f81u,
                               0x3fffu, 0x4000u, 0x7f7eu, 0x7f7fu}) {
    for (const uint32_t sign : {0u, 0x8000u}) {
      for (uint32_t low = 0; low < 0x10000; ++low) {
        masters.push_back(std::bit_cast<float>((upper | sign) << 16 | low));
      }
    }
  }
  return masters;
}

TEST(PackedAdamW, MastersAreKeptExactly) {
  const auto all = masters();
  const auto squares = random_values(all.size(), 4);
  for (const Codec codec : kPackedCodecs) {
    Packed packed({.param = DType::bfloat16, .exp_avg_sq = codec}, std::vector<float>(all.size()));
    std::vector<float> positive(squares);
    for (float& square : positive) square *= square;
    pack(packed.format, packed.slice(), {nullptr, positive.data(), const_cast<float*>(all.data())});
    const auto state = packed.unpacked();
    const bool marks = codec != Codec::int8 && codec != Codec::quantization;
    const auto params = packed.param.values(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(all[i]);
      ASSERT_EQ(std::bit_cast<uint32_t>(params[i]) >> 16, narrow<BFloat16>(all[i]).bits);
      // Without a mark one tie becomes the value before it.
      const bool lost = !marks && (bits & 0x1ffff) == 0x8000;
      ASSERT_EQ(std::bit_cast<uint32_t>(state.master[i]), bits - (lost ? 1 : 0))
          << std::hex << bits;
      ASSERT_FALSE(std::signbit(state.exp_avg_sq[i]));
    }
    // The marks are not part of the squares.
    Packed unmarked({.param = DType::float32, .exp_avg_sq = codec}, std::vector<float>(all.size()));
    pack(unmarked.format, unmarked.slice(), {nullptr, positive.data(), nullptr});
    EXPECT_EQ(unmarked.unpacked().exp_avg_sq, state.exp_avg_sq);
  }
}

// A step that changes nothing (no gradient, no decay) leaves every master as it is.
TEST(PackedAdamW, MastersSurviveAStep) {
  const auto all = masters();
  const Array zeros(DType::bfloat16, std::vector<float>(all.size()));
  for (const Codec codec : {Codec::none, Codec::fp16, Codec::bf16}) {
    Packed packed({.param = DType::bfloat16, .grad = DType::bfloat16, .exp_avg_sq = codec},
                  std::vector<float>(all.size()));
    pack(packed.format, packed.slice(), {nullptr, nullptr, const_cast<float*>(all.data())});
    AdamWFactors factors = factors_of_step(1);
    factors.decay = 1;
    for (int i = 0; i < 2; ++i) packed_update(packed.format, packed.slice(zeros.data()), factors);
    EXPECT_EQ(bits_of(packed.unpacked().master), bits_of(all));
  }
}

// Someone else may write the parameter: the master is then within half a unit of it.
TEST(PackedAdamW, AWrittenParameterWins) {
  const auto all = masters();
  Packed packed({.param = DType::bfloat16}, std::vector<float>(all.size()));
  for (const uint32_t written : {0x0000u, 0x8000u, 0x0001u, 0x3f80u, 0x3f81u, 0xc000u, 0x7f7fu}) {
    pack(packed.format, packed.slice(), {nullptr, nullptr, const_cast<float*>(all.data())});
    auto* params = static_cast<BFloat16*>(packed.param.data());
    for (size_t i = 0; i < all.size(); ++i) params[i].bits = static_cast<uint16_t>(written);
    for (const float master : packed.unpacked().master) {
      const auto bits = std::bit_cast<uint32_t>(master);
      ASSERT_LE(std::abs(static_cast<int64_t>(bits) - (int64_t{written} << 16)), 0x8000)
          << std::hex << written << " " << bits;
      ASSERT_TRUE(std::isfinite(master) && std::signbit(master) == (written >= 0x8000));
    }
  }
}

TEST(PackedAdamW, PackAndUnpackAreInverse) {
  const size_t count = 5003;
  for (const auto [param, grad] : kTypes) {
    for (const Codec codec : kPackedCodecs) {
      Packed packed({param, grad, codec, codec}, weights_of(count));
      for (int step = 1; step <= 5; ++step) packed.step({grad, random_values(count, step)}, step);
      auto state = packed.unpacked();
      Packed copy(packed.format, packed.param.values(count));
      const bool master = param == DType::bfloat16;
      pack(copy.format, copy.slice(),
           {state.exp_avg.data(), state.exp_avg_sq.data(), master ? state.master.data() : nullptr});
      EXPECT_EQ(copy.state, packed.state) << codec::name_of(codec);
      EXPECT_EQ(copy.param.values(count), packed.param.values(count));
    }
  }
}

// Squares have no sign to spend a code on.
TEST(PackedAdamW, SquaresHaveAllCodes) {
  std::vector<float> squares(256);
  for (size_t i = 0; i < squares.size(); ++i) squares[i] = static_cast<float>(i);
  Packed packed({.exp_avg_sq = Codec::int8}, std::vector<float>(squares.size()));
  pack(packed.format, packed.slice(), {nullptr, squares.data(), nullptr});
  const auto kept = packed.unpacked().exp_avg_sq;
  for (size_t i = 0; i < squares.size(); ++i) EXPECT_NEAR(kept[i], squares[i], 1e-3);
}

// Moments lose what the codec says, once a step; weights follow those of the exact moments.
TEST(PackedAdamW, LossyCodecsStayNear) {
  const size_t count = 20011;
  const auto weights = weights_of(count);
  for (const auto [param, grad] : kTypes) {
    for (const auto& [codec, bound] : {std::pair{Codec::bf16, 1e-2},
                                       {Codec::fp16, 1e-2},
                                       {Codec::int8, 0.5},
                                       {Codec::quantization, 0.1}}) {
      Packed packed({param, grad, codec, codec == Codec::int8 ? Codec::none : codec}, weights);
      Plain plain(param, grad, weights);
      for (int step = 1; step <= 20; ++step) {
        auto values = random_values(count, step);
        for (float& value : values) value = value == 0 ? 0.1f : std::tanh(value);
        const Array grads(grad, values);
        packed.step(grads, step);
        plain.step(grads, step);
      }
      double error = 0, size = 0, moved = 0, apart = 0;
      const auto state = packed.unpacked();
      const auto first = Array(param, weights).values(count);
      const auto ours = param == DType::float32 ? packed.param.values(count) : state.master;
      const auto theirs = param == DType::float32 ? plain.param.values(count) : plain.master;
      for (size_t i = 0; i < count; ++i) {
        error += std::pow(state.exp_avg[i] - plain.exp_avg[i], 2);
        size += std::pow(plain.exp_avg[i], 2);
        apart += std::pow(ours[i] - theirs[i], 2);
        moved += std::pow(theirs[i] - first[i], 2);
      }
      EXPECT_LT(std::sqrt(error / size), bound) << codec::name_of(codec);
      EXPECT_GT(error, 0);
      EXPECT_LT(std::sqrt(apart / moved), bound) << codec::name_of(codec);
    }
  }
}

TEST(PackedAdamW, ThreadsAndSlicesDoNotMatter) {
  const int threads = at::get_num_threads();
  const size_t count = 70001, cut = 256 * 77;
  const auto weights = weights_of(count);
  for (const auto [param, grad] : kTypes) {
    for (const Codec codec : kPackedCodecs) {
      const PackedFormat format{param, grad, codec, codec};
      Packed whole(format, weights), threaded(format, weights);
      const auto middle = weights.begin() + cut;
      Packed front(format, {weights.begin(), middle}), back(format, {middle, weights.end()});
      for (int step = 1; step <= 3; ++step) {
        const auto values = random_values(count, step);
        const auto between = values.begin() + cut;
        at::set_num_threads(1);
        whole.step({grad, values}, step);
        front.step({grad, {values.begin(), between}}, step);
        back.step({grad, {between, values.end()}}, step);
        at::set_num_threads(3);
        threaded.step({grad, values}, step);
      }
      EXPECT_EQ(threaded.state, whole.state);
      const auto all = whole.unpacked(), first = front.unpacked(), second = back.unpacked();
      const auto joined = [](std::vector<float> a, const std::vector<float>& b) {
        a.insert(a.end(), b.begin(), b.end());
        return a;
      };
      EXPECT_EQ(joined(first.exp_avg, second.exp_avg), all.exp_avg);
      EXPECT_EQ(joined(first.exp_avg_sq, second.exp_avg_sq), all.exp_avg_sq);
      EXPECT_EQ(joined(front.param.values(cut), back.param.values(count - cut)),
                whole.param.values(count));
    }
  }
  at::set_num_threads(threads);
}

TEST(PackedAdamW, Layout) {
  const auto layout = packed_layout(
      {.param = DType::bfloat16, .exp_avg = Codec::bf16, .exp_avg_sq = Codec::quantization}, 257);
  EXPECT_EQ(layout.exp_avg, 0u);
  EXPECT_EQ(layout.exp_avg_sq, 768u);        // 514 bytes
  EXPECT_EQ(layout.remainder, 768u + 512u);  // 260 codes, two scales
  EXPECT_EQ(layout.total, 768u + 512u + 768u);
  const auto plain = packed_layout({}, 64);
  EXPECT_EQ(plain.exp_avg_sq, 256u);
  EXPECT_EQ(plain.total, 512u);
}

TEST(PackedAdamW, RejectsOtherTypes) {
  EXPECT_THROW(packed_update({.param = DType::int64}, {}, {}), std::logic_error);
  EXPECT_THROW(packed_update({.param = DType::float64, .grad = DType::float32}, {}, {}),
               std::logic_error);
  EXPECT_THROW(packed_layout({.param = DType::float64, .exp_avg = Codec::bf16}, 1),
               std::logic_error);
  EXPECT_THROW(packed_layout({.exp_avg = Codec::lossless}, 1), std::logic_error);
}

}  // namespace
}  // namespace lockstep::optim::detail
