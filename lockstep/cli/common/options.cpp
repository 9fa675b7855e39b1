// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/common/options.h"

#include <algorithm>
#include <charconv>
#include <iostream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

constexpr size_t kColumn = 30;

template <class T>
std::optional<T> number_of(const std::string& text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// The name that a user writes; positional arguments have only that of the usage line.
std::string name_of(const CLI::Option& option) { return option.get_name(false, false); }

// "-n N" where there is a short name, which is the one in use.
std::string required_name_of(const CLI::Option& option) {
  if (option.get_snames().empty()) return name_of(option);
  const std::string type = option.get_type_name();
  return format("-{} {}", option.get_snames().front(), type.starts_with("INT") ? "N" : type);
}

bool takes_values(const CLI::Option& option) { return option.get_type_size() != 0; }

std::string help_line(const CLI::Option& option) {
  std::string text = "  " + option.get_name(false, true);
  if (takes_values(option)) {
    text += " " + option.get_type_name();
    if (!option.get_default_str().empty()) text += "=" + option.get_default_str();
    if (option.get_items_expected_max() > 1) text += " ...";
    if (option.get_required()) text += " REQUIRED";
  }
  if (text.size() < kColumn) {
    text.resize(kColumn, ' ');
  } else {
    text += "\n" + std::string(kColumn, ' ');
  }
  return text + option.get_description() + "\n";
}

std::string help_of(const CLI::App& app) {
  std::string text = "\nOptions:\n";
  for (const CLI::Option* option : app.get_options()) {
    if (option->nonpositional()) text += help_line(*option);
  }
  return text;
}

// Values are looked at before CLI11 converts them, so that what cannot be converted is named here.
void check_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const bool whole = type.starts_with("INT") || type.starts_with("UINT");
    if (!takes_values(*option) || (!whole && !type.starts_with("FLOAT"))) continue;
    option->check(CLI::Validator(
        [whole](const std::string& text) {
          if (whole ? number_of<int64_t>(text).has_value() : number_of<double>(text).has_value())
            return std::string();
          return format("'{}' is not a {}", text, whole ? "whole number" : "number");
        },
        ""));
  }
}

// CLI11 names the option first where it names one.
std::string message_of(const CLI::App& app, const CLI::ParseError& failure) {
  if (dynamic_cast<const CLI::ValidationError*>(&failure) != nullptr) return failure.what();
  if (dynamic_cast<const CLI::RequiredError*>(&failure) != nullptr) {
    for (const CLI::Option* option : app.get_options()) {
      if (option->get_required() && option->count() == 0)
        return required_name_of(*option) + " is required";
    }
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&failure) != nullptr) {
    return "unknown argument " + join(app.remaining(), " ") + "; --help lists the options";
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&failure) != nullptr) {
    for (const CLI::Option* option : app.get_options()) {
      const std::string text = failure.what(), name = name_of(*option);
      if (!name.empty() &&
          (text.starts_with(name + ":") || text.find(" " + name + ",") < text.size()))
        return name + " takes " + (takes_values(*option) ? "one value" : "no value");
    }
  }
  return failure.what();
}

}  // namespace

std::optional<int> parse(CLI::App& app, const std::string& command, const std::string& usage,
                         const std::vector<std::string>& arguments) {
  check_numbers(app);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(),
                                       arguments.rend()));  // CLI11 takes them from the back
  } catch (const CLI::CallForHelp&) {
    std::cout << usage << help_of(app);
    return 0;
  } catch (const CLI::ParseError& failure) {
    throw ConfigError(command + ": " + message_of(app, failure));
  }
  return std::nullopt;
}

CLI::Validator one_of(std::vector<std::string> words) {
  const std::string description = "{" + join(words, ",") + "}";
  return {[words = std::move(words)](const std::string& text) {
            if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
            return format("'{}' is unknown, must be one of {}", text, join(words, ", "));
          },
          description};
}

CLI::Validator whole_number(int64_t least, int64_t most) {
  return {[least, most](const std::string& text) {
            const auto value = number_of<int64_t>(text);
            if (value && *value >= least && *value <= most) return std::string();
            return format("{} must be a whole number from {} to {}", text, least, most);
          },
          format("{}..{}", least, most)};
}

CLI::Validator not_negative() {
  return {[](const std::string& text) {
            const auto value = number_of<double>(text);
            if (value && *value >= 0) return std::string();
            return format("{} must be a number of at least 0", text);
          },
          ""};
}

}  // namespace lockstep::cli
