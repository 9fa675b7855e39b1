// SPDX-License-Identifier: Apache-2.0
// Random numbers and dropout next to torch's own, in nanoseconds for each element.
//
//   OMP_NUM_THREADS=1 build/bin/bench_random          on the CPU
//   build/bin/bench_random cuda                       on the GPU
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "lockstep/nn/dropout.h"
#include "lockstep/nn/random/random.h"

namespace {

using namespace lockstep;

// The fastest of several, after one that does not count.
double nanoseconds(const at::Tensor& tensor, const std::function<void()>& body) {
  const auto run = [&] {
    const auto begin = std::chrono::steady_clock::now();
    body();
    if (tensor.is_cuda()) tensor.flatten()[0].item();  // waits for the stream
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
        .count();
  };
  run();
  double best = run();
  for (int i = 0; i < 9; ++i) best = std::min(best, run());
  return best / static_cast<double>(tensor.numel());
}

}  // namespace

int main(int argc, char** argv) {
  const bool on_gpu = argc > 1 && argv[1] == std::string("cuda");
  const int64_t size = on_gpu ? 1 << 28 : 1 << 22;
  const auto key = random_key(1, "bench", "tensor");
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto options = at::TensorOptions(dtype).device(on_gpu ? at::kCUDA : at::kCPU);
    const auto x = at::empty({size}, options);
    const auto report = [&](const char* what, const std::function<void()>& theirs,
                            const std::function<void()>& ours) {
      const double torch = nanoseconds(x, theirs), lockstep = nanoseconds(x, ours);
      std::printf("%-16s %-9s torch %8.5f  lockstep %8.5f ns\n", what, at::toString(dtype), torch,
                  lockstep);
    };
    report(
        "normal", [&] { x.normal_(0, 1); },
        [&] { nn::fill(x, key, nn::Distribution::normal(0, 1)); });
    report(
        "uniform", [&] { x.uniform_(0, 1); },
        [&] { nn::fill(x, key, nn::Distribution::uniform(0, 1)); });
    report(
        "dropout", [&] { at::dropout(x, 0.1, true); }, [&] { nn::dropout(x, 0.1, key); });
    const auto leaf = x.detach().clone().requires_grad_();
    const auto gradient = at::ones_like(x);
    report(
        "dropout, both", [&] { at::dropout(leaf, 0.1, true).backward(gradient); },
        [&] { nn::dropout(leaf, 0.1, key).backward(gradient); });
  }
}
