#include "lockstep/cli/torch_commands.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "lockstep/cli/bench_collectives.h"
#include "lockstep/cli/options.h"
#include "lockstep/cli/torch_program.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;
namespace fs = std::filesystem;

const Words kBackends{"thread", "shm", "mpi", "gloo"};

// How the ranks of a backend are started: threads in one process, mpirun, or our own launcher.
Words start_ranks(const std::string& backend, int ranks, const Words& command) {
  Words words;
  if (backend == "thread") {
    words = command;
    words.insert(words.end(), {"--threads", std::to_string(ranks)});
    return words;
  }
  if (backend == "mpi") {
    words = {"mpirun", "-n", std::to_string(ranks), "--oversubscribe"};
    if (geteuid() == 0) words.push_back("--allow-run-as-root");
    // One core a rank where there are enough, as our launcher does.
    words.insert(words.end(),
                 {"--bind-to", ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? "core" : "none"});
  } else {
    words = {own_path(), "run", "-n", std::to_string(ranks)};
  }
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

void check_ranks(const char* command, int ranks) {
  if (ranks < 1) throw ConfigError(format("{}: -n is {}, must be at least 1", command, ranks));
}

// A file name of this process, removed when done.
class TemporaryFile {
 public:
  TemporaryFile() : path_((fs::temp_directory_path() / "lockstep-XXXXXX").string()) {
    const int fd = mkstemp(path_.data());
    if (fd < 0) throw SystemError("cannot make a temporary file " + path_, errno);
    close(fd);
  }
  ~TemporaryFile() { fs::remove(path_, ignored_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::error_code ignored_;
};

void print_table(const nlohmann::ordered_json& results) {
  std::cout << format("{:<8} {:<15} {:<10} {:>12} {:>6} {:>12} {:>12} {:>10} {:>10}\n", "backend",
                      "op", "memory", "bytes", "ranks", "p50 us", "p99 us", "alg GB/s", "bus GB/s");
  for (const auto& row : results) {
    std::cout << format(
        "{:<8} {:<15} {:<10} {:>12} {:>6} {:>12.2f} {:>12.2f} {:>10.2f} {:>10.2f}\n",
        row["backend"].get<std::string>(), row["op"].get<std::string>(),
        row["memory"].get<std::string>(), row["bytes"].get<int64_t>(), row["ranks"].get<int>(),
        row["p50_us"].get<double>(), row["p99_us"].get<double>(), row["algbw_gbs"].get<double>(),
        row["busbw_gbs"].get<double>());
  }
}

}  // namespace

int selftest(const Words& arguments) {
  int ranks = 2;
  std::string backend = "shm";
  bool large = false;
  CLI::App app;
  app.add_option("-n", ranks, "Ranks")->capture_default_str();
  app.add_option("--backend", backend, "What the ranks communicate with")
      ->check(CLI::IsMember(kBackends))
      ->capture_default_str();
  app.add_flag("--large", large,
               "Also operations on more than 2^31 elements (about 7 GB for 2 ranks)");
  if (const auto status = parse(app, "selftest",
                                "Checks on this machine what the communication layer "
                                "promises.\nUsage: lockstep selftest [OPTIONS]\n",
                                arguments))
    return *status;
  check_ranks("selftest", ranks);
  Words command{torch_path(), "selftest", "--backend", backend};
  if (large) command.push_back("--large");
  return run_program(start_ranks(backend, ranks, command));
}

int bench_collectives(const Words& arguments) {
  int ranks = 2;
  Words backends{"shm"}, ops{"all_reduce"};
  std::vector<int64_t> sizes{4096, 65536, 4194304, 67108864};
  double seconds = 0.5;
  bool json = false;
  CLI::App app;
  app.add_option("-n", ranks, "Ranks")->capture_default_str();
  const Words operations(std::begin(kBenchOperations), std::end(kBenchOperations));
  app.add_option("--backends", backends, "Separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(kBackends))
      ->capture_default_str();
  app.add_option("--ops", ops, "Separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(operations))
      ->capture_default_str();
  app.add_option("--bytes", sizes, "Bytes of a rank's buffer")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--seconds", seconds, "Time for each measurement")->capture_default_str();
  app.add_flag("--json", json, "Print one JSON array");
  const std::string usage =
      "Times the collectives of one or more backends on this machine.\nUsage: lockstep bench "
      "collectives [OPTIONS]\n";
  if (const auto status = parse(app, "bench collectives", usage, arguments)) return *status;
  check_ranks("bench collectives", ranks);

  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const std::string& backend : backends) {
    const TemporaryFile file;
    const Words command{torch_path(), "bench-collectives",     "--backend", backend,
                        "--ops",      join(ops, ","),          "--bytes",   join(sizes, ","),
                        "--seconds",  std::to_string(seconds), "--output",  file.path()};
    if (const int status = run_program(start_ranks(backend, ranks, command)); status != 0)
      return status;
    for (auto& row : nlohmann::ordered_json::parse(std::ifstream(file.path())))
      results.push_back(row);
  }
  if (json) {
    std::cout << results.dump(2) << "\n";
  } else {
    print_table(results);
  }
  return 0;
}

}  // namespace lockstep::cli
