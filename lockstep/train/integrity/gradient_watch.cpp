// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/integrity/gradient_watch.h"

#include <ATen/ATen.h>

#include <cmath>
#include <set>
#include <sstream>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/format.h"
#include "lockstep/optim/clip.h"

namespace lockstep::train {
namespace {

constexpr std::string_view kLoss = "loss", kOwn = "own ", kAveraged = "averaged ";

}  // namespace

parallel::GradientObserver GradientWatch::observer() const {
  return [seen = seen_](const at::Tensor& flat, const std::vector<std::string>& names) {
    const at::Tensor sum = flat.sum();
    if (flat.is_cpu() && std::isfinite(sum.item<double>())) return;
    seen->push_back({sum, names});
  };
}

// Averaging spreads a NaN to all ranks but not to other elements, so that the averaged gradients
// tell which of the parameters in a bad bucket it was.
std::string GradientWatch::explain(const at::Tensor& loss,
                                   std::span<const optim::NamedParameter> parameters,
                                   const comm::Group& world) const {
  std::string mine;
  if (!std::isfinite(loss.sum().item<double>())) mine += format("{}\n", kLoss);
  for (const Seen& seen : *seen_) {
    if (std::isfinite(seen.sum.item<double>())) continue;
    for (const std::string& name : seen.names) mine += format("{}{}\n", kOwn, name);
  }
  for (const optim::NamedParameter& parameter : parameters) {
    const double norm = optim::grad_norm({&parameter.tensor, 1}, {.type = optim::NormType::max});
    if (!std::isfinite(norm)) mine += format("{}{}\n", kAveraged, parameter.name);
  }
  const std::vector<std::string> texts = comm::gather_texts(mine, world);
  std::set<std::string> averaged;
  const auto for_each_line = [&](const std::string& text, const auto& function) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) function(line);
  };
  for (const std::string& text : texts) {
    for_each_line(text, [&](const std::string& line) {
      if (line.starts_with(kAveraged)) averaged.insert(line.substr(kAveraged.size()));
    });
  }
  std::vector<std::string> causes;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    bool loss_is_bad = false;
    std::string first, first_averaged;
    for_each_line(texts[rank], [&](const std::string& line) {
      loss_is_bad = loss_is_bad || line == kLoss;
      if (!line.starts_with(kOwn)) return;
      const std::string name = line.substr(kOwn.size());
      if (first.empty()) first = name;
      if (first_averaged.empty() && averaged.contains(name)) first_averaged = name;
    });
    if (loss_is_bad) {
      causes.push_back(format("rank {} (its loss)", rank));
    } else if (!first.empty()) {
      causes.push_back(format("rank {} (gradient of {})", rank,
                              first_averaged.empty() ? first : first_averaged));
    }
  }
  return causes.empty() ? "no rank before they were averaged" : join(causes);
}

}  // namespace lockstep::train
