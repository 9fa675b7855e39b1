// SPDX-License-Identifier: Apache-2.0
// What a run writes about itself while it trains: metrics.jsonl, events.jsonl and TensorBoard's
// files. Private: not installed.
//
// events.jsonl has one JSON object in each line, with "event", "step", "time" and what belongs to
// the event. It only grows: a run that is resumed adds to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_config.h"
#include "lockstep/flight/operation_totals.h"
#include "lockstep/flight/slow_ranks.h"
#include "lockstep/io/json.h"
#include "lockstep/io/line_file.h"
#include "lockstep/io/tensorboard_file.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/plan/memory.h"
#include "lockstep/train/observe/metrics.h"

namespace lockstep::train {

// Rank 0 writes. Where files cannot be written to later, there is a warning, and training
// continues.
class RunObserver {
 public:
  // ConfigError where a file cannot be opened.
  RunObserver(const config::TrainConfig& config, comm::Group world, int64_t first_step);
  ~RunObserver();
  RunObserver(const RunObserver&) = delete;
  RunObserver& operator=(const RunObserver&) = delete;

  void event(std::string_view name, int64_t step, const io::OrderedJson& fields = {});
  void step(const StepMetrics& metrics);
  void evaluation(int64_t step, double loss);
  // Training goes back to this step.
  void rewind(int64_t step);

  // Collective, once for each start, after a step that has all its memory: memory by kind of each
  // rank, measured and planned, and what each pipeline stage computed when.
  void ranks(int64_t step, const plan::Memory& measured, const plan::Memory& planned,
             const parallel::Pipeline& pipeline);

  // Of the last step; all ranks' times are known on all ranks.
  const std::vector<flight::SlowRank>& slow() const { return slow_; }

 private:
  void communication(int64_t step);

  const std::string metrics_path_;
  const comm::Group world_;
  std::optional<MetricsFile> metrics_;
  io::LineFile events_;
  io::TensorboardFile tensorboard_;
  std::atomic<int64_t> last_step_ = 0;  // any thread may warn
  flight::SlowRanks judge_;
  std::vector<flight::SlowRank> slow_;
  std::map<int, double> said_slow_;  // when, by rank
  flight::OperationTotals operations_;
  double operations_written_ = 0;  // when
  int64_t steps_of_operations_ = 0;
};

}  // namespace lockstep::train
