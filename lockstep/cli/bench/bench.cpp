// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/bench/bench.h"

#include <iostream>

#include "lockstep/cli/bench/codecs.h"
#include "lockstep/cli/bench/collectives.h"
#include "lockstep/cli/bench/machine.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {

int bench(const std::vector<std::string>& arguments) {
  const std::string what = arguments.empty() ? "" : arguments[0];
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                      arguments.end());
  if (what == "--help" || what == "-h") {
    std::cout << "Measures the performance of this machine.\n"
                 "Usage: lockstep bench collectives [OPTIONS]    collectives between ranks\n"
                 "       lockstep bench codecs [OPTIONS]         encodings of offloaded state\n"
                 "       lockstep bench machine [OPTIONS]        all that lockstep plan needs\n";
    return 0;
  }
  if (what == "collectives") return bench_collectives(rest);
  if (what == "codecs") return bench_codecs(rest);
  if (what == "machine") return bench_machine(rest);
  throw ConfigError(format(
      "bench: unknown subcommand '{}'; use lockstep bench collectives, codecs or machine", what));
}

}  // namespace lockstep::cli
