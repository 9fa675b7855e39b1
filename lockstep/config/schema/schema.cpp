// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/schema/schema.h"

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "lockstep/config/schema/settings.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"

namespace lockstep::config {
namespace {

constexpr std::string_view kFlag = "--";
constexpr uint64_t kMaxFile = uint64_t{16} << 20;

// What is said of values that an option does not take.
std::string limits_text(const Limits& limits) {
  std::vector<std::string> parts;
  const auto add = [&](const char* words, double limit) {
    parts.push_back(format("{} {}", words, number_text(limit)));
  };
  if (limits.min > -std::numeric_limits<double>::infinity())
    add(limits.above_min ? "above" : "at least", limits.min);
  if (limits.max < std::numeric_limits<double>::infinity())
    add(limits.below_max ? "below" : "at most", limits.max);
  return parts.empty() ? std::string() : format(" {}", join(parts, " and "));
}

std::string rule_of(const Option& option) {
  std::string rule;
  switch (option.type) {
    case OptionType::integer:
      rule = format("a whole number{}", limits_text(option.limits));
      break;
    case OptionType::number:
      rule = format("a number{}", limits_text(option.limits));
      break;
    case OptionType::boolean:
      rule = "true or false";
      break;
    case OptionType::numbers:
      rule = format("a list of numbers{}", limits_text(option.limits));
      break;
    case OptionType::bytes:
      rule = "a size such as 8GB, at least 0";
      break;
    case OptionType::choice:
      rule = format("one of {}", join(option.choices));
      break;
    default:
      rule = "a string";
  }
  if (option.automatic) rule += option.type == OptionType::choice ? ", auto" : ", or auto";
  return rule;
}

bool inside(const Limits& limits, double number) {
  return (limits.above_min ? number > limits.min : number >= limits.min) &&
         (limits.below_max ? number < limits.max : number <= limits.max);
}

bool finite(double number) { return number - number == 0; }

std::string with_hyphens(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

// The value in the form that the option's variable takes; none where it does not.
std::optional<Value> adapt(const Option& option, const Value& value) {
  if (option.automatic && value == detail::kAuto) return value;
  const auto* integer = std::get_if<int64_t>(&value);
  const auto* text = std::get_if<std::string>(&value);
  const auto number = [&](double limit_tested) -> std::optional<Value> {
    if (!finite(limit_tested) || !inside(option.limits, limit_tested)) return std::nullopt;
    return limit_tested;
  };
  switch (option.type) {
    case OptionType::boolean:
      return std::holds_alternative<bool>(value) ? std::optional(value) : std::nullopt;
    case OptionType::integer:
      if (integer == nullptr || !inside(option.limits, static_cast<double>(*integer)))
        return std::nullopt;
      return value;
    case OptionType::number:
      if (integer != nullptr) return number(static_cast<double>(*integer));
      if (const auto* real = std::get_if<double>(&value)) return number(*real);
      return std::nullopt;
    case OptionType::numbers: {
      const auto* list = std::get_if<std::vector<double>>(&value);
      if (list == nullptr || !std::all_of(list->begin(), list->end(),
                                          [&](double item) { return number(item).has_value(); }))
        return std::nullopt;
      return value;
    }
    case OptionType::bytes: {
      const auto bytes = text != nullptr      ? parse_bytes(*text)
                         : integer != nullptr ? std::optional(*integer)
                                              : std::nullopt;
      return bytes && *bytes >= 0 ? std::optional<Value>(*bytes) : std::nullopt;
    }
    case OptionType::choice:
      if (text == nullptr) return std::nullopt;
      for (const std::string& name : option.choices)
        if (with_hyphens(name) == with_hyphens(*text)) return name;
      return std::nullopt;
    case OptionType::text_or_number:
      if (integer != nullptr) return std::to_string(*integer);
      if (const auto* real = std::get_if<double>(&value)) return number_text(*real);
      if (text != nullptr) {
        const auto as_number = parse_number(*text);
        return as_number ? number_text(*as_number) : *text;
      }
      return std::nullopt;
    case OptionType::text:
      break;
  }
  return text != nullptr ? std::optional(value) : std::nullopt;
}

// What a flag's text says to an option of this type; the text itself where it says nothing.
Value read_flag(const Option& option, const std::string& text) {
  switch (option.type) {
    case OptionType::boolean:
      if (text == "true" || text == "false") return text == "true";
      break;
    case OptionType::integer:
      if (const auto integer = parse_integer(text)) return *integer;
      break;
    case OptionType::number:
      if (const auto number = parse_number(text)) return *number;
      break;
    case OptionType::numbers:
      if (const auto numbers = parse_numbers(text)) return *numbers;
      break;
    default:
      break;
  }
  return text;
}

void assign(Option& option, const Value& value, Origin origin, const std::string& where) {
  const auto adapted = adapt(option, value);
  if (!adapted) {
    throw ConfigError(
        format("{}{} is {}, must be {}", where, option.name,
               origin == Origin::flag ? format("'{}'", plain_text(value)) : toml_literal(value),
               rule_of(option)));
  }
  option.put(*adapted);
  option.origin = origin;
}

}  // namespace

namespace detail {

size_t index_of(const std::vector<std::string>& names, const Value& value) {
  const auto found = std::find(names.begin(), names.end(), std::get<std::string>(value));
  return static_cast<size_t>(found - names.begin());
}

}  // namespace detail

std::string_view name_of(Origin origin) {
  switch (origin) {
    case Origin::file:
      return "file";
    case Origin::flag:
      return "flag";
    default:
      return "default";
  }
}

void Schema::section(std::string name, std::string title) {
  sections_.push_back({std::move(name), std::move(title)});
}

void Schema::add_option(std::string key, Option option) {
  lockstep::check(!sections_.empty(), "an option was added before the first section");
  Section& section = sections_.back();
  option.name = format("{}.{}", section.name, key);
  option.fallback = option.get();
  section.options.push_back(std::move(option));
}

void Schema::add_choice(std::string key, std::string& variable, std::vector<std::string> names,
                        std::string help) {
  Option option{.type = OptionType::choice, .help = std::move(help), .choices = std::move(names)};
  option.get = [&variable]() -> Value { return variable; };
  option.put = [&variable](const Value& value) { variable = std::get<std::string>(value); };
  add_option(std::move(key), std::move(option));
}

void Schema::add_bytes(std::string key, int64_t& variable, std::string help) {
  add(std::move(key), variable, std::move(help));
  sections_.back().options.back().type = OptionType::bytes;
}

void Schema::add_text_or_number(std::string key, std::string& variable, std::string help) {
  add(std::move(key), variable, std::move(help));
  sections_.back().options.back().type = OptionType::text_or_number;
}

void Schema::alias(const std::string& name, std::string alias) {
  find(name, "").alias = std::move(alias);
}

void Schema::suggest(const std::string& name, std::string elsewhere) {
  find(name, "").elsewhere.push_back(std::move(elsewhere));
}

Option& Schema::find(const std::string& name, const std::string& where) {
  // A name without its section is as good a guess as one with a slip.
  const bool bare = name.find('.') == std::string::npos;
  for (Section& section : sections_) {
    for (Option& option : section.options) {
      if (option.name == name || (where == kFlag && bare && option.alias == name)) return option;
    }
  }
  std::string nearest;
  size_t least = std::max<size_t>(2, name.size() / 3) + 1;
  for (Section& section : sections_) {
    for (Option& option : section.options) {
      const std::string key = bare ? option.name.substr(section.name.size() + 1) : option.name;
      const bool known =
          std::ranges::find(option.elsewhere, with_hyphens(name)) != option.elsewhere.end();
      if (const size_t distance = known ? 0 : edit_distance(name, key); distance < least) {
        least = distance;
        nearest = option.name;
      }
    }
  }
  throw ConfigError(
      format("{}{} is not an option{}", where, name,
             nearest.empty() ? "; --help lists them" : format("; did you mean {}?", nearest)));
}

void Schema::set_flag(const std::string& name, const std::string& text) {
  Option& option = find(name, "--");
  assign(option, read_flag(option, text), Origin::flag, "--");
}

void Schema::read_text(const std::string& text, const std::string& path) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  const bool json = first != std::string::npos && text[first] == '{';
  std::set<std::string> seen;
  for (const Setting& setting : json ? read_json(text, path) : read_toml(text, path)) {
    const std::string where =
        setting.line > 0 ? format("{}:{}: ", path, setting.line) : format("{}: ", path);
    Option& option = find(setting.name, where);
    if (!seen.insert(setting.name).second)
      throw ConfigError(format("{}{} is set twice", where, setting.name));
    // Also a value that is not used must be right.
    const Value kept = option.get();
    const Origin origin = option.origin;
    assign(option, setting.value, Origin::file, where);
    if (origin == Origin::flag) {
      option.put(kept);
      option.origin = origin;
    }
  }
}

void Schema::read_file(const std::string& path) {
  if (path.ends_with(".yaml") || path.ends_with(".yml")) {
    throw ConfigError(
        format("the configuration {} is YAML, not TOML or JSON; convert it to one of these", path));
  }
  std::string text;
  try {
    text = lockstep::read_text(path, kMaxFile);
  } catch (const SystemError& failure) {
    throw ConfigError(format("cannot read the configuration {}: {}", path,
                             std::generic_category().message(failure.error_number())));
  }
  read_text(text, path);
}

void Schema::check() const {
  for (const Section& section : sections_) {
    for (const Option& option : section.options) {
      const Value value = option.get();
      if (!adapt(option, value)) {
        throw ConfigError(
            format("{} is {}, must be {}", option.name, toml_literal(value), rule_of(option)));
      }
    }
  }
}

Origins Schema::origins() const {
  Origins origins;
  for (const Section& section : sections_)
    for (const Option& option : section.options) origins[option.name] = option.origin;
  return origins;
}

void Schema::restore(const Origins& origins) {
  for (Section& section : sections_) {
    for (Option& option : section.options) {
      if (const auto found = origins.find(option.name); found != origins.end())
        option.origin = found->second;
    }
  }
}

}  // namespace lockstep::config
