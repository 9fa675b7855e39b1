// SPDX-License-Identifier: Apache-2.0
// Time of the norm that does not depend on the sharding, next to the plain one.
// OMP_NUM_THREADS=1 build/bin/bench_grad_norm [MILLIONS OF ELEMENTS]
//
// One JSON line for each norm of one float32 gradient: the median time, and the plain L2 norm's
// time divided by it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/optim/clip.h"

using namespace lockstep;

namespace {

double median_ms(const std::vector<at::Tensor>& parameters, const optim::NormOptions& options) {
  std::vector<double> times;
  for (int i = 0; i < 21; ++i) {
    const auto start = Clock::now();
    optim::grad_norm(parameters, options);
    times.push_back(seconds_since(start) * 1e3);
  }
  std::nth_element(times.begin(), times.begin() + 10, times.end());
  return times[10];
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t elements = (argc > 1 ? std::atoll(argv[1]) : 50) * 1'000'000;
  const std::vector<at::Tensor> parameters = {at::empty({elements}).requires_grad_()};
  parameters[0].mutable_grad() = at::randn({elements});
  const double plain = median_ms(parameters, {});
  const std::pair<const char*, optim::NormOptions> norms[] = {
      {"l2", {}}, {"max", {.type = optim::NormType::max}}, {"l2, exact", {.exact = true}}};
  for (const auto& [name, options] : norms) {
    const double time = median_ms(parameters, options);
    std::printf(
        "{\"norm\": \"%s\", \"elements\": %lld, \"threads\": %d, \"median_ms\": %.1f, "
        "\"ratio\": %.2f}\n",
        name, static_cast<long long>(elements), at::get_num_threads(), time, plain / time);
  }
}
