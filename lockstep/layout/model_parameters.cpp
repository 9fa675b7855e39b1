// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/placement.h"

namespace lockstep::layout {
namespace {

constexpr Requirement require_parameter("model_parameters");

}  // namespace

std::string ParameterStatistics::describe() const {
  const auto number = [](double value) {
    return value == std::floor(value) ? format("{:.0f}", value) : format("{:.1f}", value);
  };
  return format("{} tensor{}, {} elements (mean {}, median {}, min {}, max {}), {}", count,
                count == 1 ? "" : "s", elements, number(mean), number(median), min, max,
                size_text(bytes));
}

ModelParameters& ModelParameters::add(std::string name, Shape shape, int64_t element_bytes) {
  require_parameter(!name.empty(), format("a parameter of shape {} has no name, must have one",
                                          layout::describe(shape)));
  require_parameter(std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; }),
                    format("parameter '{}' has the shape {}, sizes must be at least 0", name,
                           layout::describe(shape)));
  require_parameter(element_bytes >= 1, format("parameter '{}' has elements of {} bytes, must be "
                                               "at least 1",
                                               name, element_bytes));
  const auto [place, is_new] = places_.emplace(name, parameters_.size());
  if (!is_new) {
    throw ConfigError(
        format("[model_parameters] parameter '{}' of shape {} is there already, with "
               "shape {}",
               name, layout::describe(shape), layout::describe(parameters_[place->second].shape)));
  }
  parameters_.push_back({std::move(name), std::move(shape), element_bytes});
  return *this;
}

size_t ModelParameters::index(std::string_view name) const {
  const auto place = places_.find(name);
  if (place == places_.end()) {
    throw ConfigError(format("[model_parameters] there is no parameter '{}' among the {}", name,
                             parameters_.size()));
  }
  return place->second;
}

const ModelParameters::Parameter& ModelParameters::at(std::string_view name) const {
  return parameters_[index(name)];
}

ParameterStatistics ModelParameters::statistics() const {
  if (parameters_.empty()) return {};
  std::vector<int64_t> sizes;
  ParameterStatistics all{.count = static_cast<int64_t>(parameters_.size())};
  for (const Parameter& parameter : parameters_) {
    sizes.push_back(parameter.elements());
    all.elements += sizes.back();
    all.bytes += parameter.bytes();
  }
  std::sort(sizes.begin(), sizes.end());
  all.mean = static_cast<double>(all.elements) / static_cast<double>(all.count);
  const size_t middle = sizes.size() / 2;
  all.median = static_cast<double>(sizes[middle]);
  if (sizes.size() % 2 == 0) all.median = (static_cast<double>(sizes[middle - 1]) + all.median) / 2;
  all.min = sizes.front();
  all.max = sizes.back();
  return all;
}

}  // namespace lockstep::layout
