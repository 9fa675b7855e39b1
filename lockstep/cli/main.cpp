// SPDX-License-Identifier: Apache-2.0
// The command `lockstep`: finds the subcommand and turns exceptions into exit codes.
#include <fcntl.h>

#include <csignal>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/cli/bench/bench.h"
#include "lockstep/cli/checkpoint/checkpoint.h"
#include "lockstep/cli/completion.h"
#include "lockstep/cli/data.h"
#include "lockstep/cli/doctor/doctor.h"
#include "lockstep/cli/infer/infer.h"
#include "lockstep/cli/plan/plan.h"
#include "lockstep/cli/report.h"
#include "lockstep/cli/run.h"
#include "lockstep/cli/schedule.h"
#include "lockstep/cli/selftest.h"
#include "lockstep/cli/train/train.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/version.h"
#include "lockstep/launch/processes/guard.h"

namespace {

using Arguments = std::vector<std::string>;

struct Subcommand {
  const char* name;
  const char* help;  // null: not for users
  std::function<int(const Arguments&)> function;
};

const std::vector<Subcommand>& subcommands() {
  static const std::vector<Subcommand> table = {
      {"train", "train a language model on text", lockstep::cli::train},
      {"sample", "generate text with a trained model", lockstep::cli::sample},
      {"eval", "measure the loss and the perplexity of a trained model", lockstep::cli::eval},
      {"checkpoint", "inspect, verify, compare and convert checkpoints", lockstep::cli::checkpoint},
      {"data", "convert text to files of token ids", lockstep::cli::data},
      {"schedule", "show a pipeline schedule with its time and memory", lockstep::cli::schedule},
      {"plan", "predict time and memory of a training run, and find its layout",
       lockstep::cli::plan},
      {"run", "start the ranks of a program and stop them together", lockstep::cli::run},
      {"report", "show training runs as a page, as text or live; say why one failed",
       lockstep::cli::report},
      {"selftest", "verify the communication layer on this machine", lockstep::cli::selftest},
      {"bench", "measure collectives, codecs and the whole machine", lockstep::cli::bench},
      {"doctor", "check this machine for training", lockstep::cli::doctor},
      {lockstep::launch::Guard::kCommand, nullptr,
       [](const Arguments&) -> int { lockstep::launch::guard_main(); }},
  };
  return table;
}

void print_help(std::ostream& out) {
  out << "lockstep " LOCKSTEP_VERSION
         ": distributed training for C++ programs that use libtorch\n\n"
         "Usage: lockstep COMMAND [OPTIONS]      see lockstep COMMAND --help\n"
         "       lockstep --version\n"
         "       lockstep --completion bash|zsh|fish    print a completion script for a shell\n"
         "\nCommands:\n";
  for (const Subcommand& subcommand : subcommands()) {
    if (subcommand.help == nullptr) continue;
    const std::string name = subcommand.name;
    out << "  " << name << std::string(12 - std::min<size_t>(name.size(), 11), ' ')
        << subcommand.help << "\n";
  }
}

// What a command prints with these words.
std::string printed(const Subcommand& subcommand, const Arguments& words) {
  const std::ostringstream text;
  std::streambuf* const before = std::cout.rdbuf(text.rdbuf());
  try {
    subcommand.function(words);
  } catch (...) {
    std::cout.rdbuf(before);
    throw;
  }
  std::cout.rdbuf(before);
  return text.str();
}

std::string completion(const std::string& shell) {
  std::vector<lockstep::cli::HelpSource> sources;
  for (const Subcommand& subcommand : subcommands()) {
    if (subcommand.help == nullptr) continue;
    sources.push_back({subcommand.name, subcommand.help, [&subcommand](const Arguments& words) {
                         return printed(subcommand, words);
                       }});
  }
  return lockstep::cli::completion_script(shell, sources);
}

int dispatch(const Arguments& arguments) {
  if (arguments.empty()) {
    print_help(std::cerr);
    return 2;
  }
  const std::string& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    print_help(std::cout);
    return 0;
  }
  if (name == "--version") {
    std::cout << "lockstep " LOCKSTEP_VERSION "\n";
    return 0;
  }
  if (name == "--completion") {
    std::cout << completion(arguments.size() == 2 ? arguments[1] : "");
    return 0;
  }
  std::string known;
  for (const Subcommand& subcommand : subcommands()) {
    if (name == subcommand.name) {
      return subcommand.function(Arguments(arguments.begin() + 1, arguments.end()));
    }
    if (subcommand.help != nullptr)
      known += std::string(known.empty() ? "" : ", ") + subcommand.name;
  }
  throw lockstep::ConfigError("unknown command '" + name + "'; the commands are: " + known);
}

// A closed stdin, stdout or stderr would give its number to the next file or socket we open.
void fill_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
      const int opened = open("/dev/null", O_RDWR);
  }
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_descriptors();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with its name
  try {
    return dispatch(Arguments(argv + 1, argv + argc));
  } catch (const lockstep::ConfigError& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 2;
  } catch (const lockstep::DataError& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 74;  // EX_IOERR
  } catch (const std::exception& failure) {
    std::cerr << "lockstep: " << failure.what() << "\n";
    return 1;
  }
}
