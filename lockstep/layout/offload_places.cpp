// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload_places.h"

#include <algorithm>
#include <array>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/enum_names.h"

namespace lockstep::layout {
namespace {

constexpr std::array<std::string_view, 3> kTiers = {"device", "host", "disk"};

struct Totals {
  int64_t params = 0, grads = 0, states = 0;
  int64_t sum() const { return params + grads + states; }
};

bool is_decided_again(const std::vector<OffloadUnit>& units) {
  return std::ranges::any_of(units, [](const OffloadUnit& unit) { return unit.now.has_value(); });
}

// Where a unit is before anything moves.
OffloadPlaces::Unit begin_of(const OffloadUnit& unit) {
  return unit.now.value_or(
      OffloadPlaces::Unit{.states = std::vector(unit.states.size(), Tier::device)});
}

// Of what is on the device before anything moves.
Totals totals_of(const std::vector<OffloadUnit>& units) {
  Totals totals;
  for (const OffloadUnit& unit : units) {
    const OffloadPlaces::Unit begin = begin_of(unit);
    if (begin.params == Tier::device) totals.params += unit.params;
    if (begin.grads == Tier::device) totals.grads += unit.grads;
    for (size_t k = 0; k < unit.states.size(); ++k) {
      if (begin.states[k] == Tier::device) totals.states += unit.states[k].on_device;
    }
  }
  return totals;
}

// Of the one that is used and the next.
int64_t two_largest(const std::vector<int64_t>& lines) {
  int64_t first = 0, second = 0;
  for (const int64_t line : lines) {
    second = std::max(second, std::min(first, line));
    first = std::max(first, line);
  }
  return first + second;
}

int64_t fraction_of(int64_t bytes, double fraction) {
  return static_cast<int64_t>(static_cast<double>(bytes) * fraction);
}

// Enough, where a number of three digits may be a little less.
std::string exact_text(int64_t bytes) { return format("{} ({} bytes)", size_text(bytes), bytes); }

// "1.2 GB of parameters (offload.params is false)"
std::string kept_text(const Totals& kept) {
  std::string text;
  const auto add = [&](int64_t bytes, const char* what, const char* option) {
    if (bytes > 0)
      text += format(", {} of {} (offload.{} is false)", size_text(bytes), what, option);
  };
  add(kept.params, "parameters", "params");
  add(kept.grads, "gradients", "grads");
  add(kept.states, "optimizer state", "optimizer");
  return text;
}

// "; raise offload.device_limit, or offload more with offload.params"
std::string advice(const Totals& kept) {
  std::vector<std::string> off;
  if (kept.params > 0) off.push_back("offload.params");
  if (kept.grads > 0) off.push_back("offload.grads");
  if (kept.states > 0) off.push_back("offload.optimizer");
  return format("; raise offload.device_limit{}",
                off.empty() ? "" : ", or offload more with " + join(off));
}

const OffloadUnit& largest_of(const std::vector<OffloadUnit>& units) {
  return *std::ranges::max_element(units, {}, [](const OffloadUnit& unit) {
    return std::max(unit.params, unit.line) + unit.grads;
  });
}

void require_device_holds(const std::vector<OffloadUnit>& units, int64_t working,
                          const Totals& kept, const OffloadOptions& options) {
  const int64_t fixed = working + kept.sum();
  if (fixed <= options.device_limit) return;
  std::string largest;
  if (!units.empty()) {
    const OffloadUnit& unit = largest_of(units);
    largest = format("; the largest unit, {}, has {} of parameters and {} of gradients", unit.name,
                     size_text(std::max(unit.params, unit.line)), size_text(unit.grads));
  }
  throw ConfigError(format(
      "offload.device_limit is {}, but the device must hold {}: {} for what is being used{}{}{}",
      size_text(options.device_limit), exact_text(fixed), size_text(working), kept_text(kept),
      largest, advice(kept)));
}

// Places of everything, first all on the device, or where it rests already.
class Places {
 public:
  Places(const std::vector<OffloadUnit>& units, const OffloadOptions& options)
      : units_(units),
        options_(options),
        moves_params_(options.params && !is_decided_again(units)),
        all_(totals_of(units)) {
    for (const OffloadUnit& unit : units) places_.units.push_back(begin_of(unit));
  }

  // What the switches leave on the device, and parameters once they have their places.
  Totals kept() const {
    return {moves_params_ ? 0 : all_.params, options_.grads ? 0 : all_.grads,
            options_.optimizer ? 0 : all_.states};
  }

  bool everything_may_stay(int64_t working) const {
    std::vector<int64_t> lines;
    for (const OffloadUnit& unit : units_) lines.push_back(unit.line);
    const bool within_budget =
        !moves_params_ || all_.params + two_largest(lines) <= options_.param_budget;
    return within_budget &&
           working + all_.sum() <=
               fraction_of(options_.device_limit, threshold(options_.advanced.strategy));
  }

  void move(int64_t fixed) {
    const OffloadStrategy strategy = options_.advanced.strategy;
    int64_t room =
        fraction_of(options_.device_limit, threshold(strategy) * (1 - aggressiveness(strategy))) -
        fixed;
    if (moves_params_) {
      std::vector<int64_t> lines;
      for (const OffloadUnit& unit : units_) lines.push_back(std::max(unit.line, unit.params));
      int64_t budget = options_.param_budget - two_largest(lines);
      Filler filler{room};
      for (size_t i = 0; i < units_.size(); ++i) {
        const int64_t bytes = units_[i].params;
        filler.full |= bytes > budget;
        places_.units[i].params = filler.put(bytes);
        if (places_.units[i].params == Tier::device) budget -= bytes;
      }
    }
    if (options_.grads) {
      Filler filler{room};
      for (size_t i = 0; i < units_.size(); ++i) {
        Tier& tier = places_.units[i].grads;
        if (tier == Tier::device) tier = filler.put(units_[i].grads);
      }
    }
    if (options_.optimizer) {
      Filler filler{room};
      for (size_t i = 0; i < units_.size(); ++i) {
        for (size_t k = 0; k < units_[i].states.size(); ++k) {
          Tier& tier = places_.units[i].states[k];
          if (tier == Tier::device) tier = filler.put(units_[i].states[k].on_device);
        }
      }
    }
  }

  // From the last slice on, as long as there is too much on the host.
  void spill(int64_t host_bytes) {
    int64_t on_host = count(0).on_host;
    for (size_t i = units_.size(); i-- > 0;) {
      for (size_t k = units_[i].states.size(); k-- > 0;) {
        Tier& tier = places_.units[i].states[k];
        if (on_host <= host_bytes) return;
        if (tier != Tier::host) continue;
        tier = Tier::disk;
        on_host -= units_[i].states[k].on_host;
      }
    }
  }

  OffloadPlaces count(int64_t working) const {
    OffloadPlaces places = places_;
    const auto add = [&](Tier tier, int64_t on_device, int64_t on_host) {
      (tier == Tier::device ? places.resting
       : tier == Tier::host ? places.on_host
                            : places.on_disk) += tier == Tier::device ? on_device : on_host;
    };
    for (size_t i = 0; i < units_.size(); ++i) {
      add(places.units[i].params, units_[i].params, units_[i].params_on_host());
      add(places.units[i].grads, units_[i].grads, units_[i].grads_on_host());
      for (size_t k = 0; k < units_[i].states.size(); ++k) {
        const auto& slice = units_[i].states[k];
        add(places.units[i].states[k], slice.on_device, slice.on_host);
      }
    }
    places.on_device = places.resting + working;
    return places;
  }

 private:
  // Takes from `room` until something does not fit; that and all that follows goes to the host.
  struct Filler {
    int64_t& room;
    bool full = false;

    Tier put(int64_t bytes) {
      if (bytes == 0) return Tier::device;  // nothing to move
      full |= bytes > room;
      if (full) return Tier::host;
      room -= bytes;
      return Tier::device;
    }
  };

  const std::vector<OffloadUnit>& units_;
  const OffloadOptions& options_;
  bool moves_params_;
  Totals all_;
  OffloadPlaces places_;
};

void require_line_fits(const std::vector<OffloadUnit>& units, const OffloadOptions& options) {
  const auto line_of = [](const OffloadUnit& unit) { return std::max(unit.params, unit.line); };
  const auto largest = std::ranges::max_element(units, {}, line_of);
  if (largest == units.end() || line_of(*largest) <= options.param_budget) return;
  throw ConfigError(
      format("offload.param_budget is {}, but the parameters of {} have {}, which "
             "the device must have while it is used",
             size_text(options.param_budget), largest->name, exact_text(line_of(*largest))));
}

}  // namespace

std::string_view name_of(Tier tier) { return enum_name(kTiers, tier); }

OffloadPlaces place(const std::vector<OffloadUnit>& units, int64_t working,
                    const OffloadOptions& options, int64_t host_reserve) {
  Places places(units, options);
  const Totals kept = places.kept();
  const bool again = is_decided_again(units);
  if (!again) require_device_holds(units, working, kept, options);
  if (places.everything_may_stay(working)) return places.count(working);
  if (options.params && !again) require_line_fits(units, options);
  places.move(working + kept.sum());

  const int64_t most = std::min(options.host_budget, options.advanced.host_limit);
  if (!options.disk.empty())
    places.spill(std::min(most, fraction_of(options.advanced.host_limit,
                                            threshold(options.advanced.strategy))) -
                 host_reserve);
  OffloadPlaces counted = places.count(working);
  const int64_t on_host = counted.on_host + host_reserve;
  if (on_host <= most) return counted;
  const bool budget = options.host_budget <= options.advanced.host_limit;
  throw ConfigError(format(
      "offload.{} is {}, but {} are offloaded{}; {}", budget ? "host_budget" : "host_limit",
      size_text(most), exact_text(on_host),
      options.disk.empty() ? ""
                           : format(", in addition to {} on the disk", size_text(counted.on_disk)),
      options.disk.empty()
          ? "allow more, name a folder in offload.disk, encode state with offload.codec, or leave "
            "more on the device with offload.device_limit or a milder offload.strategy"
          : "parameters and gradients do not go to the disk: allow more, or leave more on the "
            "device with offload.device_limit or a milder offload.strategy"));
}

}  // namespace lockstep::layout
