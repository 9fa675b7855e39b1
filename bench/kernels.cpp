// SPDX-License-Identifier: Apache-2.0
// Forward and backward of what the model computes in kernels of its own between products, one at a
// time; what bench/kernels.py compares with PyTorch and with the limit of memory.
//
//   bench_kernels ROWS LENGTH HIDDEN HEADS FFN VOCAB
// bfloat16 on CUDA where there is one, else float32 on the CPU. Prints a JSON line for each, with
// the bytes that must be moved, and one for a copy of memory.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/nn/activations.h"
#include "lockstep/nn/attention_heads.h"
#include "lockstep/nn/embedding.h"
#include "lockstep/nn/loss.h"
#include "lockstep/nn/norm.h"
#include "lockstep/optim/adamw.h"

namespace {

using lockstep::Clock;

constexpr int kBatches = 7, kRepeats = 20;

void finish(at::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

// The median of a few batches.
double median_ms(at::Device device, const std::function<void()>& work) {
  std::vector<double> found;
  for (int batch = 0; batch <= kBatches; ++batch) {
    finish(device);
    const auto start = Clock::now();
    for (int i = 0; i < kRepeats; ++i) work();
    finish(device);
    if (batch > 0) found.push_back(1e3 * lockstep::seconds_since(start) / kRepeats);
  }
  std::ranges::sort(found);
  return found[found.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc != 7) {
    std::cerr << "usage: bench_kernels ROWS LENGTH HIDDEN HEADS FFN VOCAB\n";
    return 2;
  }
  std::vector<int64_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::stoll(argv[i]));
  const int64_t rows = sizes[0], length = sizes[1], hidden = sizes[2], heads = sizes[3],
                ffn = sizes[4], vocab = sizes[5], tokens = rows * length;
  const at::Device device(at::hasCUDA() ? at::kCUDA : at::kCPU);
  const auto options =
      at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat);
  const auto element = static_cast<double>(device.is_cuda() ? 2 : 4);

  const auto report = [&](const char* name, double elements, const std::function<void()>& work) {
    const double found = median_ms(device, work);
    const nlohmann::json line{{"kernel", name}, {"ms", found}, {"bytes", element * elements}};
    std::cout << line << std::endl;
  };
  using Outputs = std::vector<at::Tensor>;
  const auto both_ways = [&](const char* name, double elements, std::vector<int64_t> shape,
                             const std::function<Outputs(const at::Tensor&)>& forward) {
    const at::Tensor input = at::randn(shape, options).requires_grad_();
    Outputs gradients;
    for (const at::Tensor& output : forward(input)) gradients.push_back(at::randn_like(output));
    report(name, elements, [&] { torch::autograd::grad(forward(input), {input}, gradients); });
  };
  const auto n = static_cast<double>(tokens), width = static_cast<double>(hidden);

  {  // more than caches hold
    const at::Tensor from = at::zeros({256 << 20}, options), to = at::zeros_like(from);
    report("copy", 2.0 * static_cast<double>(from.numel()), [&] { to.copy_(from); });
  }

  nn::RmsNorm norm(hidden, {.tensors = options});
  norm->weight.requires_grad_(false);
  both_ways("norm", 6 * n * width, {rows, length, hidden}, [&](const at::Tensor& x) {
    const auto [out, around] = norm->fork(x);
    return Outputs{out, around.view_as(around)};
  });
  both_ways("swiglu", 8 * n * static_cast<double>(ffn), {rows, length, 2 * ffn},
            [](const at::Tensor& x) { return Outputs{nn::swiglu(x)}; });

  std::vector<double> frequencies(static_cast<size_t>(hidden / heads / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] = 1.0 / static_cast<double>(i + 1);
  const at::Tensor table = nn::rotary_table(frequencies, length).to(device);
  both_ways("heads", 12 * n * width, {rows, length, 3 * hidden}, [&](const at::Tensor& x) {
    const auto parts = nn::split_heads(x, {.heads = heads, .kv_heads = heads, .rotation = table});
    return Outputs{parts.q, parts.k, parts.v};
  });

  const at::Tensor targets = at::randint(vocab, {tokens}, options.dtype(at::kLong));
  {
    nn::Embedding embedding(vocab, hidden, options);
    embedding->weight.data().normal_();
    const at::Tensor gradient = at::randn({tokens, hidden}, options);
    report("embedding", (3 * n + static_cast<double>(vocab)) * width,
           [&] { torch::autograd::grad({embedding(targets)}, {embedding->weight}, {gradient}); });
  }
  const at::Tensor logits = at::randn({tokens, vocab}, options);
  const at::Tensor one = at::ones({}, options.dtype(at::kFloat));
  report("cross entropy", 2 * n * static_cast<double>(vocab), [&] {
    const at::Tensor input = logits.detach().requires_grad_();
    const at::Tensor loss =
        nn::cross_entropy(input, targets, {.scale = 1 / n, .overwrite_logits = true});
    torch::autograd::grad({loss}, {input}, {one});
  });

  std::vector<optim::NamedParameter> parameters;
  double count = 0;
  for (int block = 0; block < 8; ++block) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{3 * hidden, hidden},
                                                               {hidden, hidden},
                                                               {2 * ffn, hidden},
                                                               {hidden, ffn},
                                                               {hidden},
                                                               {hidden}}) {
      at::Tensor tensor = at::randn(shape, options).requires_grad_();
      tensor.mutable_grad() = at::randn(shape, options);
      count += static_cast<double>(tensor.numel());
      parameters.push_back({std::to_string(parameters.size()), tensor});
    }
  }
  optim::AdamW adamw(parameters);
  report("adamw", count * (device.is_cuda() ? 30 : 28) / element, [&] { adamw.step(); });
}
