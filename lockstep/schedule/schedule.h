// SPDX-License-Identifier: Apache-2.0
// Pipeline schedules as data: which rank computes what, in which order.
#pragma once

#include <string>
#include <vector>

#include "lockstep/layout/parallel_config.h"
#include "lockstep/schedule/action.h"

namespace lockstep::schedule {

using Kind = layout::PipelineSchedule;

struct Place {
  int rank = 0, chunk = 0;

  bool operator==(const Place&) const = default;
};

// How a model's stages lie on the ranks. loop: chunk c of rank r is stage c * ranks + r. v: chunk 0
// is stage r, chunk 1 is stage 2 * ranks - 1 - r, so that rank 0 has the first stage and the last.
enum class StageOrder { loop, v };

struct Pipeline {
  Kind kind = Kind::one_f_one_b;
  int ranks = 1, microbatches = 1, chunks = 1;
  StageOrder order = StageOrder::loop;

  int stages() const { return ranks * chunks; }
  int stage(int rank, int chunk) const;
  Place place(int stage) const;
  // Where a send of this rank goes to, or a receive comes from; the action's chunk is this rank's.
  int peer(int rank, const Action& action) const;

  bool operator==(const Pipeline&) const = default;
};

struct Schedule : Pipeline {
  std::vector<std::vector<Action>> actions = {};  // of each rank, in order; computation only

  bool operator==(const Schedule&) const = default;
};

struct ScheduleOptions {
  Kind kind = Kind::one_f_one_b;
  int ranks = 1, microbatches = 1, chunks = 1;  // with Kind::file, 0: as the file has it
  int group = 0;          // interleaved and zb-1p: micro-batches a chunk takes in turn; 0: ranks
  std::string file = {};  // of Kind::file
};

// What it returns is valid. Throws ConfigError where the kind does not allow the numbers.
Schedule generate(const ScheduleOptions& options);
// Throws as generate() does, at once. A file is not read.
void require_valid(const ScheduleOptions& options);

// Every micro-batch has a forward and a backward (or its two halves) on every stage, once and in
// this order, and some order of all ranks' actions gives each its input. Throws ConfigError with
// the rank and the action.
void validate(const Schedule& schedule);

}  // namespace lockstep::schedule
