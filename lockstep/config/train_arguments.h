// SPDX-License-Identifier: Apache-2.0
// The command line of a training run.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/config/train_config.h"

namespace lockstep::config {

struct TrainArguments {
  // Flag over file over that of the continued run over default; validate() has yet to be called.
  TrainConfig config = {};
  Origins origins = {};                     // of every key
  std::optional<int> ranks = std::nullopt;  // run.ranks, which -n sets
  std::string config_file = {};             // --config; empty: none
  // The run folder that checkpoint.resume names or lies in, whose configuration counts; empty:
  // none.
  std::string continued = {};
  std::string checkpoint = {};  // of that run, where one of them was named; empty: its newest
  bool print_config = false, help = false;
};

// Flags: -n N or MIN:MAX, --config FILE (TOML or JSON), --print-config, --help or -h, and
// --SECTION.KEY VALUE (or =VALUE) for every key; the last of two wins. Throws ConfigError. With
// --help nothing else is looked at.
TrainArguments parse_train_arguments(const std::vector<std::string>& arguments);

// ConfigError, with the file and the flags to add, where the layout of the run that is continued
// does not fit so many ranks.
void require_layout_of_run(const TrainArguments& arguments, int world);

// What --help prints after the first lines: the four flags above and every key.
std::string train_help();
// TOML with the origin of each value; as --config it gives the same configuration.
std::string print_config(const TrainArguments& arguments);

// "train.steps = 1000": a line for every key that must be the same on all ranks of a run. Paths and
// the number of threads may differ from host to host.
std::string common_lines(const TrainConfig& config);

}  // namespace lockstep::config
