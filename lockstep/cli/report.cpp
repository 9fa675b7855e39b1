// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/report.h"

#include <filesystem>
#include <fstream>
#include <iostream>

#include "lockstep/cli/common/options.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/dump.h"
#include "lockstep/report/csv.h"
#include "lockstep/report/page.h"
#include "lockstep/report/run.h"
#include "lockstep/report/text.h"
#include "lockstep/report/trace.h"
#include "lockstep/report/watch.h"

namespace lockstep::cli {
namespace {

// Written to a temporary file first, so that a reader never sees half a page.
void write_file(const std::string& path, const std::function<void(std::ostream&)>& write) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  if (file) write(file);
  file.close();
  std::error_code failure;
  if (file) std::filesystem::rename(temporary, path, failure);
  if (!file || failure) {
    std::filesystem::remove(temporary, failure);
    throw ConfigError(format("report: cannot write {}; choose another place with --output", path));
  }
}

void require_one(const std::vector<std::string>& folders, const char* option) {
  if (folders.size() != 1)
    throw ConfigError(format("report: {} takes one run, not {}", option, folders.size()));
}

void write_page(const std::vector<std::string>& folders, const std::string& output) {
  std::vector<report::Run> runs;
  for (const std::string& folder : folders)
    runs.push_back(report::read_run(folder, report::rows_of_page(folders.size())));
  const std::string path = !output.empty()       ? output
                           : folders.size() == 1 ? runs[0].path + "/report.html"
                                                 : std::string("report.html");
  write_file(path, [&](std::ostream& out) { out << report::page(runs); });
  std::cout << "report " << config::shown_path(std::filesystem::absolute(path).string()) << "\n";
}

void print_text(const std::vector<std::string>& folders) {
  for (const std::string& folder : folders) {
    // A folder of logs has recorders, and is no run.
    std::cout << (report::is_run(folder) ? report::text_report(report::read_run(folder))
                                         : report::text_of_flights(flight::read_dumps(folder)));
  }
}

}  // namespace

int report(const std::vector<std::string>& arguments) {
  std::vector<std::string> folders;
  std::string output, csv, trace;
  bool text = false, watch = false;
  CLI::App app;
  app.add_option(
         "RUN", folders,
         "Run folders, or one folder of run folders; with --text also a folder of --log-dir")
      ->required();
  auto* const page = app.add_option(
      "--output", output, "HTML file to write [report.html in RUN, or here for several runs]");
  auto* const as_text =
      app.add_flag("--text", text, "Print the report, and what the ranks did when the job failed");
  auto* const live =
      app.add_flag("--watch", watch, "Show a running job, redrawn until it ends; q quits");
  auto* const table = app.add_option("--csv", csv, "CSV file to write, one line per step");
  auto* const merged = app.add_option(
      "--trace", trace, "Write the traces of all ranks to one file, for ui.perfetto.dev");
  for (auto* const option : {page, as_text, live, table, merged}) {
    for (auto* const other : {page, as_text, live, table, merged}) {
      if (option != other) option->excludes(other);
    }
  }
  if (const auto status = parse(
          app, "report",
          "Shows training runs: curves, where the time goes, memory, events, slow ranks, and why a "
          "run failed.\n"
          "Usage: lockstep report RUN [RUN...] [--output FILE]\n"
          "       lockstep report RUN --text | --watch | --csv FILE | --trace FILE\n"
          "       lockstep report FOLDER_OF_RUNS\n",
          arguments))
    return *status;
  if (text) {
    print_text(folders);
  } else if (watch) {
    require_one(folders, "--watch");
    report::read_run(folders[0], 4);  // refuses what is none
    report::watch(folders[0]);
  } else if (!csv.empty()) {
    require_one(folders, "--csv");
    const std::string metrics = report::metrics_file(report::read_run(folders[0], 4));
    write_file(csv, [&](std::ostream& out) { report::write_csv(metrics, out); });
  } else if (!trace.empty()) {
    require_one(folders, "--trace");
    const auto runs = report::trace_files(folders[0]);
    if (runs.empty()) {
      throw ConfigError(format(
          "report: {} has no traces; lockstep train --metrics.trace auto writes them", folders[0]));
    }
    report::TraceCounts counts;
    write_file(trace, [&](std::ostream& out) { counts = report::merge_traces(runs[0], out); });
    std::cout << format("{} ranks, {} events; flows of {} messages and {} waits\n", runs[0].size(),
                        counts.events, counts.messages, counts.waits);
  } else if (folders.size() == 1 && !report::is_run(folders[0]) &&
             !report::runs_in(folders[0]).empty()) {
    if (*page)
      throw ConfigError(
          format("report: {} holds several runs; name those that the page is to show", folders[0]));
    std::vector<report::Run> runs;
    for (const std::string& folder : report::runs_in(folders[0]))
      runs.push_back(report::read_run(folder, 64));
    std::cout << report::table_of_runs(runs);
  } else {
    write_page(folders, output);
  }
  return 0;
}

}  // namespace lockstep::cli
