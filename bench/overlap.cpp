// SPDX-License-Identifier: Apache-2.0
// How much of a collective's time hides behind computation: computes alone, communicates alone,
// then both at once. lockstep run -n 2 build/bin/bench_overlap [BACKEND]
//
// hidden = (compute + communicate - together) / min(compute, communicate): 1 is perfect, 0 is none.
// Needs a core to spare for each rank's progress thread.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <functional>

#include "lockstep/comm/collectives.h"

using namespace lockstep;

int main(int argc, char** argv) {
  const comm::Group group = comm::init({.backend = argc > 1 ? argv[1] : "auto"});
  at::set_num_threads(1);
  at::Tensor gradient = at::zeros({16 << 20}), a = at::ones({512, 512}), b;
  const auto milliseconds_of = [&](const std::function<void()>& body) {
    std::vector<double> samples;
    for (int i = 0; i < 11; ++i) {
      comm::barrier(group).wait();
      const auto start = Clock::now();
      body();
      samples.push_back(seconds_since(start) * 1e3);
    }
    std::nth_element(samples.begin(), samples.begin() + 5, samples.end());
    at::Tensor slowest = at::full({1}, samples[5], at::kDouble);
    comm::all_reduce(slowest, group, {.op = comm::ReduceOp::max}).wait();
    return slowest.item<double>();
  };
  const double communicate = milliseconds_of([&] { comm::all_reduce(gradient, group).wait(); });
  const double one = milliseconds_of([&] { b = a.matmul(a); });
  const int products =
      std::max(1, static_cast<int>(communicate / one));  // about as long as the communication
  const auto compute_all = [&] {
    for (int i = 0; i < products; ++i) b = a.matmul(a);
  };
  const double compute = milliseconds_of(compute_all);
  const double together = milliseconds_of([&] {
    comm::Work work = comm::all_reduce(gradient, group);
    compute_all();
    work.wait();
  });
  if (group.rank() == 0) {
    std::printf(
        "%s, %d ranks, 64 MB all_reduce: compute %.2f ms, communicate %.2f ms, together %.2f ms, "
        "hidden %.0f %%\n",
        std::string(group.backend()).c_str(), group.size(), compute, communicate, together,
        100 * (compute + communicate - together) / std::min(compute, communicate));
  }
}
