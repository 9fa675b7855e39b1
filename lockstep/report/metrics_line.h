// SPDX-License-Identifier: Apache-2.0
// A line of metrics.jsonl, read without building a tree: a run may have 10^7 of them.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "lockstep/report/series.h"

namespace lockstep::report {

// Columns of Run::steps.
enum Column : size_t {
  kStep,
  kTime,  // seconds since 1970
  kTokens,
  kLoss,
  kGradNorm,
  kLr,
  kTokensPerSecond,
  kStepMs,
  kPeakBytes,
  kCompute,  // from here on: milliseconds of a step, in the order of kSplitNames
  kCommunication,
  kBubble,
  kStall,
  kOptimizer,
  kData,
  kCheckpoint,
  kColumns
};
inline constexpr size_t kSplits = kColumns - kCompute;
inline constexpr std::array<std::string_view, kCompute> kColumnNames{
    "step", "time", "tokens", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "peak_bytes"};
inline constexpr std::array<std::string_view, kSplits> kSplitNames{
    "compute", "communication", "bubble", "stall", "optimizer", "data", "checkpoint"};

struct MetricsLine {
  std::array<double, kColumns> values = {};  // kNone where the line has none, or no number
  bool has_loss = false;                     // of a step, though perhaps no number
  bool is_validation = false;
  double validation_loss = kNone;
  std::vector<double> busy_ms = {}, peak_bytes = {};  // of each rank

  // False where the line is no JSON object. What the line has besides is passed over.
  bool parse(std::string_view line);
};

}  // namespace lockstep::report
