// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/places.h"

#include <algorithm>
#include <charconv>

#include "lockstep/core/format.h"
#include "lockstep/core/require.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kLongestOut{3600};

std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Bounds parse_bounds(const std::string& text, const std::string& option) {
  const size_t colon = text.find(':');
  const auto max = whole_number(colon == std::string::npos ? text : text.substr(colon + 1));
  const auto min = colon == std::string::npos ? max : whole_number(text.substr(0, colon));
  require(min && max,
          format("{} is '{}', must be a whole number, or two as MIN:MAX", option, text));
  if (colon == std::string::npos) return {*max, *max};
  require(*min >= 1, format("{} {}: MIN is {}, must be at least 1", option, text, *min));
  require(*min <= *max,
          format("{} {}: MIN {} is above MAX {}; swap them", option, text, *min, *max));
  return {*min, *max};
}

Places::Places(Bounds bounds, std::chrono::seconds patience, StartSizes sizes)
    : bounds_(bounds), patience_(patience), sizes_(std::move(sizes)) {}

void Places::fail(const std::vector<int>& places, Clock::time_point now) {
  for (const int place : places) {
    const int times = std::min(failures_[place]++, 30);
    const auto wait = std::min<std::chrono::seconds>(std::max(kLongestOut, patience_),
                                                     patience_ * (int64_t{1} << times));
    out_until_[place] = now + wait;
  }
  if (!size_for(usable(now).size())) out_until_.clear();
}

void Places::set_present(int place, bool present) {
  if (present) {
    absent_.erase(place);
  } else {
    absent_.insert(place);
  }
}

std::vector<int> Places::usable(Clock::time_point now) const {
  std::vector<int> found;
  for (int place = 0; place < bounds_.max; ++place) {
    const auto out = out_until_.find(place);
    if (!absent_.contains(place) && (out == out_until_.end() || out->second <= now))
      found.push_back(place);
  }
  return found;
}

std::optional<StartSize> Places::size_for(size_t places) const {
  const auto count = static_cast<int>(places);
  if (count < bounds_.min) return std::nullopt;
  if (sizes_.empty()) return StartSize{count};
  const auto found = sizes_.find(count);
  return found == sizes_.end() ? std::nullopt : std::optional(found->second);
}

Places::Start Places::next(Clock::time_point now) const {
  std::vector<int> here = usable(now);
  const auto size = size_for(here.size());
  if (!size) return {};
  Start start{.places = here, .layout = size->layout};
  start.places.resize(static_cast<size_t>(size->size));
  std::vector<Clock::time_point> times;
  for (const auto& [place, time] : out_until_) {
    if (time > now && !absent_.contains(place)) times.push_back(time);
  }
  std::sort(times.begin(), times.end());
  for (size_t i = 0; i < times.size() && !start.grows_at; ++i) {
    const auto larger = size_for(here.size() + i + 1);
    if (larger && larger->size > size->size) start.grows_at = times[i];
  }
  return start;
}

}  // namespace lockstep::launch
