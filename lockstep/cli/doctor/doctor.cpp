// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/doctor/doctor.h"

#include <iostream>

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/common/torch_program.h"
#include "lockstep/cli/doctor/checks.h"
#include "lockstep/cli/doctor/report.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/version.h"

namespace lockstep::cli {

int doctor(const std::vector<std::string>& arguments) {
  CLI::App app;
  if (const auto status = parse(app, "doctor",
                                "Checks this machine for training: cores, memory, GPUs, libraries, "
                                "and anything that would slow a run down.\n"
                                "The last checks take a few seconds because they load libtorch and "
                                "time matrix products.\nUsage: "
                                "lockstep doctor\n",
                                arguments))
    return *status;

  bool possible = true;
  const auto report = [&](const Findings& findings) {
    for (const Finding& finding : findings) {
      print(std::cout, finding);
      possible = possible && finding.verdict != Verdict::problem;
    }
  };
  report({{Verdict::ok, "Lockstep", LOCKSTEP_VERSION}});
  const Machine machine = Machine::here();
  report(check_cores(machine));
  report(check_thread_variables(machine));
  report(check_memory(machine));
  report(check_limits(machine));
  report(check_processes());
  report(check_blas(machine));
  report(check_mpi(machine));
  report(check_gpus(machine));
  try {
    // It prints lines of its own; 1 is a problem that is among them.
    const int status = run_program({torch_path(), "doctor"});
    possible = possible && status == 0;
    if (status > 1) {
      report({{Verdict::problem, "libtorch",
               format("lockstep-torch ended with status {}: build it for this machine", status)}});
    }
  } catch (const Error& failure) {
    report({{Verdict::problem, "libtorch", failure.what()}});
  }
  return possible ? 0 : 1;
}

}  // namespace lockstep::cli
