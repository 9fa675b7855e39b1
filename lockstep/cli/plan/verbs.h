// SPDX-License-Identifier: Apache-2.0
// The subcommands of `lockstep plan`, and what they share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/config/train_config.h"

namespace lockstep::cli {

extern const char* const kPlanHelp;

struct Request {
  config::TrainConfig config;
  config::ModelSpec model;
  int world;
  config::Origins origins;
};

// A run by the options of `lockstep train`. None where only help was asked for, which is printed.
std::optional<Request> read_request(const std::vector<std::string>& arguments);
// The same without its last step, for a layout that is still to be chosen: dims may be open and
// nothing has been validated. `world` is 0 where -n is not given.
std::optional<Request> read_open_request(const std::vector<std::string>& arguments);

// "gpt: 4 layers ... on 8 ranks: dp 2 x tp 2 x pp 2, 1f1b; 4 micro-batches of 8 x 256 tokens"
std::string layout_text(const config::TrainConfig& config, const config::ModelSpec& model,
                        int world);

// Removes `--NAME VALUE` or `--NAME=VALUE` wherever it stands, and returns the values.
std::vector<std::string> take_values(std::vector<std::string>& arguments, const std::string& name);
bool take_switch(std::vector<std::string>& arguments, const std::string& name);

int plan_memory(const std::vector<std::string>& arguments);
int plan_inventory(std::vector<std::string> arguments);
int plan_time(std::vector<std::string> arguments);
int plan_layout(std::vector<std::string> arguments);
int plan_compare(std::vector<std::string> arguments);
int plan_cluster(const std::vector<std::string>& arguments);

}  // namespace lockstep::cli
