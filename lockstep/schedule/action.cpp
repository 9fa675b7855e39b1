// SPDX-License-Identifier: Apache-2.0
#include "lockstep/schedule/action.h"

#include <array>
#include <charconv>
#include <cstddef>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::schedule {
namespace {

// In the order of Op.
constexpr std::array<std::string_view, 11> kNames = {
    "F", "B", "I", "W", "SA", "RA", "SG", "RG", "unshard", "reshard", "reduce"};
constexpr std::string_view kComputation = "FBIW";
constexpr int kMostNumber = 1'000'000;

// Takes a number off the front; nothing if there is none.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  if (text.empty() || text.front() == '-') return std::nullopt;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failure != std::errc{} || number >= kMostNumber) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

bool is_computation(Op op) { return op <= Op::backward_weight; }

std::string name_of(const Action& action, int chunks) {
  std::string name(kNames.at(static_cast<size_t>(action.op)));
  if (action.op < Op::unshard) name += std::to_string(action.microbatch);
  if (chunks > 1) name += '.' + std::to_string(action.chunk);
  return name;
}

Action parse_action(std::string_view name, int chunks) {
  const auto refuse = [&](const std::string& rule) -> ConfigError {
    return ConfigError(format("'{}' is not an action: {}", name, rule));
  };
  const size_t letter = name.empty() ? std::string_view::npos : kComputation.find(name.front());
  if (letter == std::string_view::npos) throw refuse("must begin with F, B, I or W");
  std::string_view rest = name.substr(1);
  const auto microbatch = take_number(rest);
  if (!microbatch) throw refuse("the number of a micro-batch must follow the letter");
  Action action{static_cast<Op>(letter), *microbatch, 0};
  if (rest.empty() && chunks == 1) return action;
  std::optional<int> chunk;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    chunk = take_number(rest);
  }
  if (!chunk || !rest.empty()) throw refuse("must end in a point and a chunk, such as F3.1");
  if (*chunk >= chunks) throw refuse(format("the chunk must be below {}", chunks));
  action.chunk = *chunk;
  return action;
}

}  // namespace lockstep::schedule
