// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/selftest_rank.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/utsname.h>
#include <torch/cuda.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>

#include "lockstep/cli/common/options.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/conformance/conformance.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/core/version.h"

namespace lockstep::cli {
namespace {

// "lockstep 0.1.0, libtorch 2.11.0, Open MPI v4.1.4; Linux 6.1.0 x86_64"
std::string describe_software(const comm::Group& world) {
  const std::string backend(world.backend());
  const std::string library = backend == "none" ? "" : comm::backend_version(backend);
  utsname system{};
  uname(&system);
  return format("lockstep {}, libtorch {}{}{}; {} {} {}", LOCKSTEP_VERSION, TORCH_VERSION,
                library.empty() ? "" : ", ", library, system.sysname, system.release,
                system.machine);
}

// The names of the GPUs, as the driver knows them.
std::vector<std::string> gpu_models() {
  std::vector<std::string> models;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none)) {
    std::ifstream file(gpu.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("Model:")) continue;
      const size_t start = line.find_first_not_of(" \t", 6);
      if (start != std::string::npos) models.push_back(line.substr(start));
    }
  }
  return models;
}

// "node1, 16 cores, 2 GPUs usable of 2 (NVIDIA H200)"
std::string describe_host() {
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  std::string text = format("{}, {} core{}", host_name(), cores, cores > 1 ? "s" : "");
  const auto models = gpu_models();
  const size_t usable = at::hasCUDA() ? torch::cuda::device_count() : 0;
  if (models.empty() && usable == 0) return text + ", no GPU";
  const std::set<std::string> kinds(models.begin(), models.end());
  return text + format(", {} GPU{} usable{}", usable, usable == 1 ? "" : "s",
                       kinds.empty() ? "" : format(" of {} ({})", models.size(), join(kinds)));
}

// "ranks 0-7, 16-23"
std::string ranks_with(const std::string& text, const std::vector<std::string>& texts) {
  std::vector<std::string> runs;
  size_t count = 0;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] != text) continue;
    size_t last = rank;
    while (last + 1 < texts.size() && texts[last + 1] == text) ++last;
    runs.push_back(last == rank ? std::to_string(rank) : format("{}-{}", rank, last));
    count += last - rank + 1;
    rank = last;
  }
  return format("rank{} {}", count > 1 ? "s" : "", join(runs));
}

// What ran: versions and hosts, enough to read a report from a machine that one cannot log in to.
void introduce(const comm::Group& world) {
  const auto versions = comm::gather_texts(describe_software(world), world),
             hosts = comm::gather_texts(describe_host(), world);
  if (world.rank() != 0) return;
  const auto print = [&](const std::vector<std::string>& texts) {
    std::vector<std::string> known;  // one line for each that differs
    for (const std::string& text : texts)
      if (std::find(known.begin(), known.end(), text) == known.end()) known.push_back(text);
    for (const std::string& text : known)
      std::cout << text << (world.size() > 1 ? ": " + ranks_with(text, texts) : "") << "\n";
  };
  print(versions);
  print(hosts);
  std::cout << format("backend {}, {} rank{}\n", world.backend(), world.size(),
                      world.size() > 1 ? "s" : "")
            << std::flush;
}

// Runs every check on all ranks; rank 0 prints. Returns how many did not hold.
int run_checks(const comm::Group& world, bool large) {
  int failures = 0;
  const bool speaks = world.rank() == 0;
  introduce(world);
  std::vector<comm::ConformanceCheck> checks = comm::conformance_checks(large);
  if (world.backend() == "nccl") {
    // Host memory is its companion's; what the GPUs do is what it is for.
    const int devices = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
    const std::string device = format("cuda:{}", world.local_rank() % devices);
    for (auto& check : comm::conformance_checks(large, device)) checks.push_back(std::move(check));
  }
  for (const comm::ConformanceCheck& check : checks) {
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
  // One GPU is enough to try NCCL.
  return run_checks(comm::init({.backend = backend,
                                .check = true,
                                .force_backend_on_single_rank = backend == "nccl"}),
                    large) == 0
             ? 0
             : 1;
}

}  // namespace lockstep::cli
