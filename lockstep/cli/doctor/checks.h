// SPDX-License-Identifier: Apache-2.0
// What `lockstep doctor` looks at without libtorch.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/report.h"

namespace lockstep::cli {

// Where to look; tests look elsewhere.
struct Machine {
  std::filesystem::path root = "/";
  std::function<std::optional<std::string>(const char* name)> variable;
  int allowed_cores = 1, online_cores = 1;

  static Machine here();
};

using Findings = std::vector<Finding>;

Findings check_cores(const Machine& machine);  // binding and the control group's limit
Findings check_thread_variables(const Machine& machine);
Findings check_memory(const Machine& machine);  // with /dev/shm
Findings check_limits(const Machine& machine);  // of open files and locked memory
Findings check_processes();                     // what the launcher and the shm backend need
Findings check_blas(const Machine& machine);
Findings check_mpi(const Machine& machine);
Findings check_gpus(const Machine& machine);

}  // namespace lockstep::cli
