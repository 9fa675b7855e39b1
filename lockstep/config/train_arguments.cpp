// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/train_arguments.h"

#include <algorithm>
#include <cctype>
#include <limits>

#include "lockstep/config/run_folder.h"
#include "lockstep/config/schema/schema_text.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

// The words of a command line, one flag at a time.
class Words {
 public:
  explicit Words(const std::vector<std::string>& words) : words_(words) {}

  // The next flag, without a value that an equals sign joins to it.
  bool next() {
    if (at_ == words_.size()) return false;
    flag_ = words_[at_++];
    value_.reset();
    if (const size_t equals = flag_.find('='); flag_.starts_with("--") && equals < flag_.size()) {
      value_ = flag_.substr(equals + 1);
      flag_.resize(equals);
    } else if (flag_.size() > 2 && flag_.starts_with("-n") && std::isdigit(flag_[2])) {
      value_ = flag_.substr(2);
      flag_.resize(2);
    }
    return true;
  }
  const std::string& flag() const { return flag_; }

  std::string value() {
    if (value_) return *value_;
    if (at_ == words_.size() || words_[at_].starts_with("--"))
      throw ConfigError(format("{} needs a value", flag_));
    return words_[at_++];
  }
  void expect_no_value() const {
    if (value_) throw ConfigError(format("{} takes no value, but has '{}'", flag_, *value_));
  }

 private:
  const std::vector<std::string>& words_;
  size_t at_ = 0;
  std::string flag_;
  std::optional<std::string> value_;
};

// "N", or "MIN:MAX".
void set_ranks(Schema& schema, const std::string& text) {
  const size_t colon = text.find(':');
  const auto number = [&](const std::string& part) {
    const auto ranks = parse_integer(part);
    if (!ranks || *ranks < 1 || *ranks > std::numeric_limits<int>::max())
      throw ConfigError(
          format("-n is '{}', must be a whole number at least 1, or two as MIN:MAX", text));
    return *ranks;
  };
  const int64_t max = number(colon == std::string::npos ? text : text.substr(colon + 1));
  const int64_t min = colon == std::string::npos ? 0 : number(text.substr(0, colon));
  if (min > max)
    throw ConfigError(format("-n {}: MIN {} is above MAX {}; swap them", text, min, max));
  schema.set_flag("run.ranks", std::to_string(max));
  if (min > 0) schema.set_flag("run.min_ranks", std::to_string(min));
}

}  // namespace

TrainArguments parse_train_arguments(const std::vector<std::string>& arguments) {
  TrainArguments parsed;
  const auto asks_for_help = [](const std::string& word) {
    return word == "--help" || word == "-h";
  };
  if (std::any_of(arguments.begin(), arguments.end(), asks_for_help)) {
    parsed.help = true;
    return parsed;
  }
  Schema schema = train_schema(parsed.config);
  Words words(arguments);
  while (words.next()) {
    const std::string& flag = words.flag();
    if (flag == "-n") {
      set_ranks(schema, words.value());
    } else if (flag == "--config") {
      if (!parsed.config_file.empty())
        throw ConfigError(format("--config is given twice; {} was the first", parsed.config_file));
      parsed.config_file = words.value();
      if (parsed.config_file.empty()) throw ConfigError("--config must name a file");
    } else if (flag == "--print-config") {
      words.expect_no_value();
      parsed.print_config = true;
    } else if (flag.starts_with("--") && flag.size() > 2) {
      const std::string name = flag.substr(2);
      schema.require_known(name);
      schema.set_flag(name, words.value());
    } else {
      throw ConfigError(format(
          "'{}' is not understood; options are --SECTION.KEY VALUE, and --help lists them", flag));
    }
  }
  if (!parsed.config_file.empty()) schema.read_file(parsed.config_file);
  const CheckpointConfig asked = parsed.config.checkpoint;
  const PlaceInRun place = place_in_run(asked.resume);
  if (asked.load == LoadWhat::all && !place.run.empty()) {
    parsed.continued = place.run;
    parsed.checkpoint = place.checkpoint;
    schema.read_file(run_config_file(place.run));
    if (!parsed.config_file.empty()) schema.read_file(parsed.config_file);
    // How that run began does not count any more.
    CheckpointConfig& checkpoint = parsed.config.checkpoint;
    checkpoint.resume = asked.resume;
    checkpoint.load = asked.load;
    checkpoint.partial = asked.partial;
    checkpoint.other_data = asked.other_data;
  }
  if (parsed.config.run.ranks > 0) parsed.ranks = parsed.config.run.ranks;
  parsed.origins = schema.origins();
  return parsed;
}

void require_layout_of_run(const TrainArguments& arguments, int world) {
  const LayoutConfig& parallel = arguments.config.parallel;
  const int64_t others = int64_t{parallel.tp} * parallel.pp * parallel.cp;
  const bool fits = parallel.dp == 0 ? world % others == 0 : parallel.dp * others == world;
  if (arguments.continued.empty() || fits) return;
  std::vector<std::string> values, flags;
  const auto add = [&](const char* key, int value, int neutral) {
    if (value == neutral || arguments.origins.at(key) != Origin::file) return;
    values.push_back(format("{} {}", key, value));
    flags.push_back(format("--{} {}", key, neutral));
  };
  add("parallel.dp", parallel.dp, 0);
  add("parallel.tp", parallel.tp, 1);
  add("parallel.pp", parallel.pp, 1);
  add("parallel.cp", parallel.cp, 1);
  if (values.empty()) return;  // of flags: validate() refuses them
  std::string file = run_config_file(arguments.continued);
  if (!arguments.config_file.empty()) file += format(" or {}", arguments.config_file);
  throw ConfigError(format("{} rank{} for a layout with {}, from {}; add {}, or start {} ranks",
                           world, world == 1 ? "" : "s", join(values), file, join(flags, " "),
                           std::max(parallel.dp, 1) * others));
}

std::string train_help() {
  TrainConfig defaults;
  return format(
      "Options:\n"
      "  -n N, -n MIN:MAX                Number of ranks to start on this machine; with MIN:MAX "
      "the\n"
      "                                  run continues with fewer after failures\n"
      "  --config FILE                   Configuration file, TOML or JSON; flags override it\n"
      "  --print-config                  Print the configuration with the origin of each value, "
      "then exit\n"
      "  -h, --help                      Print this help, then exit\n"
      "{}",
      help_text(train_schema(defaults)));
}

std::string print_config(const TrainArguments& arguments) {
  TrainConfig copy = arguments.config;
  Schema schema = train_schema(copy);
  schema.restore(arguments.origins);
  return toml_text(schema);
}

std::string common_lines(const TrainConfig& config) {
  constexpr std::string_view own[] = {
      "model.path",          "data.path",         "data.tokenizer", "data.validation",
      "train.threads",       "memory.disk",       "offload.disk",   "parallel.schedule_file",
      "checkpoint.dir",      "checkpoint.resume", "metrics.file",   "metrics.trace",
      "metrics.tensorboard", "run.dir",           "run.ranks",      "run.min_ranks",
      "run.grow_after",      "run.max_restarts",  "run.grace"};
  TrainConfig copy = config;
  const Schema schema = train_schema(copy);
  std::string lines;
  for (const Section& section : schema.sections()) {
    for (const Option& option : section.options) {
      if (std::find(std::begin(own), std::end(own), option.name) != std::end(own)) continue;
      lines += format("{} = {}\n", option.name, toml_literal(option.get()));
    }
  }
  return lines;
}

}  // namespace lockstep::config
