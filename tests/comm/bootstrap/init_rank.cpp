// SPDX-License-Identifier: Apache-2.0
// A rank for tests of init(): says who it is and what it sums up to, with one backend after
// another.
//   init_rank [BACKEND,BACKEND... [ELEMENTS [STRATEGY]]]
//   init_rank --cycles N ...   before that: init, collectives, drop, N times, with random delays
//   init_rank --vanish ...     the last rank ends after init, without a flush
//   init_rank --outlive ...    rank 0 ends after the sum; the other two still have to communicate,
//                              and to begin an operation that no rank waits for
#include <ATen/ATen.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace {

using namespace lockstep;

struct Arguments {
  explicit Arguments(std::vector<std::string> words) {
    if (!words.empty() && words[0] == "--cycles") {
      cycles = std::stoi(words.at(1));
      words.erase(words.begin(), words.begin() + 2);
    } else if (!words.empty() && words[0] == "--vanish") {
      vanish = true;
      words.erase(words.begin());
    } else if (!words.empty() && words[0] == "--outlive") {
      outlive = true;
      words.erase(words.begin());
    }
    words.resize(std::max<size_t>(words.size(), 3));
    std::istringstream list(words[0]);
    for (std::string backend; std::getline(list, backend, ',');) backends.push_back(backend);
    if (backends.empty()) backends.push_back(options.backend);
    if (!words[1].empty()) elements = std::stol(words[1]);
    if (!words[2].empty()) options.strategy = layout::parse_comm_strategy(words[2]);
  }
  comm::InitOptions options;
  std::vector<std::string> backends;
  int64_t elements = 3;
  int cycles = 0;
  bool vanish = false, outlive = false;
};

// Ranks reach each call at different times.
void dawdle(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 3 == 0 ? random() % 4000 : 0));
}

void expect_sum(const comm::Group& group, int64_t elements, int64_t mine, int64_t wanted,
                int cycle) {
  at::Tensor sum = at::full({elements}, mine, at::kLong);
  comm::all_reduce(sum, group).wait();
  if (!sum.eq(wanted).all().item<bool>())
    throw Error(format("cycle {}: rank {} of '{}' has the sum {}, must be {}", cycle, group.rank(),
                       group.name(), sum[0].item<int64_t>(), wanted));
}

// Every value tells from which cycle it comes.
void run_cycle(const Arguments& arguments, int cycle, std::mt19937& random) {
  const comm::Group world = comm::init(arguments.options);
  const int64_t n = world.size(), of_ranks = n * (n - 1) / 2;
  dawdle(random);
  expect_sum(world, arguments.elements, 1000 * cycle + world.rank(), 1000 * cycle * n + of_ranks,
             cycle);
  if (cycle % 4 == 1) {
    const comm::Group all = world.split(0, world.rank());
    dawdle(random);
    expect_sum(all, arguments.elements, 7000 * cycle + world.rank(), 7000 * cycle * n + of_ranks,
               cycle);
  }
  // What goes wrong in one incarnation is nothing to the next. MPI ends with what it has not done.
  if (cycle % 100 == 10 && world.backend() != "mpi" && world.rank() + 1 < n) {
    try {
      at::Tensor late = at::ones({3});
      comm::all_reduce(late, world, {.timeout = milliseconds{50}}).wait();
      throw ConfigError(format("cycle {}: a sum without all ranks", cycle));
    } catch (const CommError&) {
    }
  }
  dawdle(random);
}

void run(const Arguments& arguments, std::mt19937& random) {
  for (int cycle = 0; cycle < arguments.cycles; ++cycle) {
    run_cycle(arguments, cycle, random);
    dawdle(random);
  }
  if (arguments.cycles > 0) std::printf("%d cycles are right\n", arguments.cycles);
  const comm::Group world = comm::init(arguments.options);
  if (arguments.vanish && world.rank() + 1 == world.size()) {
    std::printf("the last words of rank %d\n", world.rank());
    _exit(3);
  }
  at::Tensor sum = at::full({arguments.elements}, world.rank() + 1, at::kLong);
  comm::all_reduce(sum, world).wait();
  std::printf("rank %d of %d, local %d of %d, backend %s, sum %ld\n", world.rank(), world.size(),
              world.local_rank(), world.local_size(), std::string(world.backend()).c_str(),
              sum[0].item<int64_t>());
  const auto begin_and_drop = [&] {
    const comm::Work dropped = comm::all_reduce(at::ones({arguments.elements}), world);
  };
  if (arguments.outlive && world.rank() == 0) begin_and_drop();
  if (arguments.outlive && world.rank() == 1) {
    std::this_thread::sleep_for(
        milliseconds{1500});  // longer than a lost rank 0 would be waited for
    comm::send(sum, 2, world).wait();
  } else if (arguments.outlive && world.rank() == 2) {
    at::Tensor received = at::zeros_like(sum);
    comm::recv(received, 1, world).wait();
    std::printf("received %ld\n", received[0].item<int64_t>());
  }
  if (arguments.outlive && world.rank() != 0) begin_and_drop();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Arguments arguments({argv + 1, argv + argc});
    std::mt19937 random(static_cast<unsigned>(getpid()));
    for (const std::string& backend : arguments.backends) {
      arguments.options.backend = backend;
      run(arguments, random);
    }
    return 0;
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "config error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
