// SPDX-License-Identifier: Apache-2.0
// Kernels for new tokens against torch's operators in float64.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/kernels/decode_cuda.h"
#include "lockstep/nn/kernels/linear_map.h"

namespace lockstep::nn {
namespace {

using Activation = FusedLinear::Activation;

constexpr at::ScalarType kDecodeTypes[]{at::kFloat, at::kBFloat16, at::kHalf};

at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType type, double scale = 1) {
  return at::randn(sizes, at::TensorOptions().device(at::kCUDA)).mul_(scale).to(type);
}

double tolerance_of(at::ScalarType type) {
  return type == at::kFloat ? 1e-4 : type == at::kHalf ? 0.01 : 0.06;
}

at::Tensor expected_of(const at::Tensor& input, const FusedLinear& linear) {
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(at::kDouble) : tensor;
  };
  at::Tensor x = wide(input);
  if (linear.norm_bias.defined()) {
    x = at::layer_norm(x, {x.size(-1)}, wide(linear.norm_weight), wide(linear.norm_bias),
                       linear.epsilon);
  } else if (linear.norm_weight.defined()) {
    x = x * at::rsqrt(x.square().mean(-1, true) + linear.epsilon) * wide(linear.norm_weight);
  }
  x = at::linear(x, wide(linear.weight), wide(linear.bias));
  if (linear.activation == Activation::gelu) x = at::gelu(x, "tanh");
  if (linear.activation == Activation::swiglu) {
    const auto halves = x.chunk(2, -1);
    x = at::silu(halves[0]) * halves[1];
  }
  return linear.residual.defined() ? x + wide(linear.residual) : x;
}

TEST(FusedLinearCuda, IsThatOfTheOperators) {
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  for (const at::ScalarType type : kDecodeTypes) {
    for (const int64_t vectors : {1, 3, 8}) {
      // 100: not whole packs, which operators compute. 20000: more than a block's memory holds.
      for (const int64_t in : {64, 100, 2080, 20000}) {
        for (const Activation activation :
             {Activation::none, Activation::gelu, Activation::swiglu}) {
          const int64_t out = 70, rows = activation == Activation::swiglu ? 2 * out : out;
          for (const bool all : {false, true}) {
            FusedLinear linear{.weight = numbers({rows, in}, type, 1 / std::sqrt(double(in))),
                               .bias = {}};
            linear.activation = activation;
            if (all) {
              linear.bias = numbers({rows}, type);
              linear.norm_weight = numbers({in}, type);
              linear.epsilon = 1e-5;
              linear.residual = numbers({1, vectors, out}, type);
              if (activation == Activation::gelu) linear.norm_bias = numbers({in}, type);
            }
            const at::Tensor input = numbers({1, vectors, in}, type);
            ASSERT_TRUE(can_fuse(input));
            const at::Tensor expected = expected_of(input, linear);
            const at::Tensor found = fused_linear(input, linear).to(at::kDouble);
            const double far =
                ((found - expected).abs() / (1 + expected.abs())).max().item<double>();
            EXPECT_LT(far, tolerance_of(type)) << type << " " << vectors << " " << in << " "
                                               << static_cast<int>(activation) << all;
          }
        }
      }
    }
  }
}

struct Case {
  int64_t heads, kv_heads, width, window;
  bool norm, turns;
};

// Each row alone, from the tokens of its whole text.
at::Tensor attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        int64_t window) {
  const int64_t length = k.size(0), seen = window > 0 ? std::min(window, length) : length;
  const int64_t sharing = q.size(0) / k.size(1);
  const at::Tensor keys = k.narrow(0, length - seen, seen).repeat_interleave(sharing, 1),
                   values = v.narrow(0, length - seen, seen).repeat_interleave(sharing, 1);
  const at::Tensor scores =
      at::einsum("hd,lhd->hl", {q, keys}) / std::sqrt(static_cast<double>(q.size(1)));
  return at::einsum("hl,lhd->hd", {at::softmax(scores, 1), values});
}

TEST(AttendNewCuda, IsTheAttentionOfEachText) {
  const at::NoGradGuard no_grad;
  at::manual_seed(2);
  for (const auto& [heads, kv_heads, width, window, norm, turns] :
       std::vector<Case>{{4, 4, 64, 0, false, true},
                         {8, 2, 128, 0, true, true},
                         {7, 1, 32, 0, false, false},
                         {4, 2, 64, 100, false, true},
                         {6, 1, 128, 300, true, true}}) {
    for (const at::ScalarType type : kDecodeTypes) {
      // One without a text, a first token, one that fills a block's part, and several blocks.
      const std::vector<int64_t> slots{-1, 0, 127, 700, 1199};
      const auto rows = static_cast<int64_t>(slots.size());
      const int64_t capacity = 1200, shift = 17;  // positions are those of slots, and some more
      cuda::AttentionMemory memory{numbers({rows, kv_heads, capacity, width}, type),
                                   numbers({rows, kv_heads, capacity, width}, type)};
      const at::Tensor keys = memory.keys.clone(), values = memory.values.clone();
      cuda::AttentionHeads options{.heads = heads, .kv_heads = kv_heads, .epsilon = 1e-5};
      HeadOptions reference{.heads = heads, .kv_heads = kv_heads};
      const at::Tensor table = [&] {
        std::vector<double> frequencies;
        for (int64_t i = 0; i < width / 2; ++i)
          frequencies.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / double(width)));
        return rotary_table(frequencies, capacity + shift).to(at::kCUDA);
      }();
      if (turns) options.rotation = table;
      if (norm) {
        options.q_norm = numbers({width}, type);
        options.k_norm = numbers({width}, type);
        const auto normed = [](const at::Tensor& weight) {
          return [weight](const at::Tensor& x) {
            return x * at::rsqrt(x.square().mean(-1, true) + 1e-5) * weight.to(x.scalar_type());
          };
        };
        reference.q_norm = normed(options.q_norm);
        reference.k_norm = normed(options.k_norm);
      }
      const at::Tensor qkv = numbers({1, rows, (heads + 2 * kv_heads) * width}, type);
      const at::Tensor places = at::tensor(slots, at::kLong).to(at::kCUDA);
      for (int turn = 0; turn < 2; ++turn) {  // the counters are as they were
        const at::Tensor out =
            cuda::attend_new(qkv, options, {(places + shift).clamp_min(0), places}, memory, window);
        ASSERT_EQ(out.sizes().vec(), (std::vector<int64_t>{1, rows, heads * width}));
        EXPECT_TRUE(out[0][0].eq(0).all().item<bool>());
        for (int64_t row = 1; row < rows; ++row) {
          const int64_t slot = slots[static_cast<size_t>(row)];
          if (turns) reference.rotation = table.narrow(1, slot + shift, 1);
          const auto [q, k, v] = split_heads(qkv.narrow(1, row, 1).to(at::kDouble).cpu(), [&] {
            HeadOptions on_cpu = reference;
            if (turns) on_cpu.rotation = reference.rotation.cpu();
            if (norm) {
              on_cpu.q_norm = [&](const at::Tensor& x) {
                return reference.q_norm(x.to(at::kCUDA)).cpu();
              };
              on_cpu.k_norm = [&](const at::Tensor& x) {
                return reference.k_norm(x.to(at::kCUDA)).cpu();
              };
            }
            return on_cpu;
          }());
          const auto seen = [&](const at::Tensor& before, const at::Tensor& now) {
            const at::Tensor old =
                before[row].narrow(1, 0, slot).transpose(0, 1).to(at::kDouble).cpu();  // (l, K, D)
            return at::cat({old, now[0].transpose(0, 1)}, 0);
          };
          const at::Tensor expected =
              attention_of(q[0].select(1, 0), seen(keys, k), seen(values, v), window);
          const double far = (out[0][row].to(at::kDouble).cpu().view({heads, width}) - expected)
                                 .abs()
                                 .max()
                                 .item<double>();
          EXPECT_LT(far, tolerance_of(type)) << type << " width " << width << " slot " << slot;
          // The new token is stored, and nothing else is touched.
          const at::Tensor stored = memory.keys[row].select(1, slot).to(at::kDouble).cpu();
          EXPECT_TRUE(at::allclose(stored, k[0].select(1, 0), 0.02, 0.02)) << type << slot;
          EXPECT_TRUE(memory.keys[row].narrow(1, 0, slot).equal(keys[row].narrow(1, 0, slot)));
        }
        EXPECT_TRUE(memory.values[0].equal(values[0]));
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::nn
