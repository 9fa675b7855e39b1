// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/report.h"

#include <iostream>

#include "lockstep/cli/common/options.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/flight/dump.h"

namespace lockstep::cli {

int report(const std::vector<std::string>& arguments) {
  std::string folder;
  bool text = false;
  CLI::App app;
  app.add_option("FOLDER", folder, "Run folder, or folder of --log-dir")->required();
  app.add_flag("--text", text, "Print what the flight recorders of the ranks say")->required();
  if (const auto status =
          parse(app, "report",
                "Says which rank left the common order of operations first, and what each rank did "
                "when the job failed, hung, or was sent SIGUSR2.\n"
                "Usage: lockstep report FOLDER --text\n",
                arguments))
    return *status;
  const std::vector<flight::Flight> flights = flight::read_dumps(folder);
  std::cout << flight::verdict(flights) << "\n";
  for (const flight::Flight& flight : flights) {
    std::cout << format("rank {} (pid {} on {}): {}{}\n", flight.rank, flight.pid, flight.host,
                        flight.end.empty() ? "" : flight.end + "; ", flight.doing());
  }
  const auto missing = flights.front().world - static_cast<int>(flights.size());
  if (missing > 0)
    std::cout << format("{} of {} ranks have no dump here\n", missing, flights.front().world);
  return 0;
}

}  // namespace lockstep::cli
