// SPDX-License-Identifier: Apache-2.0
// All ranks call an operation again and again and wait for it each time. A rank's samples give its
// median and 99th percentile; the slowest rank's are reported. Bytes are those of the whole buffer
// of a rank (all_gather's output, reduce_scatter's input); bus bandwidth counts what a ring would
// have to move, so that operations compare.
//
// Strategies take turns in many rounds, each time in another order, so that a busy moment of the
// machine, or what the one before has left behind, falls on all of them. They are compared within
// each round, and the median over the rounds counts. Where a group's memory happens to lie makes
// some percent of a small message, so groups are recreated several times.
#include "lockstep/cli/bench/collectives_rank.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "lockstep/cli/common/options.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/host_layout.h"
#include "lockstep/comm/strategy/table.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using comm::Group;
using Json = nlohmann::ordered_json;
using layout::CommStrategy;

constexpr int kSets = 3;                             // of groups
constexpr int kFewestRounds = 11, kMostRounds = 67;  // of each set
// Another strategy must be so much faster than the backend's own to be chosen for a table.
constexpr double kWorthwhile = 0.95;

// What the backend is for.
at::Device device_of(const Group& group) {
  if (group.backend() != "nccl") return at::kCPU;
  const int count = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
  return {at::kCUDA, static_cast<c10::DeviceIndex>(group.local_rank() % count)};
}

// A device is still busy when the work was waited for.
void finish(at::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

at::Tensor allocate(int64_t count, bool symmetric, const Group& group) {
  // Zeros, because the same buffer is summed thousands of times.
  if (!symmetric) return at::zeros({count}, device_of(group));
  const std::vector<int64_t> shape{count};
  return comm::symmetric_empty(shape, DType::float32, group, device_of(group)).zero_();
}

// What all strategies read and write.
struct Buffers {
  Buffers(const std::string& op, int64_t count, bool symmetric, const Group& group) {
    const int64_t block = count / group.size();
    whole = allocate(block * group.size(), symmetric, group);
    if (op == "all_to_all" || op == "send_recv")
      other = allocate(block * group.size(), symmetric, group);
    part = allocate(block, symmetric, group);
  }
  at::Tensor whole, other, part;
};

struct Benchmark {
  std::function<void()> run;
  double bus_factor;      // bytes a ring moves for each byte of the buffer
  double operations = 1;  // messages in one run
};

Benchmark make_benchmark(const std::string& op, const Buffers& buffers, const Group& group) {
  const double n = group.size();
  if (op == "all_reduce")
    return {[buffers, &group] { comm::all_reduce(buffers.whole, group).wait(); }, 2 * (n - 1) / n};
  if (op == "reduce") return {[buffers, &group] { comm::reduce(buffers.whole, group).wait(); }, 1};
  if (op == "broadcast")
    return {[buffers, &group] { comm::broadcast(buffers.whole, group).wait(); }, 1};
  if (op == "all_gather")
    return {[buffers, &group] { comm::all_gather(buffers.whole, buffers.part, group).wait(); },
            (n - 1) / n};
  if (op == "reduce_scatter")
    return {[buffers, &group] { comm::reduce_scatter(buffers.part, buffers.whole, group).wait(); },
            (n - 1) / n};
  if (op == "all_to_all")
    return {[buffers, &group] { comm::all_to_all(buffers.other, buffers.whole, group).wait(); },
            (n - 1) / n};
  if (op == "gather")
    return {[buffers, &group] { comm::gather(buffers.whole, buffers.part, group).wait(); },
            (n - 1) / n};
  if (op == "scatter")
    return {[buffers, &group] { comm::scatter(buffers.part, buffers.whole, group).wait(); },
            (n - 1) / n};
  if (op == "barrier") return {[&group] { comm::barrier(group).wait(); }, 0};
  if (op == "send_recv") {  // there and back between the first two ranks; half of it is one message
    const int rank = group.rank();
    return {[buffers, rank, &group] {
              if (rank == 0) {
                comm::send(buffers.whole, 1, group).wait();
                comm::recv(buffers.other, 1, group).wait();
              } else if (rank == 1) {
                comm::recv(buffers.other, 0, group).wait();
                comm::send(buffers.whole, 0, group).wait();
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

// One group for each strategy.
struct Contender {
  CommStrategy strategy;
  Group group;
};

// Each once more.
std::vector<Contender> make_anew(const std::vector<Contender>& contenders) {
  std::vector<Contender> others;
  for (const auto& [strategy, group] : contenders)
    others.push_back({strategy, group.with_strategy(strategy)});
  return others;
}

// What was measured of a contender.
struct Series {
  CommStrategy strategy;
  std::string backend;
  double bus_factor;
  int repeats = 0;                                // in each round
  std::vector<double> samples = {}, rounds = {};  // rounds: the mean of each
};

// How series compare to the best of those that do not choose among the others.
std::vector<double> to_best(const std::vector<Series>& all, const Group& group) {
  std::vector<at::Tensor> rounds;
  for (const Series& series : all) {
    rounds.push_back(at::tensor(series.rounds, at::kDouble));
    comm::all_reduce(rounds.back(), group, {.op = comm::ReduceOp::max}).wait();
  }
  const auto median = [](const at::Tensor& values) { return values.median().item<double>(); };
  size_t best = all.size();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].strategy == CommStrategy::adaptive) continue;
    if (best == all.size() || median(rounds[i]) < median(rounds[best])) best = i;
  }
  if (best == all.size()) best = 0;
  std::vector<double> ratios;
  for (const at::Tensor& mine : rounds) ratios.push_back(median(mine / rounds[best]));
  return ratios;
}

// Adds what one set of groups takes; the first one finds out how often. `meeting` has all ranks.
void measure_set(const std::string& op, const Buffers& buffers,
                 const std::vector<Contender>& contenders, double seconds, const Group& meeting,
                 std::vector<Series>& all, int& num_rounds) {
  std::vector<Benchmark> benchmarks;
  for (const Contender& contender : contenders)
    benchmarks.push_back(make_benchmark(op, buffers, contender.group));
  const at::Device device = device_of(meeting);
  const auto time_one = [&](size_t i) {
    // Another strategy may have let ranks go at different times.
    if (contenders.size() > 1) comm::barrier(meeting).wait();
    const auto start = Clock::now();
    benchmarks[i].run();
    finish(device);
    return seconds_since(start) * 1e6 / benchmarks[i].operations;
  };
  finish(device);
  for (size_t i = 0; i < contenders.size(); ++i) time_one(i);

  if (all.empty()) {
    std::vector<double> estimates;
    for (size_t i = 0; i < contenders.size(); ++i) {
      estimates.push_back(std::max(0.1, slowest(std::min(time_one(i), time_one(i)), meeting)));
      all.push_back({contenders[i].strategy, std::string(contenders[i].group.backend()),
                     benchmarks[i].bus_factor});
    }
    const double longest = *std::max_element(estimates.begin(), estimates.end());
    num_rounds = static_cast<int>(
        std::clamp(seconds * 1e6 / longest, 1.0 * kFewestRounds, 1.0 * kMostRounds));
    for (size_t i = 0; i < all.size(); ++i)
      all[i].repeats =
          static_cast<int>(std::clamp(seconds * 1e6 / estimates[i] / num_rounds, 1.0, 2'000.0));
  }
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(static_cast<unsigned>(all[0].rounds.size()));  // the same on all ranks
  for (int round = 0; round < num_rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t turn : order) {
      Series& series = all[turn];
      double sum = 0;
      for (int i = 0; i < series.repeats; ++i) {
        series.samples.push_back(time_one(turn));
        sum += series.samples.back();
      }
      series.rounds.push_back(sum / series.repeats);
    }
  }
  comm::barrier(meeting).wait();  // all have ended before groups go
}

// A row for each contender. One alone is measured as it is; several together with a group that is
// none of them.
std::vector<Json> measure(const std::string& op, int64_t bytes, bool symmetric,
                          const std::vector<Contender>& contenders, double seconds) {
  const Group& first = contenders[0].group;
  const Buffers buffers(op, std::max<int64_t>(bytes / 4, first.size()), symmetric, first);
  std::vector<Series> all;
  int num_rounds = 0;
  if (contenders.size() == 1) {
    measure_set(op, buffers, contenders, seconds, first, all, num_rounds);
  } else {
    for (int set = 0; set < kSets; ++set)
      measure_set(op, buffers, make_anew(contenders), seconds / kSets, first, all, num_rounds);
  }
  const std::vector<double> ratios = to_best(all, first);
  std::vector<Json> rows;
  for (size_t i = 0; i < all.size(); ++i) {
    const double p50 = slowest(percentile(all[i].samples, 0.5), first),
                 p99 = slowest(percentile(all[i].samples, 0.99), first);
    const double bandwidth = static_cast<double>(bytes) / p50 / 1e3;
    rows.push_back({{"backend", all[i].backend},
                    {"strategy", layout::name_of(all[i].strategy)},
                    {"op", op},
                    {"memory", symmetric ? "symmetric" : "ordinary"},
                    {"bytes", bytes},
                    {"ranks", first.size()},
                    {"p50_us", p50},
                    {"p99_us", p99},
                    {"algbw_gbs", bandwidth},
                    {"busbw_gbs", bandwidth * all[i].bus_factor},
                    {"ratio", ratios[i]}});
  }
  return rows;
}

// The strategy for a table, from the rows of one operation and size in all kinds of memory.
CommStrategy fastest(const std::vector<std::vector<Json>>& kinds) {
  CommStrategy chosen = CommStrategy::all_reduce;
  double least = kWorthwhile;
  for (size_t i = 0; i < kinds[0].size(); ++i) {
    double ratio = 0;  // to the backend's own, which comes first; where it is worst
    for (const auto& rows : kinds)
      ratio = std::max(ratio, rows[i]["ratio"].get<double>() / rows[0]["ratio"].get<double>());
    if (ratio >= least) continue;
    least = ratio;
    chosen = layout::parse_comm_strategy(kinds[0][i]["strategy"].get<std::string>());
  }
  return chosen;
}

fabric::OpKind kind_of(const std::string& op) {
  for (const auto kind : {fabric::OpKind::all_reduce, fabric::OpKind::reduce_scatter,
                          fabric::OpKind::all_gather, fabric::OpKind::broadcast}) {
    if (op == fabric::name_of(kind)) return kind;
  }
  throw ConfigError(format("bench collectives: {} has no strategies to choose from", op));
}

// What the command line asks for.
struct Request {
  std::string backend = "auto", output;
  std::vector<std::string> ops{"all_reduce"}, strategies{"all-reduce"};
  std::vector<int64_t> sizes{4096};
  double seconds = 0.5;
  int threads = 0;
  bool calibrate = false;
};

std::vector<Contender> make_contenders(const Request& request, const Group& world) {
  std::vector<Contender> contenders;
  const auto layout = comm::host_layout(world);
  const bool has_hierarchy =
      layout.hosts.size() > 1 && layout.hosts.size() < static_cast<size_t>(world.size());
  for (const std::string& name : request.strategies) {
    const auto strategy = layout::parse_comm_strategy(name);
    // Else it is the backend's own, and noise would tell one from the other.
    if (request.calibrate && strategy == CommStrategy::hierarchical && !has_hierarchy) continue;
    contenders.push_back(
        {strategy, strategy == CommStrategy::all_reduce ? world : world.with_strategy(strategy)});
  }
  return contenders;
}

void run_request(const Request& request, const Group& world) {
  const auto layout = comm::host_layout(world);
  if (request.calibrate && world.backend() == "nccl")
    throw ConfigError(
        "bench collectives: NCCL chooses its own algorithms for tensors on GPUs, under every "
        "strategy; there is nothing to calibrate");
  if (request.calibrate && layout.hosts.size() == 1 &&
      world.backend() != comm::backend_inside(std::string(world.backend()))) {
    throw ConfigError(
        format("bench collectives: all {} ranks are on one host, where strategy adaptive chooses "
               "for backend shm, not for {}; calibrate shm",
               world.size(), world.backend()));
  }
  const auto contenders = make_contenders(request, world);
  Json results = Json::array();
  comm::strategy::Table table;
  for (const std::string& op : request.ops) {
    for (const int64_t bytes : request.sizes) {
      std::vector<std::vector<Json>> kinds;
      for (const bool symmetric : {true, false}) {
        if (symmetric && world.backend() != "shm" && world.backend() != "nccl") continue;
        kinds.push_back(measure(op, bytes, symmetric, contenders, request.seconds));
        for (const Json& row : kinds.back()) results.push_back(row);
      }
      if (request.calibrate) table.add(kind_of(op), bytes, fastest(kinds));
    }
  }
  if (world.rank() != 0) return;
  if (request.calibrate) {
    comm::strategy::save_table(comm::strategy::table_path(),
                               format("{} {}", world.backend(), layout.to_text()), table);
  }
  std::ofstream(request.output) << results;
}

}  // namespace

int bench_collectives_rank(const std::vector<std::string>& arguments) {
  Request request;
  CLI::App app;
  app.add_option("--backend", request.backend);
  app.add_option("--ops", request.ops)->delimiter(',');
  app.add_option("--strategy", request.strategies)->delimiter(',');
  app.add_option("--bytes", request.sizes)->delimiter(',');
  app.add_option("--seconds", request.seconds);
  app.add_option("--threads", request.threads);
  app.add_flag("--calibrate", request.calibrate);
  app.add_option("--output", request.output)->required();
  if (const auto status = parse(app, "bench collectives", "", arguments)) return *status;

  const auto body = [&](const Group& group) { run_request(request, group); };
  if (request.threads > 0) {
    comm::run_threads(request.threads, body, {.backend = request.backend});
  } else {
    body(comm::init({.backend = request.backend}));
  }
  return 0;
}

}  // namespace lockstep::cli
