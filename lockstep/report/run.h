// SPDX-License-Identifier: Apache-2.0
// What a run folder says about its run, read in bounded memory however long the run is.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/flight/flight.h"
#include "lockstep/io/json.h"
#include "lockstep/report/metrics_line.h"
#include "lockstep/report/series.h"

namespace lockstep::report {

struct Validation {
  int64_t step = 0;
  double loss = kNone, time = kNone;
};

struct Event {
  std::string kind;  // "saved", "slow", ...
  int64_t step = 0;
  double time = kNone;
  std::string text = {};  // for people
};

struct OperationCost {
  double count = 0, bytes = 0, flight_ms = 0, waited_ms = 0;
};

struct RankMemory {
  // Parameters, gradients, optimizer, activations and buffers, in bytes.
  std::array<double, 5> measured = {}, planned = {};

  static double sum(const std::array<double, 5>& kinds);
};
inline constexpr std::array<std::string_view, 5> kMemoryNames{
    "parameters", "gradients", "optimizer", "activations", "buffers"};

struct TextSample {
  int64_t step = 0;
  std::string prompt, text;
};

// What each layer's gradients and weights were, by quantity ("grad_norm", "update_ratio", ...).
struct Health {
  std::vector<std::string> layers = {};
  std::vector<int64_t> steps = {};
  std::map<std::string, std::vector<std::vector<double>>> values = {};  // by step, then by layer
};

struct Run {
  std::string name, path;
  std::string state;                               // running, finished, stopped, failed, died
  std::optional<config::TrainConfig> config = {};  // not where config.toml cannot be read
  std::map<std::string, std::string> settings = {};
  std::vector<io::Json> starts = {};  // lines of environment.jsonl, the newest 32
  int64_t num_starts = 0;
  Series steps{kColumns};
  std::vector<Validation> validations = {};
  std::vector<Event> events = {};              // the newest of each kind
  std::map<std::string, int64_t> counts = {};  // of all events, by kind
  Series busy = Series();  // a column for the step, then milliseconds, one for each rank
  std::map<std::string, OperationCost> operations = {};
  double steps_of_operations = 0;
  std::vector<RankMemory> memory = {};  // by rank
  std::vector<double> peak_bytes = {};  // by rank, of the last step
  io::Json pipeline = {};               // the last event "ranks" with a schedule
  std::vector<TextSample> samples = {};
  Health health = {};
  int64_t bad_lines = 0;                     // that could not be read
  std::vector<flight::Flight> flights = {};  // of the last failure, or of a rank that was late
  std::string failure = {};                  // the message of a run that failed

  int ranks() const;
  bool is_running() const { return state == "running"; }
  // Floating-point operations of a token in forward and backward: 6 for each parameter, and
  // attention. kNone without a model.
  double flops_per_token() const;
  // What the devices of all ranks reach together, in operations per second: of a GPU from its data
  // sheet, of a CPU as measured when the run began. kNone where it is not known.
  double peak_flops() const;
  double mfu(double tokens_per_s) const;
  double hours(double time) const;  // since the first step
};

// Whether there is something to read: a run folder, or a folder with a metrics.jsonl.
bool is_run(const std::string& folder);
// At most `rows` rows of steps. ConfigError, with the reason, where it is none.
Run read_run(const std::string& folder, size_t rows = 2048);
// The path of its metrics.
std::string metrics_file(const Run& run);
// The run folders in a folder, by name.
std::vector<std::string> runs_in(const std::string& folder);

}  // namespace lockstep::report
