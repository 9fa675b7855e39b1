// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/schema/schema_text.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

constexpr size_t kHelpColumn = 34, kWidth = 98;

const char* value_name(const Option& option) {
  switch (option.type) {
    case OptionType::integer:
      return "N";
    case OptionType::number:
      return "X";
    case OptionType::boolean:
      return "BOOL";
    case OptionType::numbers:
      return "X,X...";
    case OptionType::bytes:
      return "SIZE";
    case OptionType::choice:
      return "NAME";
    default:
      return "TEXT";
  }
}

std::string choices_text(const Option& option, const char* separator) {
  std::vector<std::string> names = option.choices;
  if (option.automatic) names.push_back("auto");
  return join(names, separator);
}

// Numbers that stand for sizes, and texts that stand for numbers, in the spelling of people.
std::string shown(const Option& option, const Value& value) {
  if (option.type == OptionType::bytes) return bytes_text(std::get<int64_t>(value));
  return plain_text(value);
}

Value written(const Option& option, const Value& value) {
  if (option.type == OptionType::bytes && std::get<int64_t>(value) % 1024 == 0 &&
      std::get<int64_t>(value) != 0)
    return bytes_text(std::get<int64_t>(value));
  if (option.type == OptionType::text_or_number) {
    if (const auto number = parse_number(std::get<std::string>(value))) return *number;
  }
  return value;
}

// Breaks the text at spaces; every line but the first is indented.
std::string wrapped(const std::string& text, size_t indent) {
  std::string out;
  size_t column = indent;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + word.size() > kWidth) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

std::string markdown_cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2)
    text.insert(at, 1, '\\');
  return text;
}

nlohmann::ordered_json to_json(const Value& value) {
  return std::visit([](const auto& held) { return nlohmann::ordered_json(held); }, value);
}

}  // namespace

std::string help_text(const Schema& schema) {
  std::string out;
  for (const Section& section : schema.sections()) {
    out += format("\n{}:\n", section.title);
    for (const Option& option : section.options) {
      std::string flag = format("  --{} {}", option.name, value_name(option));
      flag += flag.size() + 2 > kHelpColumn ? format("\n{}", std::string(kHelpColumn, ' '))
                                            : std::string(kHelpColumn - flag.size(), ' ');
      std::string help = option.help;
      if (!option.alias.empty()) help += format(" Short form: --{}.", option.alias);
      // Many names need more than one line.
      const char* const separator = option.choices.size() >= 8 ? " | " : "|";
      if (!option.choices.empty()) help += format(" {{{}}}", choices_text(option, separator));
      const std::string fallback = shown(option, option.fallback);
      if (!fallback.empty()) help += format(" [{}]", fallback);
      out += format("{}{}\n", flag, wrapped(help, kHelpColumn));
    }
  }
  return out;
}

std::string markdown_text(const Schema& schema) {
  std::string out;
  for (const Section& section : schema.sections()) {
    out +=
        format("\n## {}: {}\n\n| key | default | |\n|---|---|---|\n", section.name, section.title);
    for (const Option& option : section.options) {
      std::string help = option.help;
      if (!option.choices.empty()) help += format(" One of: {}.", choices_text(option, ", "));
      const std::string fallback = toml_literal(written(option, option.fallback));
      const std::string alias = option.alias.empty() ? "" : format(", `--{}`", option.alias);
      out += format("| `{}`{} | `{}` | {} |\n", option.name, alias, markdown_cell(fallback),
                    markdown_cell(help));
    }
  }
  return out;
}

std::string toml_text(const Schema& schema) {
  std::string out;
  for (const Section& section : schema.sections()) {
    out += format("{}[{}]\n", out.empty() ? "" : "\n", section.name);
    for (const Option& option : section.options) {
      const std::string line = format("{} = {}", option.name.substr(section.name.size() + 1),
                                      toml_literal(written(option, option.get())));
      out += format("{:<40}  # {}\n", line, name_of(option.origin));
    }
  }
  return out;
}

std::string json_text(const Schema& schema) {
  nlohmann::ordered_json out;
  for (const Section& section : schema.sections()) {
    for (const Option& option : section.options) {
      const std::string key = option.name.substr(section.name.size() + 1);
      out[section.name][key] = to_json(written(option, option.get()));
    }
  }
  try {
    return out.dump(2) + "\n";
  } catch (const nlohmann::ordered_json::exception& failure) {
    throw ConfigError(format("the configuration cannot be written as JSON: {}", failure.what()));
  }
}

}  // namespace lockstep::config
