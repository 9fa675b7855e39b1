// SPDX-License-Identifier: Apache-2.0
// SGD, and parameters of float16 and float64, on packed state against the kernels of whole tensors,
// bit for bit.
#include "lockstep/optim/kernels/packed_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "tests/optim/kernels/packed_adamw_support.h"

namespace lockstep::optim::detail {
namespace {

using codec::Codec;

constexpr DType kAll[] = {DType::float64, DType::float32, DType::float16, DType::bfloat16};
constexpr SgdKind kKinds[] = {SgdKind::plain, SgdKind::momentum, SgdKind::nesterov};
constexpr size_t kCount = 5003;

std::vector<float> first_weights(size_t count) {
  auto weights = random_values(count, 3);
  for (float& weight : weights) weight *= 0.1f;
  weights[7] = -0.f;
  weights[8] = 0;
  return weights;
}

// As whole tensors have it: state in arrays of its own.
struct WholeTensor {
  WholeTensor(const PackedFormat& format, const std::vector<float>& weights)
      : format(format),
        param(format.param, weights),
        master(param.values(weights.size())),
        first(2 * weights.size()),
        second(2 * weights.size()) {}
  void step(const std::vector<float>& grads, int step, SgdKind kind) {
    // What there is no kernel for is taken as the type that is computed in.
    const auto update = factors_for(format, step, kind);
    const DType wide = moment_dtype(format);
    const auto run = [&](auto find, const auto& factors) {
      const bool native = find(format.param, format.grad) != nullptr;
      const Array as_given(format.grad, grads);
      const Array as_wide(wide, as_given.values(grads.size()));
      const Operands operands{param.data(), (native ? as_given : as_wide).data(), master.data(),
                              first.data(), second.data()};
      find(format.param, native ? format.grad : wide)(operands, factors, 0,
                                                      static_cast<int64_t>(grads.size()));
    };
    if (const auto* const adamw = std::get_if<AdamWFactors>(&update))
      return run(kernels().adamw, *adamw);
    const auto& sgd = std::get<SgdUpdate>(update);
    run([&](DType p, DType g) { return kernels().sgd(sgd.kind, p, g); }, sgd.factors);
  }

  PackedFormat format;
  Array param;
  std::vector<float> master, first, second;  // room for float64
};

struct PackedTensor {
  PackedTensor(const PackedFormat& format, const std::vector<float>& weights)
      : format(format),
        count(weights.size()),
        param(format.param, weights),
        state(packed_layout(format, static_cast<int64_t>(count)).total / 8 + 1) {}
  PackedSlice slice(const void* grad = nullptr) {
    return {param.data(), grad, reinterpret_cast<std::byte*>(state.data()),
            static_cast<int64_t>(count)};
  }
  void step(const std::vector<float>& grads, int step, SgdKind kind) {
    const Array array(format.grad, grads);
    packed_update(format, slice(array.data()), factors_for(format, step, kind));
  }

  PackedFormat format;
  size_t count;
  Array param;
  std::vector<double> state;  // zeros
};

std::string text_of_format(const PackedFormat& format, SgdKind kind) {
  return std::string(name_of(format.param)) + " " + std::string(name_of(format.grad)) +
         ", moments " + std::to_string(format.moments) + ", kind " +
         std::to_string(static_cast<int>(kind));
}

void expect_same_tensor(const PackedFormat& format, SgdKind kind, const WholeTensor& whole,
                        PackedTensor& packed) {
  SCOPED_TRACE(text_of_format(format, kind));
  EXPECT_EQ(std::memcmp(whole.param.data(), packed.param.data(), kCount * size_of(format.param)),
            0);
  std::vector<float> first(2 * kCount), second(2 * kCount), master(kCount);
  unpack(format, packed.slice(), {first.data(), second.data(), master.data()});
  if (format.moments > 0) {
    EXPECT_EQ(bits_of(first), bits_of(whole.first));
  }
  if (format.moments > 1) {
    EXPECT_EQ(bits_of(second), bits_of(whole.second));
  }
  if (size_of(format.param) == 2) {
    EXPECT_EQ(bits_of(master), bits_of(whole.master));
  }
}

template <class Body>
void for_each_format(const Body& body) {
  for (const DType param : kAll) {
    for (const DType grad : kAll) {
      if (param == DType::float64 && grad != param) continue;
      body(PackedFormat{.param = param, .grad = grad}, SgdKind::plain);
      for (const SgdKind kind : kKinds)
        body(PackedFormat{.param = param, .grad = grad, .moments = kind == SgdKind::plain ? 0 : 1},
             kind);
    }
  }
}

TEST(PackedUpdate, HasTheBitsOfTheKernels) {
  for_each_format([](const PackedFormat& format, SgdKind kind) {
    WholeTensor whole(format, first_weights(kCount));
    PackedTensor packed(format, first_weights(kCount));
    expect_same_tensor(format, kind, whole, packed);  // before the first
    for (int step = 1; step <= 3; ++step) {
      auto grads = random_values(kCount, step);
      grads[7] = grads[8] = 0;  // zeros keep their signs
      whole.step(grads, step, kind);
      packed.step(grads, step, kind);
      expect_same_tensor(format, kind, whole, packed);
    }
  });
}

// Someone else writes some elements: they win over whole masters, and others keep theirs.
TEST(PackedUpdate, WrittenParametersWin) {
  for_each_format([](const PackedFormat& format, SgdKind kind) {
    if (codec::master_of(format) != codec::Master::whole) return;
    WholeTensor whole(format, first_weights(kCount));
    PackedTensor packed(format, first_weights(kCount));
    for (int step = 1; step <= 2; ++step) {
      const auto grads = random_values(kCount, step);
      whole.step(grads, step, kind);
      packed.step(grads, step, kind);
      auto* const written = static_cast<uint16_t*>(packed.param.data());
      for (size_t i = 0; i < kCount; i += 3) written[i] ^= 0x40;
      std::memcpy(whole.param.data(), written, kCount * 2);
    }
    // What is shown is what will be updated.
    std::vector<float> master(kCount);
    unpack(format, packed.slice(), {nullptr, nullptr, master.data()});
    const auto values = whole.param.values(kCount);
    for (size_t i = 0; i < kCount; ++i)
      EXPECT_EQ(master[i], i % 3 == 0 ? values[i] : whole.master[i]) << i;
    whole.step(random_values(kCount, 9), 3, kind);
    packed.step(random_values(kCount, 9), 3, kind);
    expect_same_tensor(format, kind, whole, packed);
  });
}

TEST(PackedUpdate, WhatIsPackedIsUnpacked) {
  for_each_format([](const PackedFormat& format, SgdKind kind) {
    PackedTensor packed(format, first_weights(kCount));
    std::vector<double> first(kCount), second(kCount), shown(kCount), other(kCount);
    const auto random = random_values(2 * kCount, 5);
    std::vector<float> master(random.begin(), random.begin() + kCount), seen(kCount);
    std::memcpy(first.data(), random.data(), kCount * sizeof(float));
    for (size_t i = 0; i < kCount; ++i)
      reinterpret_cast<float*>(second.data())[i] = std::fabs(random[i]);
    pack(format, packed.slice(), {first.data(), second.data(), master.data()});
    unpack(format, packed.slice(), {shown.data(), other.data(), seen.data()});
    SCOPED_TRACE(text_of_format(format, kind));
    const size_t bytes = kCount * size_of(moment_dtype(format));
    if (format.moments > 0) {
      EXPECT_EQ(std::memcmp(first.data(), shown.data(), bytes), 0);
    }
    if (format.moments > 1) {
      EXPECT_EQ(std::memcmp(second.data(), other.data(), bytes), 0);
    }
    // A whole master that is not the parameter's is another's, and the parameter stays.
    const auto kept = codec::master_of(format);
    if (kept == codec::Master::remainder) {
      EXPECT_EQ(bits_of(seen), bits_of(master));
    }
    if (kept == codec::Master::whole) {
      EXPECT_EQ(bits_of(packed.param.values(kCount)),
                bits_of(Array(format.param, first_weights(kCount)).values(kCount)));
    }
  });
}

TEST(PackedUpdate, CodedMomentumIsNear) {
  for (const Codec codec : kPackedCodecs) {
    for (const DType param : {DType::float32, DType::float16, DType::bfloat16}) {
      const PackedFormat format{.param = param, .grad = param, .exp_avg = codec, .moments = 1};
      WholeTensor whole({.param = param, .grad = param, .moments = 1}, first_weights(kCount));
      PackedTensor packed(format, first_weights(kCount));
      for (int step = 1; step <= 5; ++step) {
        auto grads = random_values(kCount, step);
        for (float& grad : grads) grad = std::clamp(grad, -2.f, 2.f);
        whole.step(grads, step, SgdKind::nesterov);
        packed.step(grads, step, SgdKind::nesterov);
      }
      const auto near = whole.param.values(kCount), coded = packed.param.values(kCount);
      double apart = 0, size = 0;
      for (size_t i = 0; i < kCount; ++i) {
        apart += std::pow(near[i] - coded[i], 2);
        size += std::pow(near[i], 2);
      }
      EXPECT_LT(std::sqrt(apart / size), 0.01) << codec::name_of(codec);
      EXPECT_EQ(apart == 0, codec == Codec::none) << codec::name_of(codec) << " " << name_of(param);
    }
  }
}

TEST(PackedUpdate, Layout) {
  EXPECT_EQ(packed_layout({.moments = 0}, 64).total, 0u);
  EXPECT_EQ(packed_layout({.moments = 1}, 64).total, 256u);
  EXPECT_EQ(packed_layout({.param = DType::float64}, 64).total, 1024u);
  EXPECT_EQ(packed_layout({.param = DType::float16}, 64).total, 768u);
  EXPECT_EQ(packed_layout({.param = DType::bfloat16, .moments = 1}, 64).total, 512u);
  EXPECT_EQ(packed_layout({.param = DType::bfloat16, .moments = 0}, 64).total, 256u);
  EXPECT_EQ(packed_layout({.exp_avg = Codec::bf16, .moments = 1}, 256).total, 512u);
}

}  // namespace
}  // namespace lockstep::optim::detail
