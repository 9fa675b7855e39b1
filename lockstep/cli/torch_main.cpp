// `lockstep-torch`: the commands that need libtorch, one process a rank. `lockstep` starts it;
// loading libtorch takes half a second, which the other commands do not have to pay.
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/cli/bench_collectives.h"
#include "lockstep/cli/selftest.h"
#include "lockstep/core/error.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                        arguments.end());
    if (!arguments.empty() && arguments[0] == "selftest") return cli::selftest_rank(rest);
    if (!arguments.empty() && arguments[0] == "bench-collectives")
      return cli::bench_collectives_rank(rest);
    throw ConfigError("lockstep-torch is started by lockstep; see lockstep --help");
  } catch (const ConfigError& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 2;
  } catch (const std::exception& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 1;
  }
}
