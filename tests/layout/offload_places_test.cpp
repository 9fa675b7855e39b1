// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/offload_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "lockstep/core/error.h"
#include "tests/support/refused.h"
#include "tests/support/says.h"

namespace lockstep::layout {
namespace {

using test::refused;
using test::says;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

constexpr int64_t kMB = int64_t{1} << 20;
constexpr OffloadStrategy kPlaceStrategies[] = {
    OffloadStrategy::conservative, OffloadStrategy::balanced, OffloadStrategy::aggressive,
    OffloadStrategy::extreme};

// One unit of 10 MB of parameters, as much of gradients, and twice that of state in two slices.
std::vector<OffloadUnit> units_of(int count) {
  std::vector<OffloadUnit> units;
  for (int i = 0; i < count; ++i) {
    units.push_back({.name = "blocks." + std::to_string(i),
                     .params = 10 * kMB,
                     .grads = 10 * kMB,
                     .states = {{10 * kMB, 10 * kMB}, {10 * kMB, 10 * kMB}}});
  }
  return units;
}

OffloadOptions options_of(int64_t device_limit, OffloadStrategy strategy) {
  OffloadOptions options{.advanced = {.strategy = strategy}};
  options.device_limit = options.param_budget = device_limit;
  options.host_budget = options.advanced.host_limit = int64_t{1} << 40;
  return options;
}

std::vector<Tier> params_of(const OffloadPlaces& places) {
  std::vector<Tier> tiers;
  for (const auto& unit : places.units) tiers.push_back(unit.params);
  return tiers;
}
std::vector<Tier> grads_of(const OffloadPlaces& places) {
  std::vector<Tier> tiers;
  for (const auto& unit : places.units) tiers.push_back(unit.grads);
  return tiers;
}
std::vector<Tier> states_of(const OffloadPlaces& places) {
  std::vector<Tier> tiers;
  for (const auto& unit : places.units)
    tiers.insert(tiers.end(), unit.states.begin(), unit.states.end());
  return tiers;
}

TEST(OffloadPlaces, NamesOfTiers) {
  EXPECT_EQ(name_of(Tier::device), "device");
  EXPECT_EQ(name_of(Tier::host), "host");
  EXPECT_EQ(name_of(Tier::disk), "disk");
}

TEST(OffloadPlaces, NoUnits) {
  const auto places = place({}, 5, options_of(10, OffloadStrategy::aggressive));
  EXPECT_TRUE(places.units.empty());
  EXPECT_EQ(places.on_device, 5);
  EXPECT_EQ(places.resting, 0);
}

TEST(OffloadPlaces, NothingMovesBelowTheThreshold) {
  // 4 x 40 MB + 20 MB = 180 MB.
  const auto units = units_of(4);
  for (const auto strategy : kPlaceStrategies) {
    const auto limit = static_cast<int64_t>(180 * kMB / threshold(strategy));
    const auto below = place(units, 20 * kMB, options_of(limit + 4, strategy));
    EXPECT_THAT(params_of(below), Each(Tier::device));
    EXPECT_THAT(grads_of(below), Each(Tier::device));
    EXPECT_THAT(states_of(below), Each(Tier::device));
    EXPECT_EQ(below.resting, 160 * kMB);
    EXPECT_EQ(below.on_device, 180 * kMB);
    EXPECT_EQ(below.on_host, 0);
    const auto above = place(units, 20 * kMB, options_of(limit - 4, strategy));
    EXPECT_GT(above.on_host, 0) << name_of(strategy);
    EXPECT_EQ(above.resting + above.on_host, 160 * kMB);
  }
}

TEST(OffloadPlaces, FillsTheRoomThatTheStrategyLeaves) {
  // Room: 0.75 x 0.5 x 200 MB - 20 MB = 55 MB: all parameters, one unit's gradients, no state.
  auto places = place(units_of(4), 20 * kMB, options_of(200 * kMB, OffloadStrategy::balanced));
  EXPECT_THAT(params_of(places), Each(Tier::device));
  EXPECT_THAT(grads_of(places), ElementsAre(Tier::device, Tier::host, Tier::host, Tier::host));
  EXPECT_THAT(states_of(places), Each(Tier::host));
  EXPECT_EQ(places.resting, 50 * kMB);
  EXPECT_EQ(places.on_device, 70 * kMB);
  EXPECT_EQ(places.on_host, 110 * kMB);
  // 0.9 x 0.8 x 200 MB - 20 MB = 124 MB: also all gradients, and four slices.
  places = place(units_of(4), 20 * kMB, options_of(199 * kMB, OffloadStrategy::conservative));
  EXPECT_THAT(grads_of(places), Each(Tier::device));
  EXPECT_THAT(states_of(places), ElementsAre(Tier::device, Tier::device, Tier::device, Tier::device,
                                             Tier::host, Tier::host, Tier::host, Tier::host));
  // 0.6 x 0.2 x 200 MB - 20 MB = 4 MB.
  places = place(units_of(4), 20 * kMB, options_of(200 * kMB, OffloadStrategy::aggressive));
  EXPECT_EQ(places.resting, 0);
}

TEST(OffloadPlaces, ParametersKeepToTheirBudget) {
  // Below every threshold but for the parameters, 40 MB.
  auto options = options_of(1000 * kMB, OffloadStrategy::balanced);
  options.param_budget = 40 * kMB;
  EXPECT_EQ(place(units_of(4), 0, options).on_host, 0);
  options.param_budget = 39 * kMB;
  auto places = place(units_of(4), 0, options);
  // Two lines of 10 MB leave 19 MB.
  EXPECT_THAT(params_of(places), ElementsAre(Tier::device, Tier::host, Tier::host, Tier::host));
  EXPECT_THAT(states_of(places), Each(Tier::device));
  // Lines of gathered parameters count, whether their shares stay or not.
  auto units = units_of(4);
  for (auto& unit : units) unit.line = 40 * kMB;
  options.param_budget = 120 * kMB;
  EXPECT_EQ(place(units, 0, options).on_host, 0);
  options.param_budget = 119 * kMB;
  places = place(units, 0, options);
  EXPECT_THAT(params_of(places), ElementsAre(Tier::device, Tier::device, Tier::device, Tier::host));
  options.param_budget = 39 * kMB;
  EXPECT_THAT([&] { place(units, 0, options); },
              refused("offload.param_budget is 39 MB ... blocks.0 have 40 MB"));
  options.param_budget = 40 * kMB;
  EXPECT_THAT(params_of(place(units, 0, options)), Each(Tier::host));
  // It is nobody's where parameters do not move.
  options.param_budget = 1;
  options.params = false;
  EXPECT_EQ(place(units, 0, options).on_host, 0);
}

TEST(OffloadPlaces, StatesOnTheHostAreEncoded) {
  auto units = units_of(2);
  for (auto& unit : units)
    for (auto& slice : unit.states) slice.on_host = 3 * kMB;
  const auto places = place(units, 0, options_of(100 * kMB, OffloadStrategy::extreme));
  EXPECT_EQ(places.on_host, 2 * (10 + 10 + 3 + 3) * kMB);
  auto options = options_of(1000 * kMB, OffloadStrategy::extreme);
  EXPECT_EQ(place(units, 0, options).resting, 80 * kMB);  // as they are on the device
}

TEST(OffloadPlaces, SpillsStatesOfTheLastUnitsToDisk) {
  auto options = options_of(100 * kMB, OffloadStrategy::extreme);
  options.disk = "/fast";
  options.host_budget = 125 * kMB;
  options.advanced.host_limit = 1000 * kMB;
  auto places = place(units_of(4), 0, options);  // 160 MB move
  EXPECT_THAT(states_of(places), ElementsAre(Tier::host, Tier::host, Tier::host, Tier::host,
                                             Tier::disk, Tier::disk, Tier::disk, Tier::disk));
  EXPECT_EQ(places.on_host, 120 * kMB);
  EXPECT_EQ(places.on_disk, 40 * kMB);
  // 0.4 x 350 MB = 140 MB.
  options.host_budget = options.advanced.host_limit = 350 * kMB;
  places = place(units_of(4), 0, options);
  EXPECT_EQ(places.on_host, 140 * kMB);
  EXPECT_EQ(places.on_disk, 20 * kMB);
  // Below the limit, although above the threshold, parameters and gradients fit.
  options.host_budget = options.advanced.host_limit = 100 * kMB;
  places = place(units_of(4), 0, options);
  EXPECT_EQ(places.on_host, 80 * kMB);
  EXPECT_EQ(places.on_disk, 80 * kMB);
  // Without a disk the budget alone decides.
  options.disk = "";
  options.host_budget = options.advanced.host_limit = 160 * kMB;
  EXPECT_EQ(place(units_of(4), 0, options).on_host, 160 * kMB);
}

TEST(OffloadPlaces, DecidedAgainNothingComesNearerToTheDevice) {
  // 4 x 40 MB + 20 MB, below 0.9 x 300 MB: everything is on the device.
  auto units = units_of(4);
  const auto options = options_of(300 * kMB, OffloadStrategy::conservative);
  const auto rest_at = [&](const OffloadPlaces& places) {
    for (size_t i = 0; i < units.size(); ++i) units[i].now = places.units[i];
  };
  const OffloadPlaces first = place(units, 20 * kMB, options);
  EXPECT_EQ(first.on_host, 0);
  rest_at(first);
  EXPECT_EQ(place(units, 110 * kMB, options).units, first.units);  // 270 MB: still below
  // Room: 0.72 x 300 MB - 120 MB - 40 MB of parameters = 56 MB: all gradients, and a slice.
  const OffloadPlaces second = place(units, 120 * kMB, options);
  EXPECT_THAT(params_of(second), Each(Tier::device));
  EXPECT_THAT(grads_of(second), Each(Tier::device));
  EXPECT_EQ(std::ranges::count(states_of(second), Tier::device), 1);
  rest_at(second);
  EXPECT_EQ(place(units, 20 * kMB, options).units, second.units);  // nothing comes back
  // More than the device has: no error, and all that may leave has left. Parameters stay.
  const OffloadPlaces third = place(units, 400 * kMB, options);
  EXPECT_THAT(params_of(third), Each(Tier::device));
  EXPECT_THAT(grads_of(third), Each(Tier::host));
  EXPECT_THAT(states_of(third), Each(Tier::host));
  EXPECT_EQ(third.resting, 40 * kMB);
  EXPECT_EQ(third.on_host, 120 * kMB);
  auto small = options;
  small.host_budget = 119 * kMB;
  EXPECT_THAT([&] { place(units, 400 * kMB, small); }, refused("offload.host_budget is 119 MB"));
  small.disk = "/fast";
  EXPECT_EQ(place(units, 400 * kMB, small).on_disk, 10 * kMB);
}

TEST(OffloadPlaces, RefusesWhatTheHostCannotHold) {
  auto options = options_of(100 * kMB, OffloadStrategy::extreme);
  options.host_budget = 159 * kMB;
  EXPECT_THAT([&] { place(units_of(4), 0, options); },
              ThrowsMessage<ConfigError>(
                  AllOf(says("offload.host_budget is 159 MB ... 160 MB (167772160 bytes)"),
                        HasSubstr("offload.disk"), HasSubstr("offload.codec"))));
  options.advanced.host_limit = 100 * kMB;
  EXPECT_THAT([&] { place(units_of(4), 0, options); }, refused("offload.host_limit is 100 MB"));
  options = options_of(100 * kMB, OffloadStrategy::extreme);
  options.disk = "/fast";
  options.host_budget = 79 * kMB;
  EXPECT_THAT(
      [&] { place(units_of(4), 0, options); },
      refused("offload.host_budget is 79 MB ... 80 MB (83886080 bytes) ... 80 MB on the disk"));
}

TEST(OffloadPlaces, RefusesWhatTheDeviceCannotHold) {
  auto options = options_of(64 * kMB, OffloadStrategy::extreme);
  EXPECT_NO_THROW(place(units_of(4), 64 * kMB, options));
  EXPECT_THAT(
      [&] { place(units_of(4), 80 * kMB, options); },
      ThrowsMessage<ConfigError>(AllOf(
          says("offload.device_limit is 64 MB ... must hold 80 MB (83886080 bytes): 80 MB ... "
               "blocks.0, has 10 MB of parameters and 10 MB of gradients ... raise "
               "offload.device_limit"),
          Not(HasSubstr("is false")), Not(HasSubstr("offload more")))));
  options.params = false;
  EXPECT_THAT([&] { place(units_of(4), 30 * kMB, options); },
              refused("must hold 70 MB (73400320 bytes): 30 MB ... 40 MB of parameters "
                      "(offload.params is false) ... raise offload.device_limit ... offload more "
                      "with offload.params"));
  options.params = true;
  options.grads = options.optimizer = false;
  EXPECT_THAT([&] { place(units_of(4), 0, options); },
              refused("must hold 120 MB (125829120 bytes): 0 B ... 40 MB of gradients "
                      "(offload.grads is false) ... "
                      "80 MB of optimizer state (offload.optimizer is false)"));
}

// ---- rules that hold for all ----

struct Case {
  std::vector<OffloadUnit> units;
  int64_t working;
  OffloadOptions options;
};

Case random_case(std::mt19937& random) {
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  Case made;
  const int64_t count = 1 + below(8);
  for (int64_t i = 0; i < count; ++i) {
    OffloadUnit unit{.name = std::to_string(i), .params = below(1000), .grads = below(1000)};
    unit.line = below(2) == 0 ? 0 : unit.params * 2;
    for (int64_t k = below(4); k > 0; --k) {
      const int64_t bytes = below(1000);
      unit.states.push_back({bytes, bytes / 2});
    }
    made.units.push_back(unit);
  }
  made.working = below(2000);
  OffloadOptions& options = made.options;
  options.params = below(4) > 0;
  options.grads = below(4) > 0;
  options.optimizer = below(4) > 0;
  options.device_limit = 1 + below(30000);
  options.param_budget = 1 + below(options.device_limit);
  options.advanced.host_limit = 1 + below(30000);
  options.host_budget = 1 + below(options.advanced.host_limit);
  if (below(2) == 0) options.disk = "/fast";
  options.advanced.strategy = kPlaceStrategies[below(4)];
  return made;
}

struct Sums {
  int64_t device = 0, host = 0, disk = 0, params = 0;
};

Sums sums_of(const Case& made, const OffloadPlaces& places) {
  Sums sums;
  const auto add = [&](Tier tier, int64_t on_device, int64_t on_host) {
    if (tier == Tier::device) sums.device += on_device;
    if (tier == Tier::host) sums.host += on_host;
    if (tier == Tier::disk) sums.disk += on_host;
  };
  for (size_t i = 0; i < made.units.size(); ++i) {
    const OffloadUnit& unit = made.units[i];
    add(places.units[i].params, unit.params, unit.params);
    add(places.units[i].grads, unit.grads, unit.grads);
    if (places.units[i].params == Tier::device) sums.params += unit.params;
    for (size_t k = 0; k < unit.states.size(); ++k)
      add(places.units[i].states[k], unit.states[k].on_device, unit.states[k].on_host);
  }
  return sums;
}

// Of the tiers of one kind, without those of nothing: those on the device come first.
bool in_order(const std::vector<Tier>& tiers, const std::vector<int64_t>& bytes) {
  Tier last = Tier::device;
  for (size_t i = 0; i < tiers.size(); ++i) {
    if (bytes[i] == 0) continue;
    if (tiers[i] < last) return false;
    last = tiers[i];
  }
  return true;
}

TEST(OffloadPlaces, RulesHoldForRandomUnits) {
  std::mt19937 random(7);
  int placed = 0, moved = 0, spilled = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    const Case made = random_case(random);
    const OffloadOptions& options = made.options;
    OffloadPlaces places;
    try {
      places = place(made.units, made.working, options);
    } catch (const ConfigError&) {
      ++refused;
      continue;
    }
    ++placed;
    const Sums sums = sums_of(made, places);
    ASSERT_EQ(places.resting, sums.device);
    ASSERT_EQ(places.on_device, sums.device + made.working);
    ASSERT_EQ(places.on_host, sums.host);
    ASSERT_EQ(places.on_disk, sums.disk);
    moved += sums.host > 0;
    spilled += sums.disk > 0;

    // Budgets.
    ASSERT_LE(places.on_device, options.device_limit);
    ASSERT_LE(places.on_host, options.host_budget);
    if (options.params) {
      ASSERT_LE(sums.params, options.param_budget);
    }
    // Once something moves, what is left is within the strategy's room.
    int64_t fixed = made.working;
    std::vector<int64_t> params, grads, states;
    for (const OffloadUnit& unit : made.units) {
      params.push_back(unit.params);
      grads.push_back(unit.grads);
      for (const auto& slice : unit.states) states.push_back(slice.on_device);
    }
    const auto total = [](const std::vector<int64_t>& bytes) {
      int64_t sum = 0;
      for (const int64_t number : bytes) sum += number;
      return sum;
    };
    if (!options.params) fixed += total(params);
    if (!options.grads) fixed += total(grads);
    if (!options.optimizer) fixed += total(states);
    const int64_t all = made.working + total(params) + total(grads) + total(states);
    const double limit = static_cast<double>(options.device_limit);
    const double start = threshold(options.advanced.strategy) * limit;
    if (sums.host + sums.disk > 0) {
      const auto room =
          static_cast<int64_t>(start * (1 - aggressiveness(options.advanced.strategy)) + 1);
      ASSERT_LE(places.on_device, std::max(fixed, room));
    } else if (all > fixed && options.advanced.strategy == OffloadStrategy::extreme) {
      ASSERT_LE(static_cast<double>(all), start);
    }
    if (static_cast<double>(all) > start + 1 && all > fixed) {
      bool any = false;
      for (const auto& tiers : {params_of(places), grads_of(places), states_of(places)})
        any = any || std::ranges::any_of(tiers, [](Tier tier) { return tier != Tier::device; });
      ASSERT_TRUE(any);
    }
    // Switches, and what may go to the disk.
    if (!options.params) {
      ASSERT_THAT(params_of(places), Each(Tier::device));
    }
    if (!options.grads) {
      ASSERT_THAT(grads_of(places), Each(Tier::device));
    }
    if (!options.optimizer) {
      ASSERT_THAT(states_of(places), Each(Tier::device));
    }
    ASSERT_THAT(params_of(places), Each(Not(Tier::disk)));
    ASSERT_THAT(grads_of(places), Each(Not(Tier::disk)));
    if (options.disk.empty()) {
      ASSERT_EQ(places.on_disk, 0);
    }
    // Order: used first stays, used last goes furthest.
    ASSERT_TRUE(in_order(params_of(places), params));
    ASSERT_TRUE(in_order(grads_of(places), grads));
    ASSERT_TRUE(in_order(states_of(places), states));
  }
  // The cases are not all of one sort.
  EXPECT_GT(placed, 5000);
  EXPECT_GT(moved, 2000);
  EXPECT_GT(spilled, 300);
  EXPECT_GT(refused, 1000);
}

TEST(OffloadPlaces, AStrongerStrategyLeavesNoMoreOnTheDevice) {
  std::mt19937 random(11);
  for (int i = 0; i < 5000; ++i) {
    Case made = random_case(random);
    made.options.host_budget = made.options.advanced.host_limit = int64_t{1} << 40;
    int64_t before = int64_t{1} << 62;
    for (const auto strategy : kPlaceStrategies) {
      made.options.advanced.strategy = strategy;
      try {
        const auto places = place(made.units, made.working, made.options);
        ASSERT_LE(places.resting, before);
        before = places.resting;
      } catch (const ConfigError&) {
        break;  // what the device must hold is the same for all of them
      }
    }
  }
}

TEST(OffloadPlaces, ExtremeMovesAllThatMayMove) {
  std::mt19937 random(13);
  int moved = 0;
  for (int i = 0; i < 2000; ++i) {
    Case made = random_case(random);
    OffloadOptions& options = made.options;
    options.advanced.strategy = OffloadStrategy::extreme;
    options.host_budget = options.advanced.host_limit = int64_t{1} << 40;
    OffloadPlaces places;
    try {
      places = place(made.units, made.working, options);
    } catch (const ConfigError&) {
      continue;
    }
    if (places.on_host == 0) continue;
    ++moved;
    int64_t kept = 0;
    for (const OffloadUnit& unit : made.units) {
      if (!options.params) kept += unit.params;
      if (!options.grads) kept += unit.grads;
      for (const auto& slice : unit.states) kept += options.optimizer ? 0 : slice.on_device;
    }
    ASSERT_EQ(places.resting, kept);
  }
  EXPECT_GT(moved, 200);
}

}  // namespace
}  // namespace lockstep::layout
