// SPDX-License-Identifier: Apache-2.0
// How close the fused AdamW comes to the speed of memory.
// OMP_NUM_THREADS=2 build/bin/bench_adamw [MILLIONS OF ELEMENTS]
//
// One JSON line for each list of tensors: the best and the median time of a step, the bytes it
// moves per second (28 per float32 element: parameter, gradient and two moments read, all but the
// gradient written) and its share of the machine's copy bandwidth (bytes read plus written),
// measured between the steps.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/optim/adamw.h"

using namespace lockstep;

namespace {

struct Times {
  std::vector<double> seconds;

  void measure(const std::function<void()>& body) {
    const auto start = Clock::now();
    body();
    seconds.push_back(seconds_since(start));
  }
  double best() const { return *std::min_element(seconds.begin(), seconds.end()); }
  double median() const {
    auto sorted = seconds;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    return sorted[sorted.size() / 2];
  }
};

// All threads copy their part of a buffer much larger than the caches.
class Copy {
 public:
  void run() {
    const size_t threads = at::get_num_threads(), part = kBytes / threads;
    std::vector<std::jthread> others;
    for (size_t i = 0; i < threads; ++i) {
      others.emplace_back([=, this] { std::memcpy(&to_[i * part], &from_[i * part], part); });
    }
  }
  static double bytes() { return 2.0 * kBytes; }

 private:
  static constexpr size_t kBytes = size_t{512} << 20;
  std::vector<char> from_ = std::vector<char>(kBytes, 1), to_ = std::vector<char>(kBytes, 2);
};

void report(const char* what, const std::vector<at::Tensor>& tensors, Copy& copy) {
  std::vector<optim::NamedParameter> parameters;
  int64_t elements = 0, size = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.mutable_grad() = at::randn(tensor.sizes()).to(tensor.scalar_type());
    parameters.push_back({"p" + std::to_string(parameters.size()), tensor});
    elements += tensor.numel();
    size = tensor.element_size();
  }
  optim::AdamW optimizer(parameters);
  optimizer.step();  // makes the state
  Times steps, copies;
  for (int i = 0; i < 15; ++i) {
    steps.measure([&] { optimizer.step(); });
    copies.measure([&] { copy.run(); });
  }
  // 16 bits: the gradient and the parameter in 2 bytes, the master in 4 more, read and written.
  const double bytes = static_cast<double>(elements) * (size == 4 ? 28 : 24 + 3 * size);
  const auto line = [&](const char* kind, double step, double of_copy) {
    std::printf(
        "{\"what\": \"%s\", \"tensors\": %zu, \"elements\": %lld, \"threads\": %d, \"%s_ms\": "
        "%.2f, "
        "\"ns_per_element\": %.3f, \"GB_per_s\": %.1f, \"copy_GB_per_s\": %.1f, \"ratio\": %.2f}\n",
        what, tensors.size(), static_cast<long long>(elements), at::get_num_threads(), kind,
        step * 1e3, step * 1e9 / static_cast<double>(elements), bytes / step * 1e-9,
        copy.bytes() / of_copy * 1e-9, bytes / step / (copy.bytes() / of_copy));
  };
  line("best", steps.best(), copies.best());
  line("median", steps.median(), copies.median());
}

// A decoder of 12 layers with 640 channels and 16384 tokens: 69.6 M elements, most tensors small.
std::vector<at::Tensor> transformer() {
  constexpr int64_t kChannels = 640;
  std::vector<at::Tensor> tensors = {at::randn({16384, kChannels})};
  for (int layer = 0; layer < 12; ++layer) {
    for (const int64_t rows : {3, 1, 4})
      tensors.push_back(at::randn({rows * kChannels, kChannels}));
    tensors.push_back(at::randn({kChannels, 4 * kChannels}));
    for (const int64_t size : {3, 1, 4, 1, 1, 1, 1, 1})
      tensors.push_back(at::randn({size * kChannels}));
  }
  return tensors;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t elements = (argc > 1 ? std::atoll(argv[1]) : 64) << 20;
  Copy copy;
  report("one float32 tensor", {at::randn({elements})}, copy);
  report("transformer, float32", transformer(), copy);
  report("one bfloat16 tensor", {at::randn({elements}).to(at::kBFloat16)}, copy);
}
