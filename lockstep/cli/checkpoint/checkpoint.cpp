// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/checkpoint/checkpoint.h"

#include <iostream>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

constexpr const char* kCheckpointHelp =
    "Inspects, verifies, compares and converts checkpoints.\n"
    "Usage: lockstep checkpoint inspect DIR [--json]\n"
    "       lockstep checkpoint verify DIR [--all | --expect-sha256 HASH]\n"
    "       lockstep checkpoint diff A B [--tolerance X] [--model]\n"
    "       lockstep checkpoint export DIR OUT [OPTIONS]\n"
    "       lockstep checkpoint import HF_DIR DIR [OPTIONS]\n"
    "DIR, A and B are the folder of a checkpoint, or a run folder or folder of checkpoints, which "
    "means the newest.\n"
    "Run lockstep checkpoint VERB --help for the options of a verb.\n";

struct Verb {
  const char* name;
  int (*function)(const Words&);
};

constexpr Verb kVerbs[] = {{"inspect", checkpoint_inspect},
                           {"verify", checkpoint_verify},
                           {"diff", checkpoint_diff},
                           {"export", checkpoint_export},
                           {"import", checkpoint_import}};

}  // namespace

int checkpoint(const Words& arguments) {
  const std::string name = arguments.empty() ? "" : arguments[0];
  if (arguments.empty() || name == "--help" || name == "-h") {
    (arguments.empty() ? std::cerr : std::cout) << kCheckpointHelp;
    return arguments.empty() ? 2 : 0;
  }
  Words known;
  for (const Verb& verb : kVerbs) {
    if (name == verb.name) return verb.function({arguments.begin() + 1, arguments.end()});
    known.emplace_back(verb.name);
  }
  throw ConfigError(
      format("checkpoint: unknown subcommand '{}'; use one of {}", name, join(known)));
}

}  // namespace lockstep::cli
