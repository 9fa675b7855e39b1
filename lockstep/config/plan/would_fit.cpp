// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/plan/would_fit.h"

#include <utility>
#include <vector>

#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/report.h"

namespace lockstep::config {
namespace {

using Flags = std::vector<std::pair<std::string, std::string>>;

constexpr int kMostSplit = 8;    // tp or pp
constexpr int kMostRanks = 512;  // predictions take longer with more of them

struct Candidate {
  Flags flags;
  int world;
};

Flags operator+(Flags left, const Flags& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// What shares state among the ranks of the run.
std::vector<Flags> sharings(const TrainConfig& config) {
  std::vector<Flags> list;
  for (const char* shard : {"optimizer", "grad_op", "full"})
    list.push_back({{"parallel.shard", shard}});
  for (const char* axis : {"parallel.pp", "parallel.tp"}) {
    const bool is_tp = std::string_view(axis) == "parallel.tp";
    for (int size = 2 * (is_tp ? config.parallel.tp : config.parallel.pp); size <= kMostSplit;
         size *= 2) {
      Flags flags{{axis, std::to_string(size)}};
      if (config.parallel.dp > 0) flags.push_back({"parallel.dp", "0"});
      list.push_back(std::move(flags));
    }
  }
  return list;
}

// Without a change of what a step computes.
std::vector<Flags> smaller_micro_batches(const TrainConfig& config, int world) {
  std::vector<Flags> list;
  for (int64_t rows = config.train.micro_batch / 2; rows >= 1; rows /= 2) {
    list.push_back({{"train.micro_batch", std::to_string(rows)},
                    {"train.global_batch", std::to_string(config.global_batch(world))}});
  }
  return list;
}

std::vector<Candidate> candidates(const TrainConfig& config, int world) {
  const Flags recompute{{"train.recompute", "full"}};
  const auto shared = sharings(config), smaller = smaller_micro_batches(config, world);
  const Flags least = (smaller.empty() ? Flags{} : smaller.back()) + recompute;
  const Flags offload{{"offload.optimizer", "true"},
                      {"offload.strategy", "extreme"},
                      {"offload.device_limit", bytes_text(config.memory.max_per_device)}};
  const Flags offload_all = offload + Flags{{"offload.params", "true"}, {"offload.grads", "true"}};
  std::vector<Flags> list{{{"train.recompute", "selective"}}, recompute};
  const auto add_each = [&](const std::vector<Flags>& changes, const Flags& more) {
    for (const Flags& flags : changes) list.push_back(flags + more);
  };
  add_each(shared, {});
  add_each(smaller, {});
  add_each(shared, recompute);
  add_each({offload, offload_all}, {});
  list.push_back(least);
  add_each(shared, least);
  add_each({offload, offload_all}, least);
  add_each({offload, offload_all}, least + Flags{{"parallel.shard", "full"}});
  std::vector<Candidate> all;
  for (Flags& flags : list) all.push_back({std::move(flags), world});
  for (int more = 2 * world; more <= kMostRanks; more *= 2) {
    Flags flags{{"parallel.shard", "full"}};
    if (config.parallel.dp > 0) flags.push_back({"parallel.dp", "0"});
    all.push_back({flags, more});
    all.push_back({flags + recompute, more});
    all.push_back({flags + recompute + Flags{{"train.micro_batch", "1"}}, more});
  }
  return all;
}

// Bytes of the largest rank. None where the candidate is no valid configuration, or a bad one.
std::optional<int64_t> prediction(TrainConfig config, const ModelSpec& model,
                                  const Candidate& candidate) {
  try {
    Schema schema = train_schema(config);
    for (const auto& [name, value] : candidate.flags) schema.set_flag(name, value);
    config.validate(candidate.world);
    validate_tensor(config, model);
    // Fits, but most of its stages would wait.
    if (config.accumulation(candidate.world) < config.parallel.pp) return std::nullopt;
    const auto ranks = plan::memory_per_rank(planned_run(config, model, candidate.world));
    return ranks[plan::largest_total(ranks)].total();
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

std::string text_of(const Candidate& candidate, int world) {
  std::string text = candidate.world == world ? "" : format("-n {}", candidate.world);
  for (const auto& [name, value] : candidate.flags)
    text += format("{}--{} {}", text.empty() ? "" : " ", name, value);
  return text;
}

}  // namespace

std::optional<Change> would_fit(const TrainConfig& config, const ModelSpec& model, int world) {
  const int64_t most = safe_part_of(config.memory.max_per_device);
  for (const Candidate& candidate : candidates(config, world)) {
    const auto bytes = prediction(config, model, candidate);
    if (bytes && *bytes <= most) return Change{text_of(candidate, world), *bytes};
  }
  return std::nullopt;
}

}  // namespace lockstep::config
