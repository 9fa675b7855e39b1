// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/findings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

#include "lockstep/core/format.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/layout/rank_map.h"

namespace lockstep::report {
namespace {

constexpr double kSlowRank = 1.3;
constexpr double kEvenContext = 0.85;

double percent(double part) { return 100 * part; }

void find_failure(const Run& run, std::vector<Finding>& found) {
  if (run.state != "failed" && run.state != "died") return;
  Finding finding{.is_problem = true};
  finding.text = run.state == "failed"
                     ? "the run failed: " + run.failure.substr(0, run.failure.find('\n'))
                     : "the run ended without a word: rank 0 was killed, or its host failed";
  if (!run.flights.empty()) finding.text += "; " + flight::verdict(run.flights);
  finding.advice =
      format("lockstep train --resume {} continues from the newest checkpoint", run.name);
  found.push_back(finding);
}

void find_speed(const Run& run, const std::vector<Share>& parts, std::vector<Finding>& found) {
  const auto part_of = [&](std::string_view name) {
    const auto share = std::ranges::find(parts, name, &Share::name);
    return share == parts.end() ? Share{} : *share;
  };
  const auto add = [&](std::string_view name, double most, const std::string& what,
                       const std::string& advice) {
    const Share share = part_of(name);
    if (share.part > most)
      found.push_back({true,
                       format("{} takes {:.0f} % of the time ({:.1f} ms of a step){}", name,
                              percent(share.part), share.ms, what),
                       advice});
  };
  const auto slow = stragglers(run);
  const auto busy = busy_of_ranks(run);
  for (size_t i = 0; i < std::min<size_t>(slow.size(), 4); ++i) {
    std::vector<double> sorted = busy;
    std::ranges::sort(sorted);
    found.push_back(
        {true,
         format("rank {} is slow: it computes {:.0f} ms of a step, the median rank {:.0f} ms",
                slow[i], busy[static_cast<size_t>(slow[i])], sorted[(sorted.size() - 1) / 2]),
         "compare lockstep doctor on its host with the others: shared cores, a CPU limit, heat; or "
         "balance pipeline stages with parallel.split"});
  }
  add("stall", 0.1, ": the rank waits for the slowest one",
      slow.empty() ? "ranks take turns at being late: other processes on the cores, or uneven work"
                   : "");
  const double hidden = overlap(run);
  add("communication", 0.15,
      std::isnan(hidden)
          ? ""
          : format("; {:.0f} % of the collectives' time is overlapped with computation",
                   percent(hidden)),
      "a larger train.global_batch reduces gradients less often; lockstep bench collectives shows "
      "what the link can do");
  const auto& config = run.config;
  add("bubble", 0.15, config ? format(" with parallel.pp {}", config->parallel.pp) : "",
      "more micro-batches for each rank (a smaller train.micro_batch or a larger "
      "train.global_batch), or parallel.schedule zb-h1");
  add("optimizer", 0.25, "",
      "a larger train.global_batch updates less often; parallel.shard optimizer divides the update "
      "among ranks");
  add("data", 0.05, "", "lockstep data pack tokenizes the text once, before training");
  add("checkpoint", 0.05, "",
      "checkpoint.async true writes while training continues; or a larger checkpoint.every");
}

// Ranks that share rows wait for each other in every layer, so their work should be equal.
void find_context_balance(const Run& run, std::vector<Finding>& found) {
  const auto busy = busy_of_ranks(run);
  const int world = static_cast<int>(busy.size());
  if (!run.config || run.config->parallel.cp == 1 || busy.empty()) return;
  const layout::ParallelDims dims = run.config->dims(world);
  // The number of ranks has changed.
  if (dims.dp % run.config->parallel.cp != 0 || dims.world_size() != world) return;
  const layout::RankMap map(dims, run.config->parallel.order);
  std::map<std::array<int, 3>, std::vector<double>> groups;  // of those with the same rows
  for (int rank = 0; rank < world; ++rank) {
    const auto at = map.coordinate_of(rank);
    groups[{run.config->context_place(at.dp, world).replica, at.tp, at.pp}].push_back(
        busy[static_cast<size_t>(rank)]);
  }
  double least = 1;
  for (const auto& [place, times] : groups) {
    const double most = *std::ranges::max_element(times);
    const double mean = std::reduce(times.begin(), times.end()) / static_cast<double>(times.size());
    if (most > 0) least = std::min(least, mean / most);
  }
  const bool uneven = least < kEvenContext;
  found.push_back(
      {uneven,
       format("balance of the ranks that share rows (parallel.cp {}): {:.0f} %, the mean of their "
              "computation over that of the slowest, in the worst group",
              run.config->parallel.cp, percent(least)),
       !uneven                 ? ""
       : run.config->data.pack ? "short documents give the ranks of a row unequal work; a smaller "
                                 "parallel.cp balances better"
                               : "compare lockstep doctor on the hosts: shared cores, a CPU limit, "
                                 "heat"});
}

void find_memory(const Run& run, std::vector<Finding>& found) {
  double worst = 0;
  size_t rank = 0;
  for (size_t i = 0; i < run.memory.size(); ++i) {
    const double ratio = RankMemory::sum(run.memory[i].measured) /
                         std::max(1.0, RankMemory::sum(run.memory[i].planned));
    if (ratio > worst) {
      worst = ratio;
      rank = i;
    }
  }
  if (worst == 0) return;
  const RankMemory& memory = run.memory[rank];
  found.push_back({worst > 1.1,
                   format("memory of tensors on rank {}: {} measured, {} planned ({:+.0f} %)", rank,
                          short_size(RankMemory::sum(memory.measured)),
                          short_size(RankMemory::sum(memory.planned)), percent(worst - 1)),
                   worst > 1.1 ? "the plan does not know all of it: see the kinds below" : ""});
}

}  // namespace

std::string short_count(double value) {
  if (!std::isfinite(value)) return "-";
  for (const auto& [unit, name] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (std::abs(value) < unit) continue;
    const double scaled = value / unit;
    return format("{:.{}f}{}", scaled, scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0, name);
  }
  return value == std::floor(value) ? format("{:.0f}", value) : format("{:.3g}", value);
}

std::string short_size(double bytes) {
  if (!std::isfinite(bytes)) return "-";
  for (const auto& [unit, name] : {std::pair{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}}) {
    if (bytes >= unit) return format("{:.{}f} {}", bytes / unit, bytes < 100 * unit ? 1 : 0, name);
  }
  return format("{:.0f} B", bytes);
}

std::string short_duration(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  const auto whole = static_cast<int64_t>(std::lround(std::max(seconds, 0.0)));
  if (whole < 60) return format("{:.1f} s", std::max(seconds, 0.0));
  if (whole < 3600) return format("{}m{:02}s", whole / 60, whole % 60);
  if (whole < 48 * 3600) return format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  return format("{}d{:02}h", whole / 86400, whole / 3600 % 24);
}

std::vector<Share> shares(const Run& run) {
  std::vector<Share> parts;
  double all = 0;
  for (size_t i = 0; i < kSplits; ++i) {
    const double sum = run.steps.sum(kCompute + i);
    parts.push_back({std::string(kSplitNames[i]),
                     sum / static_cast<double>(std::max<int64_t>(1, run.steps.count())), sum});
    all += sum;
  }
  if (all <= 0) return {};
  for (Share& share : parts) share.part /= all;
  std::erase_if(parts, [](const Share& share) { return share.part < 5e-4; });
  std::ranges::stable_sort(parts, std::greater<>(), &Share::part);
  return parts;
}

std::vector<double> busy_of_ranks(const Run& run) {
  const auto rows = run.busy.rows();
  if (rows.empty()) return {};
  std::vector<double> means;
  const size_t first = rows.size() - std::min<size_t>(rows.size(), 16);
  for (size_t rank = 1; rank < rows[0].size(); ++rank) {
    double sum = 0, count = 0;
    for (size_t i = first; i < rows.size(); ++i) {
      if (std::isnan(rows[i][rank])) continue;
      sum += rows[i][rank];
      ++count;
    }
    means.push_back(count > 0 ? sum / count : 0);
  }
  return means;
}

std::vector<int> stragglers(const Run& run) {
  const std::vector<double> busy = busy_of_ranks(run);
  if (busy.size() < 2) return {};
  std::vector<double> sorted = busy;
  std::ranges::sort(sorted);
  const double usual = sorted[(sorted.size() - 1) / 2];
  std::vector<int> slow;
  for (size_t i = 0; i < busy.size(); ++i) {
    if (busy[i] > kSlowRank * usual && busy[i] - usual > 5) slow.push_back(static_cast<int>(i));
  }
  std::ranges::sort(slow, std::greater<>(),
                    [&](int rank) { return busy[static_cast<size_t>(rank)]; });
  return slow;
}

double overlap(const Run& run) {
  double flight = 0, waited = 0;
  for (const auto& [name, cost] : run.operations) {
    if (name == "send" || name == "recv") continue;  // threads of their own wait for these
    flight += cost.flight_ms;
    waited += std::min(cost.waited_ms, cost.flight_ms);
  }
  return flight > 0 ? 1 - waited / flight : kNone;
}

std::vector<Finding> findings(const Run& run) {
  std::vector<Finding> found;
  find_failure(run, found);
  const std::vector<Share> parts = shares(run);
  find_speed(run, parts, found);
  find_context_balance(run, found);
  const auto count = [&](const char* kind) {
    const auto counted = run.counts.find(kind);
    return counted == run.counts.end() ? 0 : counted->second;
  };
  if (const int64_t skipped = count("skipped"); skipped > 0)
    found.push_back({true,
                     format("{} of {} steps were skipped: gradients not finite, or a loss spike",
                            skipped, run.steps.count()),
                     "a lower optim.lr or a longer optim.warmup; docs/training.md, bad steps"});
  if (const int64_t starts = count("started"); starts > 1)
    found.push_back(
        {false, format("{} starts: {} restarts or resumptions", starts, starts - 1), ""});
  if (const int64_t warnings = count("warning"); warnings > 0)
    found.push_back({false, format("{} warnings; the events below have them", warnings), ""});
  find_memory(run, found);
  if (!parts.empty() && parts[0].name == "compute")
    found.push_back(
        {false,
         format("compute takes {:.0f} % of the time ({:.1f} ms of a step)", percent(parts[0].part),
                parts[0].ms),
         std::isfinite(run.peak_flops())
             ? format("it reaches {:.0f} % of what matrix products reach on these devices",
                      percent(run.mfu(run.steps.typical(kTokensPerSecond))))
             : ""});
  if (run.bad_lines > 0)
    found.push_back(
        {false,
         format("{} lines of the run's files could not be read and are left out", run.bad_lines),
         ""});
  return found;
}

}  // namespace lockstep::report
