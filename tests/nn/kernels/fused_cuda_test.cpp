// SPDX-License-Identifier: Apache-2.0
// The kernels on CUDA against the operators on the CPU.
#include <ATen/ATen.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <functional>
#include <vector>

#include "lockstep/nn/activations.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/context/tile_attention.h"
#include "lockstep/nn/context/tile_attention_flash.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/kernels/amax_note.h"
#include "lockstep/nn/kernels/fused_cuda.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/norm.h"

namespace lockstep::nn {
namespace {

struct Outcome {
  std::vector<at::Tensor> outputs;
  at::Tensor gradient;
};

// Outputs, and the input's gradient where those of the outputs differ from element to element.
Outcome run(const at::Tensor& input,
            const std::function<std::vector<at::Tensor>(const at::Tensor&)>& function) {
  const at::Tensor x = input.detach().clone().set_requires_grad(true);
  Outcome result{.outputs = function(x), .gradient = {}};
  at::Tensor sum = at::zeros({}, x.options());
  for (const at::Tensor& output : result.outputs) {
    const auto weights = at::cos(at::arange(output.numel(), output.options().dtype(at::kDouble)))
                             .to(output.scalar_type());
    sum = sum + (output * weights.view(output.sizes())).sum();
  }
  sum.backward();
  result.gradient = x.grad();
  return result;
}

void expect_alike(const at::Tensor& input,
                  const std::function<std::vector<at::Tensor>(const at::Tensor&)>& function) {
  const Outcome expected = run(input.to(at::kDouble), function);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(c10::toString(type));
    const at::Tensor rounded = input.to(type);
    ASSERT_TRUE(cuda::has_fused_kernels(rounded.cuda()));
    const Outcome found = run(rounded.cuda(), function);
    const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 1e-2 : 6e-2;
    const auto near = [&](const at::Tensor& a, const at::Tensor& b) {
      return at::allclose(a.cpu().to(at::kDouble), b, tolerance, tolerance);
    };
    for (size_t i = 0; i < expected.outputs.size(); ++i) {
      EXPECT_TRUE(near(found.outputs[i], expected.outputs[i])) << "output " << i;
    }
    EXPECT_TRUE(near(found.gradient, expected.gradient));
  }
}

at::Tensor noise(at::IntArrayRef sizes) {
  at::manual_seed(3);
  return at::randn(sizes);
}

TEST(FusedCuda, SwiGlu) {
  for (const int64_t width : {1, 6, 8, 40, 129}) {
    expect_alike(noise({3, 5, 2 * width}),
                 [](const at::Tensor& x) { return std::vector{swiglu(x)}; });
  }
}

// The result, and the input around it: its gradient is the sum of both ways.
TEST(FusedCuda, RmsNorm) {
  for (const int64_t width : {64, 128, 264, 768, 2048, 4096, 8192, 8200}) {
    for (const int64_t rows : {1, 7, 3000}) {
      if (rows == 3000 && width > 1000) continue;
      at::manual_seed(5);
      const at::Tensor weight = at::randn({width}, at::kDouble), others = at::randn({rows, width});
      expect_alike(noise({rows, width}) * 3, [&](const at::Tensor& x) {
        RmsNorm norm(width, {.tensors = x.options()});
        norm->weight.detach().copy_(weight);
        const auto [out, around] = norm->fork(x);
        return std::vector{out, around * others.to(x.options())};
      });
    }
  }
}

// A gradient that begins at an odd element, and rows that are not as wide as the weight.
TEST(FusedCuda, RmsNormOfWhatItsKernelDoesNotTake) {
  expect_alike(noise({3, 64}), [](const at::Tensor& x) {
    RmsNorm norm(64, {.tensors = x.options()});
    return std::vector{at::cat({at::zeros({1}, x.options()), norm->forward(x).flatten()})};
  });
  RmsNorm narrow(64, {.tensors = at::TensorOptions(at::kCUDA)});
  EXPECT_ANY_THROW(narrow->forward(at::zeros({3, 128}, at::kCUDA)));
}

TEST(FusedCuda, GradientOfTheNormsWeight) {
  for (const int64_t width : {768, 4096}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = noise({4000, width}).to(type), grad = at::randn({4000, width}).to(type);
      const auto of = [&](const at::TensorOptions& options) {
        RmsNorm norm(width, {.tensors = options});
        norm->forward(x.to(options)).backward(grad.to(options));
        return norm->weight.grad().cpu().to(at::kDouble);
      };
      const at::Tensor expected = of(at::kDouble);
      const at::Tensor found = of(at::TensorOptions(at::kCUDA).dtype(type));
      EXPECT_LT((found - expected).norm().item<double>(),
                (type == at::kFloat ? 1e-5 : 1e-2) * expected.norm().item<double>());
      EXPECT_TRUE(at::equal(of(at::TensorOptions(at::kCUDA).dtype(type)), found));
    }
  }
}

TEST(FusedCuda, Heads) {
  for (const int64_t width : {4, 16, 64, 22}) {
    const int64_t heads = width == 16 ? 600 : 6;
    std::vector<double> frequencies;
    for (int64_t i = 0; i < width / 2; ++i) frequencies.push_back(1.0 / static_cast<double>(1 + i));
    const at::Tensor table = rotary_table(frequencies, 19);
    for (const bool overwrite : {false, true}) {
      expect_alike(noise({2, 17, (heads + 2 * 2) * width}), [&](const at::Tensor& x) {
        const Heads parts = split_heads(overwrite ? x * 1 : x, {.heads = heads,
                                                                .kv_heads = 2,
                                                                .rotation = table.to(x.device()),
                                                                .overwrite = overwrite});
        return std::vector{parts.q, parts.k, parts.v};
      });
    }
  }
}

// Tokens that come once, some that come often, and one that fills several chunks of the kernel.
TEST(FusedCuda, GradientOfAnEmbedding) {
  for (const int64_t count : {1, 31, 64, 1000}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const auto options = at::device(at::kCUDA).dtype(type);
      at::Tensor tokens = at::randint(300, {2, count}, at::kLong);
      tokens.masked_fill_(tokens.lt(150), 7).masked_fill_(tokens.gt(280), 299);
      Embedding embedding(300, 1048, options);
      embedding->weight.data().normal_();
      const at::Tensor gradient = noise({2, count, 1048}).to(options);
      const auto found = [&] {
        return torch::autograd::grad({embedding(tokens.cuda())}, {embedding->weight},
                                     {gradient})[0];
      };
      const at::Tensor exact =
          at::embedding_dense_backward(gradient.cpu().to(at::kDouble), tokens, 300, -1, false);
      const double tolerance = type == at::kFloat ? 1e-5 : 1e-2;
      const at::Tensor first = found();
      EXPECT_TRUE(at::allclose(first.cpu().to(at::kDouble), exact, tolerance, tolerance));
      EXPECT_TRUE(at::equal(first, found()));  // the same order of summation
      EXPECT_TRUE(
          at::equal(embedding(tokens.cuda()), at::embedding(embedding->weight, tokens.cuda())));
    }
  }
}

TEST(FusedCuda, CrossEntropy) {
  for (const int64_t classes : {5, 64, 1000, 20000, 50304}) {
    for (const bool overwrite : {false, true}) {
      const at::Tensor targets = at::tensor({1, 0, -100, 4, 3}, at::kLong);
      expect_alike(noise({5, classes}) * 3, [&](const at::Tensor& x) {
        // A factor, so that backward has something to scale; a copy, because it may be overwritten.
        return std::vector{cross_entropy(x * 1, targets.to(x.device()),
                                         {.scale = 0.25, .overwrite_logits = overwrite})
                               .to(x.scalar_type()) *
                           3};
      });
    }
  }
}

// Casts to 8 bits take them from the kernel that has written the tensor. Each part of the result
// once has the largest.
TEST(FusedCuda, LargestMagnitudesAreThoseOfTheResults) {
  const bool wanted = notes_amax().exchange(true);
  const auto expect_noted = [](const at::Tensor& out) {
    const at::Tensor amax = take_amax(out);
    ASSERT_TRUE(amax.defined());
    const double largest = out.to(at::kDouble).abs().max().item<double>();
    EXPECT_NEAR(amax.item<double>(), largest, 0.01 * largest);
  };
  const std::vector<double> angles{1, 0.5, 0.25, 0.125};
  const at::Tensor table = rotary_table(angles, 17).cuda();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int part : {0, 1, 2}) {
      SCOPED_TRACE(c10::str(c10::toString(type), " ", part));
      const auto made = [&](at::IntArrayRef sizes, bool large) {
        return (noise(sizes) * (large ? 30 : 1)).to(type).cuda();
      };
      expect_noted(cuda::merge_heads(made({2, 6, 17, 8}, part == 0), made({2, 2, 17, 8}, part == 1),
                                     made({2, 2, 17, 8}, part == 2), table));
      const at::Tensor gate_up =
          at::cat({made({3, 5, 40}, part == 0), made({3, 5, 40}, part == 1)}, 2);
      const at::Tensor rows = made({5, 512}, part == 0), weight = made({512}, part == 1);
      const auto [normed, scales] = cuda::rms_norm(rows, weight, 1e-5);
      expect_noted(normed);
      expect_noted(cuda::rms_norm_backward(rows, weight, scales, made({5, 512}, part == 2),
                                           made({5, 512}, part == 1), true, true)
                       .x);
      expect_noted(cuda::swiglu(gate_up));
      expect_noted(cuda::swiglu_backward(gate_up, made({3, 5, 40}, part == 2)));
    }
  }
  notes_amax() = wanted;
}

// By cuDNN where libtorch chooses it, with a window by flash attention; heads share keys. The
// same tile again with gradients that lie otherwise in memory, because cuDNN keeps plans.
TEST(TilesCuda, AreThoseOfTheCpu) {
  const at::Tensor q = noise({1, 4, 384, 64}), k = noise({1, 2, 384, 64}).neg(),
                   v = noise({1, 2, 384, 64}), grad = noise({1, 4, 384, 64}).sin();
  const std::vector<AttentionTile> tiles{
      {.queries = {128, 384}, .keys = {128, 384}, .causal = true, .whole = true},
      {.queries = {0, 128}, .keys = {128, 384}, .whole = true},
      {.queries = {128, 384}, .keys = {128, 384}, .causal = true, .window = 40}};
  for (const AttentionTile& tile : tiles) {
    SCOPED_TRACE(tile.window);
    const auto results = [&](at::Device device, at::ScalarType type, bool turned) {
      const auto there = [&](const at::Tensor& heads) {
        return heads.to(at::kBFloat16).to(type).to(device);
      };
      const at::Tensor mine = there(q), keys = there(k), values = there(v);
      const PartialAttention part = attend(mine, keys, values, tile);
      at::Tensor out = at::zeros(q.sizes(), part.out.options()),
                 lse = at::zeros({1, 4, 384}, part.lse.options()), given = there(grad);
      out.narrow(2, tile.queries.begin, tile.queries.size()).copy_(part.out);
      lse.narrow(2, tile.queries.begin, tile.queries.size()).copy_(part.lse);
      out = out.to(type);
      const at::Tensor delta = (out.to(lse.scalar_type()) * given).sum(-1);
      if (turned) given = given.transpose(1, 2).contiguous().transpose(1, 2);
      const AttentionGradients sums{at::zeros(q.sizes(), lse.options()),
                                    at::zeros(k.sizes(), lse.options()),
                                    at::zeros(v.sizes(), lse.options())};
      add_gradients(sums, mine, keys, values, {out, lse, given, delta}, tile);
      return std::vector<at::Tensor>{part.out, part.lse, sums.q, sums.k, sums.v};
    };
    const auto expected = results(at::kCPU, at::kDouble, false);
    for (const bool turned : {false, true}) {
      const auto found = results(at::kCUDA, at::kBFloat16, turned);
      for (size_t i = 0; i < expected.size(); ++i) {
        const double off =
            (found[i].cpu().to(at::kDouble) - expected[i]).abs().max().item<double>();
        EXPECT_LT(off, 0.02 * expected[i].abs().max().item<double>()) << "result " << i;
      }
    }
  }
  const at::Tensor on_gpu = q.to(at::kBFloat16).cuda();
  EXPECT_FALSE(flash_tiles::takes_cudnn(on_gpu, on_gpu, on_gpu, tiles[2]));
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11  // whose choice is known
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  EXPECT_EQ(flash_tiles::takes_cudnn(on_gpu, on_gpu, on_gpu, tiles[0]), major == 9);
#endif
}

}  // namespace
}  // namespace lockstep::nn
