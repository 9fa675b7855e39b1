// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/recompute_schema.h"

#include <charconv>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {

// fit leaves open how much is recomputed until the memory is known.
void add_recompute(Schema& schema, RunConfig& train) {
  const std::vector<std::string> names{"none", "selective", "full"};
  Option option{
      .type = OptionType::choice,
      .help =
          "Activations that the backward pass recomputes instead of storing them. fit: as few "
          "as the memory allows. auto: memory.strategy decides.",
      .choices = {"none", "selective", "full", "fit"}};
  option.automatic = true;
  option.get = [&train, names]() -> Value {
    if (train.fit) return "fit";
    return train.recompute ? names.at(static_cast<size_t>(*train.recompute)) : detail::kAuto;
  };
  option.put = [&train, names](const Value& value) {
    train.recompute.reset();
    train.fit.reset();
    if (value == Value("fit"))
      train.fit = RecomputedBlocks{};
    else if (value != detail::kAuto)
      train.recompute = static_cast<layout::Recompute>(detail::index_of(names, value));
  };
  schema.add_option("recompute", std::move(option));
}

// 0 is off.
void add_tile(Schema& schema, RunConfig& train) {
  Option option{.type = OptionType::text_or_number,
                .help =
                    "Tokens of a row that MLP, norms and loss compute at once; backward computes "
                    "them again, one tile after the other. off: all tokens. auto: off, but 4096 "
                    "where a rank has at least 16384 tokens of a row and the predicted peak of "
                    "memory needs it."};
  option.get = [&train]() -> Value {
    return !train.tile        ? detail::kAuto
           : *train.tile == 0 ? Value("off")
                              : Value(std::to_string(*train.tile));
  };
  option.put = [&train](const Value& value) {
    const auto& text = std::get<std::string>(value);
    int64_t tokens = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
    const bool is_number = error == std::errc() && end == text.data() + text.size() && tokens > 0;
    if (text != "auto" && text != "off" && !is_number)
      throw ConfigError(
          format("train.tile is '{}', must be auto, off or a number of tokens above 0", text));
    train.tile.reset();
    if (text != "auto") train.tile = tokens;
  };
  schema.add_option("tile", std::move(option));
}

}  // namespace lockstep::config
