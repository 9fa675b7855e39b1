// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/text.h"

#include <algorithm>
#include <cmath>

#include "lockstep/core/format.h"
#include "lockstep/flight/culprit.h"
#include "lockstep/report/findings.h"

namespace lockstep::report {
namespace {

constexpr int kBar = 40;
constexpr size_t kRanksShown = 8, kFindingsShown = 8;

std::string bar(double part) {
  const auto filled = static_cast<size_t>(std::lround(std::clamp(part, 0.0, 1.0) * kBar));
  return std::string(filled, '#') + std::string(kBar - filled, '.');
}

// What people print must not move their cursor.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = ' ';
  }
  return text;
}

std::string wrapped(const std::string& text, size_t width, const std::string& indent) {
  std::string lines;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.size(), at + width - indent.size());
    if (end < text.size()) {
      const size_t space = text.rfind(' ', end);
      if (space != std::string::npos && space > at) end = space;
    }
    lines += (lines.empty() ? "" : "\n" + indent) + text.substr(at, end - at);
    at = text.find_first_not_of(' ', end);
    if (at == std::string::npos) break;
  }
  return lines;
}

double last_validation(const Run& run) {
  return run.validations.empty() ? kNone : run.validations.back().loss;
}

std::string loss_text(double loss) { return std::isfinite(loss) ? format("{:.4f}", loss) : "-"; }

// The last losses as a line of heights, 0 to 9.
std::string trend(const Run& run) {
  std::vector<double> losses;
  for (const auto& row : run.steps.rows()) {
    if (std::isfinite(row[kLoss])) losses.push_back(row[kLoss]);
  }
  constexpr size_t kWidth = 48;
  if (losses.size() < 2) return "";
  std::vector<double> means;
  const size_t columns = std::min(kWidth, losses.size());
  for (size_t i = 0; i < columns; ++i) {
    const size_t a = i * losses.size() / columns,
                 b = std::max(a + 1, (i + 1) * losses.size() / columns);
    double sum = 0;
    for (size_t j = a; j < b; ++j) sum += losses[j];
    means.push_back(sum / static_cast<double>(b - a));
  }
  const auto [low, high] = std::ranges::minmax(means);
  std::string line;
  for (const double mean : means)
    line += "_.-=+*oO#@"[static_cast<size_t>(high > low ? (mean - low) / (high - low) * 9 : 0)];
  return line;
}

}  // namespace

std::string text_of_flights(const std::vector<flight::Flight>& flights) {
  std::string text = flight::verdict(flights) + "\n";
  for (const flight::Flight& flight : flights) {
    text += format("rank {} (pid {} on {}): {}{}\n", flight.rank, flight.pid, flight.host,
                   flight.end.empty() ? "" : flight.end + "; ", flight.doing());
  }
  const auto missing = flights.front().world - static_cast<int>(flights.size());
  if (missing > 0)
    text += format("{} of {} ranks have no dump here\n", missing, flights.front().world);
  return text;
}

std::string text_report(const Run& run, int width) {
  const Series& steps = run.steps;
  const double speed = steps.typical(kTokensPerSecond), mfu = run.mfu(speed);
  std::string text = format("{}  {}\n", printable(run.name), run.state);
  if (run.config)
    text += format(
        "  model   {}; {} parameters, {} rank{}\n", run.config->model.describe(),
        short_count(run.flops_per_token() > 0 ? static_cast<double>(run.config->model.parameters())
                                              : kNone),
        run.ranks(), run.ranks() > 1 ? "s" : "");
  if (steps.count() == 0) {
    text += "  no step is recorded yet\n";
  } else {
    text += format("  steps   {:.0f}{}, {} tokens, {} of training; {} per step, {} tokens/s{}\n",
                   steps.last(kStep), run.config ? format(" of {}", run.config->train.steps) : "",
                   short_count(steps.last(kTokens)), short_duration(steps.sum(kStepMs) / 1e3),
                   format("{:.1f} ms", steps.typical(kStepMs)), short_count(speed),
                   std::isfinite(mfu) ? format(", MFU {:.1f} %", 100 * mfu) : "");
    text += format("  loss    {} (lowest {}), validation {}   {}\n", loss_text(steps.last(kLoss)),
                   loss_text(steps.min(kLoss)), loss_text(last_validation(run)), trend(run));
  }
  const auto parts = shares(run);
  if (!parts.empty()) text += "where the time goes (rank 0)\n";
  for (const Share& share : parts)
    text += format("  {:<14}{:>5.1f} %{:>10.1f} ms  {}\n", share.name, 100 * share.part, share.ms,
                   bar(share.part));
  for (const auto& [name, cost] : run.operations) {
    if (run.steps_of_operations <= 0) break;
    text += format(
        "    {:<14}{:>6.1f} calls{:>10} a step, {:>8.2f} ms in flight, {:>8.2f} ms waited for\n",
        name, cost.count / run.steps_of_operations,
        short_size(cost.bytes / run.steps_of_operations), cost.flight_ms / run.steps_of_operations,
        cost.waited_ms / run.steps_of_operations);
  }
  if (const auto busy = busy_of_ranks(run); !busy.empty()) {
    const double most = *std::ranges::max_element(busy);
    std::vector<size_t> order(busy.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::stable_sort(order, std::greater<>(), [&](size_t rank) { return busy[rank]; });
    order.resize(std::min(order.size(), kRanksShown));
    text += format("ranks by the time that they compute, of {}\n", busy.size());
    const auto slow = stragglers(run);
    for (const size_t rank : order)
      text += format("  rank {:<9}{:>17.1f} ms  {}{}\n", rank, busy[rank],
                     bar(most > 0 ? busy[rank] / most : 0),
                     std::ranges::find(slow, static_cast<int>(rank)) != slow.end() ? "  slow" : "");
  }
  if (!run.memory.empty()) {
    text += "memory of tensors at the peak of a step, measured / planned\n";
    const auto largest = std::ranges::max_element(
        run.memory, {}, [](const RankMemory& memory) { return RankMemory::sum(memory.measured); });
    std::string line = format("  rank {:<3}", largest - run.memory.begin());
    // Buffers are measured with the activations.
    for (size_t i = 0; i < 3; ++i)
      line += format(" {} {} / {};", kMemoryNames[i], short_size(largest->measured[i]),
                     short_size(largest->planned[i]));
    line += format(" activations {} / {}; total {} / {}",
                   short_size(largest->measured[3] + largest->measured[4]),
                   short_size(largest->planned[3] + largest->planned[4]),
                   short_size(RankMemory::sum(largest->measured)),
                   short_size(RankMemory::sum(largest->planned)));
    text += wrapped(line, static_cast<size_t>(width), "          ") + "\n";
  }
  const auto found = findings(run);
  if (!found.empty()) text += "what to look at\n";
  for (size_t i = 0; i < std::min(found.size(), kFindingsShown); ++i) {
    text += wrapped((found[i].is_problem ? "  ! " : "  - ") + printable(found[i].text),
                    static_cast<size_t>(width), "    ") +
            "\n";
    if (!found[i].advice.empty())
      text += "    " +
              wrapped("try: " + printable(found[i].advice), static_cast<size_t>(width) - 4,
                      "         ") +
              "\n";
  }
  if (!run.flights.empty()) {
    text += "flight recorders, as the ranks left them last\n" + text_of_flights(run.flights);
  }
  return text;
}

std::string table_of_runs(const std::vector<Run>& runs) {
  size_t name_width = 4;
  for (const Run& run : runs)
    name_width = std::max(name_width, std::min<size_t>(run.name.size(), 40));
  std::string text =
      format("{:<{}}  {:<9}{:>12}{:>10}{:>12}{:>11}{:>9}{:>7}{:>10}\n", "run", name_width, "state",
             "steps", "loss", "validation", "tokens/s", "MFU", "ranks", "time");
  for (const Run& run : runs) {
    const double speed = run.steps.count() > 0 ? run.steps.typical(kTokensPerSecond) : kNone,
                 mfu = run.mfu(speed);
    const std::string done = run.steps.count() == 0
                                 ? "-"
                                 : format("{:.0f}{}", run.steps.last(kStep),
                                          run.config ? format("/{}", run.config->train.steps) : "");
    text += format("{:<{}}  {:<9}{:>12}{:>10}{:>12}{:>11}{:>9}{:>7}{:>10}\n",
                   printable(run.name).substr(0, 40), name_width, run.state, done,
                   loss_text(run.steps.last(kLoss)), loss_text(last_validation(run)),
                   short_count(speed), std::isfinite(mfu) ? format("{:.1f} %", 100 * mfu) : "-",
                   run.ranks(),
                   run.steps.count() > 0 ? short_duration(run.steps.sum(kStepMs) / 1e3) : "-");
  }
  return text;
}

}  // namespace lockstep::report
