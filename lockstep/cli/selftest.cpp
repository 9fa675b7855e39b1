#include "lockstep/cli/selftest.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <iostream>
#include <mutex>
#include <set>

#include "lockstep/cli/options.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

// Runs every check on all ranks; rank 0 prints. Returns how many did not hold.
int run_checks(const comm::Group& world, bool large) {
  int failures = 0;
  const bool speaks = world.rank() == 0;
  if (speaks)
    std::cout << format("backend {}, {} rank{}\n", world.backend(), world.size(),
                        world.size() > 1 ? "s" : "")
              << std::flush;
  for (const comm::ConformanceCheck& check : comm::conformance_checks(large)) {
    // A group of its own, so that a check that breaks it does not spoil the next.
    const comm::Group group = world.split(0, world.rank());
    const auto start = Clock::now();
    std::string problem;
    try {
      check.run(group);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty())
      std::cerr << format("  rank {}: {}: {}\n", world.rank(), check.name, problem);
    at::Tensor failed = at::full({1}, problem.empty() ? 0 : 1, at::kInt);
    comm::all_reduce(failed, world).wait();
    const int ranks = failed.item<int>();
    failures += ranks > 0;
    if (speaks) {
      const std::string verdict =
          ranks == 0 ? "ok" : format("FAILED on {} rank{}", ranks, ranks > 1 ? "s" : "");
      std::cout << format("  {:<56} {} ({:.2f} s)\n", check.name, verdict, seconds_since(start))
                << std::flush;
    }
  }
  if (speaks)
    std::cout << (failures == 0 ? "all hold\n" : format("{} do not hold\n", failures))
              << std::flush;
  return failures;
}

}  // namespace

int selftest_rank(const std::vector<std::string>& arguments) {
  std::string backend = "auto";
  bool large = false;
  int threads = 0;
  CLI::App app;
  app.add_option("--backend", backend);
  app.add_flag("--large", large);
  app.add_option("--threads", threads);
  if (const auto status = parse(app, "selftest", "", arguments)) return *status;
  if (threads > 0) {
    int failures = 0;
    std::mutex mutex;
    comm::run_threads(threads,
                      [&](const comm::Group& world) {
                        at::set_num_threads(1);
                        const int count = run_checks(world, large);
                        const std::lock_guard lock(mutex);
                        failures = std::max(failures, count);
                      },
                      {.backend = backend, .check = true});
    return failures == 0 ? 0 : 1;
  }
  return run_checks(comm::init({.backend = backend, .check = true}), large) == 0 ? 0 : 1;
}

}  // namespace lockstep::cli
