// All ranks call an operation again and again and wait for it each time. A rank's samples give its
// median and 99th percentile; the slowest rank's are reported. Bytes are those of the whole buffer
// of a rank (all_gather's output, reduce_scatter's input); bus bandwidth counts what a ring would
// have to move, so that operations compare.
#include "lockstep/cli/bench_collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/cli/options.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using comm::Group;
using Json = nlohmann::ordered_json;

at::Tensor allocate(int64_t count, bool symmetric, const Group& group) {
  // Zeros, because the same buffer is summed thousands of times.
  if (!symmetric) return at::zeros({count});
  const std::vector<int64_t> shape{count};
  return comm::symmetric_empty(shape, DType::float32, group).zero_();
}

struct Benchmark {
  std::function<void()> run;
  double bus_factor;      // bytes a ring moves for each byte of the buffer
  double operations = 1;  // messages in one run
};

Benchmark make_benchmark(const std::string& op, int64_t count, bool symmetric, const Group& group) {
  const double n = group.size();
  const int64_t block = count / group.size();
  const at::Tensor whole = allocate(block * group.size(), symmetric, group),
                   other = allocate(block * group.size(), symmetric, group);
  const at::Tensor part = allocate(block, symmetric, group);
  if (op == "all_reduce")
    return {[=, &group] { comm::all_reduce(whole, group).wait(); }, 2 * (n - 1) / n};
  if (op == "reduce") return {[=, &group] { comm::reduce(whole, group).wait(); }, 1};
  if (op == "broadcast") return {[=, &group] { comm::broadcast(whole, group).wait(); }, 1};
  if (op == "all_gather")
    return {[=, &group] { comm::all_gather(whole, part, group).wait(); }, (n - 1) / n};
  if (op == "reduce_scatter")
    return {[=, &group] { comm::reduce_scatter(part, whole, group).wait(); }, (n - 1) / n};
  if (op == "all_to_all")
    return {[=, &group] { comm::all_to_all(other, whole, group).wait(); }, (n - 1) / n};
  if (op == "gather")
    return {[=, &group] { comm::gather(whole, part, group).wait(); }, (n - 1) / n};
  if (op == "scatter")
    return {[=, &group] { comm::scatter(part, whole, group).wait(); }, (n - 1) / n};
  if (op == "barrier") return {[&group] { comm::barrier(group).wait(); }, 0};
  if (op == "send_recv") {  // there and back between the first two ranks; half of it is one message
    const int rank = group.rank();
    return {[=, &group] {
              if (rank == 0) {
                comm::send(whole, 1, group).wait();
                comm::recv(other, 1, group).wait();
              } else if (rank == 1) {
                comm::recv(other, 0, group).wait();
                comm::send(whole, 0, group).wait();
              }
            },
            1, 2};
  }
  throw ConfigError(format("bench collectives: unknown operation '{}'; there are {}", op,
                           join(kBenchOperations)));
}

double percentile(std::vector<double>& samples, double fraction) {
  const auto at = static_cast<size_t>(fraction * static_cast<double>(samples.size() - 1));
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(at),
                   samples.end());
  return samples[at];
}

double slowest(double value, const Group& group) {
  at::Tensor all = at::full({1}, value, at::kDouble);
  comm::all_reduce(all, group, {.op = comm::ReduceOp::max}).wait();
  return all.item<double>();
}

Json measure(const std::string& op, int64_t bytes, bool symmetric, const Group& group,
             double seconds) {
  const Benchmark benchmark =
      make_benchmark(op, std::max<int64_t>(bytes / 4, group.size()), symmetric, group);
  const auto time_one = [&] {
    const auto start = Clock::now();
    benchmark.run();
    return seconds_since(start) * 1e6 / benchmark.operations;
  };
  for (int i = 0; i < 3; ++i) time_one();
  const double estimate = slowest(time_one(), group);
  const int repeats =
      static_cast<int>(std::clamp(seconds * 1e6 / std::max(estimate, 0.1), 20.0, 20'000.0));
  std::vector<double> samples;
  for (int i = 0; i < repeats; ++i) samples.push_back(time_one());
  const double p50 = slowest(percentile(samples, 0.5), group),
               p99 = slowest(percentile(samples, 0.99), group);
  const double bandwidth = static_cast<double>(bytes) / p50 / 1e3;
  return {{"backend", group.backend()},
          {"op", op},
          {"memory", symmetric ? "symmetric" : "ordinary"},
          {"bytes", bytes},
          {"ranks", group.size()},
          {"p50_us", p50},
          {"p99_us", p99},
          {"algbw_gbs", bandwidth},
          {"busbw_gbs", bandwidth * benchmark.bus_factor}};
}

}  // namespace

int bench_collectives_rank(const std::vector<std::string>& arguments) {
  std::string backend = "auto", output;
  std::vector<std::string> ops{"all_reduce"};
  std::vector<int64_t> sizes{4096};
  double seconds = 0.5;
  int threads = 0;
  CLI::App app;
  app.add_option("--backend", backend);
  app.add_option("--ops", ops)->delimiter(',');
  app.add_option("--bytes", sizes)->delimiter(',');
  app.add_option("--seconds", seconds);
  app.add_option("--threads", threads);
  app.add_option("--output", output)->required();
  if (const auto status = parse(app, "bench collectives", "", arguments)) return *status;

  const auto body = [&](const Group& group) {
    Json results = Json::array();
    for (const std::string& op : ops) {
      for (const int64_t bytes : sizes) {
        for (const bool symmetric : {true, false}) {
          if (symmetric && group.backend() != "shm") continue;
          results.push_back(measure(op, bytes, symmetric, group, seconds));
        }
      }
    }
    if (group.rank() == 0) std::ofstream(output) << results;
  };
  if (threads > 0) {
    comm::run_threads(threads, body, {.backend = backend});
  } else {
    body(comm::init({.backend = backend}));
  }
  return 0;
}

}  // namespace lockstep::cli
