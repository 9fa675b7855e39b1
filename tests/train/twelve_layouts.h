// SPDX-License-Identifier: Apache-2.0
// Layouts of 4 or 8 ranks that use every kind of parallelism, for a model of four layers and four
// heads.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/train/train_command.h"

namespace lockstep::test {

inline std::vector<std::pair<std::string, Words>> twelve_layouts(int ranks) {
  const std::string tp = "--parallel.tp", pp = "--parallel.pp", shard = "--parallel.shard";
  const Words sequence{tp, "2", "--parallel.sequence_parallel", "true"};
  std::vector<std::pair<std::string, Words>> layouts{
      {"dp", {}},
      {"dp, selective", {"--train.recompute", "selective"}},
      {"shard", {shard, "full"}},
      {"shard gradients", {shard, "grad_op"}},
      {"shard in pairs", {shard, "hybrid", "--parallel.shard_size", "2"}},
      {"tp 2", {tp, "2"}},
      {"tp 4", {tp, "4"}},
      {"tp and shard", {tp, "2", shard, "full"}},
      {"sequence, recomputed", sequence + Words{"--train.recompute", "full"}},
      {"pp 2", {pp, "2"}},
      {"pp 4", {pp, "4", "--parallel.schedule", "zb-h1"}},
      {"sequence and pp", sequence + Words{pp, "2"}}};
  for (auto& [name, words] : layouts) words = Words{"-n", std::to_string(ranks)} + words;
  return layouts;
}

}  // namespace lockstep::test
