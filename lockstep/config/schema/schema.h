// SPDX-License-Identifier: Apache-2.0
// One description of a program's options: flags, files, help and documentation all come from it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/config/schema/option_value.h"

namespace lockstep::config {

// Who set a value. A flag wins over a file, a file over the default.
enum class Origin { by_default, file, flag };
std::string_view name_of(Origin origin);  // "default", "file", "flag"
using Origins = std::map<std::string, Origin>;

enum class OptionType { integer, number, boolean, text, text_or_number, choice, numbers, bytes };

struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false, below_max = false;  // the limit itself is outside
};

struct Option {
  std::string name = {};                    // "train.steps"
  std::string alias = {};                   // "steps": another name of its flag
  std::vector<std::string> elsewhere = {};  // names in other programs, which are suggested only
  OptionType type = OptionType::text;
  std::string help = {};
  Limits limits = {};                     // of a number, or of each in a list
  std::vector<std::string> choices = {};  // of a choice
  bool automatic = false;                 // "auto" is a value too
  Value fallback = {};                    // the default
  std::function<Value()> get = {};
  std::function<void(const Value&)> put = {};
  Origin origin = Origin::by_default;
};

struct Section {
  std::string name, title;
  std::vector<Option> options = {};
};

// Bound to variables, which must live as long as it does; what they hold when they are added are
// the defaults. std::optional is "auto" where it is empty.
class Schema {
 public:
  // What is added next belongs to this section.
  void section(std::string name, std::string title);

  // int, int64_t, double, bool, std::string, std::vector<double>, or an optional of the first four.
  template <class T>
  void add(std::string key, T& variable, std::string help, Limits limits = {});
  // The names stand for the enum's values 0, 1, ... Hyphens and underscores are the same.
  template <class Enum>
  void add_choice(std::string key, Enum& variable, const std::vector<std::string>& names,
                  std::string help);
  template <class Enum>
  void add_choice(std::string key, std::optional<Enum>& variable,
                  const std::vector<std::string>& names, std::string help);
  void add_choice(std::string key, std::string& variable, std::vector<std::string> names,
                  std::string help);
  void add_bytes(std::string key, int64_t& variable, std::string help);
  // Numbers in files need no quotes, and are kept in one spelling.
  void add_text_or_number(std::string key, std::string& variable, std::string help);
  // For variables of other types: `option` without name.
  void add_option(std::string key, Option option);
  // `--ALIAS` is the same flag as `--NAME`. Files have the name only.
  void alias(const std::string& name, std::string alias);
  // Where `--ELSEWHERE` is given, or with underscores, the error suggests `--NAME`.
  void suggest(const std::string& name, std::string elsewhere);

  const std::vector<Section>& sections() const { return sections_; }

  // Throws, as set_flag does, unless there is an option of this name.
  void require_known(const std::string& name) { find(name, "--"); }
  // `--NAME TEXT`. Unknown names and wrong values are a ConfigError: the nearest known name, or
  // what the value must be.
  void set_flag(const std::string& name, const std::string& text);
  // TOML, or JSON where the first character is a brace. A value that a flag has set stays. `path`
  // is for messages.
  void read_text(const std::string& text, const std::string& path);
  void read_file(const std::string& path);
  // Throws ConfigError for the first variable whose value no flag could have given it.
  void check() const;

  Origins origins() const;  // of all options
  void restore(const Origins& origins);

 private:
  Option& find(const std::string& name, const std::string& where);

  std::vector<Section> sections_;
};

// ---- how a variable becomes a value and back ----

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

inline const Value kAuto = std::string("auto");

template <class T>
OptionType type_of() {
  if constexpr (std::is_same_v<T, bool>) return OptionType::boolean;
  if constexpr (std::is_same_v<T, int> || std::is_same_v<T, int64_t>) return OptionType::integer;
  if constexpr (std::is_same_v<T, double>) return OptionType::number;
  if constexpr (std::is_same_v<T, std::string>) return OptionType::text;
  if constexpr (std::is_same_v<T, std::vector<double>>) return OptionType::numbers;
}

template <class T>
Value to_value(const T& variable) {
  if constexpr (is_optional<T>) {
    return variable ? to_value(*variable) : kAuto;
  } else if constexpr (std::is_same_v<T, int>) {
    return static_cast<int64_t>(variable);
  } else {
    return variable;
  }
}

template <class T>
void from_value(T& variable, const Value& value) {
  if constexpr (is_optional<T>) {
    if (value == kAuto) {
      variable.reset();
    } else {
      from_value(variable.emplace(), value);
    }
  } else if constexpr (std::is_same_v<T, int>) {
    variable = static_cast<int>(std::get<int64_t>(value));
  } else {
    variable = std::get<T>(value);
  }
}

// Where in `names` the value stands; the names' number where it is none of them.
size_t index_of(const std::vector<std::string>& names, const Value& value);

}  // namespace detail

template <class T>
void Schema::add(std::string key, T& variable, std::string help, Limits limits) {
  Option option;
  if constexpr (detail::is_optional<T>) {
    option.automatic = true;
    option.type = detail::type_of<typename T::value_type>();
  } else {
    option.type = detail::type_of<T>();
  }
  if constexpr (std::is_same_v<T, int>) {
    limits.min = std::max<double>(limits.min, std::numeric_limits<int>::min());
    limits.max = std::min<double>(limits.max, std::numeric_limits<int>::max());
  }
  option.help = std::move(help);
  option.limits = limits;
  option.get = [&variable] { return detail::to_value(variable); };
  option.put = [&variable](const Value& value) { detail::from_value(variable, value); };
  add_option(std::move(key), std::move(option));
}

template <class Enum>
void Schema::add_choice(std::string key, Enum& variable, const std::vector<std::string>& names,
                        std::string help) {
  Option option{.type = OptionType::choice, .help = std::move(help), .choices = names};
  option.get = [&variable, names]() -> Value { return names.at(static_cast<size_t>(variable)); };
  option.put = [&variable, names](const Value& value) {
    variable = static_cast<Enum>(detail::index_of(names, value));
  };
  add_option(std::move(key), std::move(option));
}

template <class Enum>
void Schema::add_choice(std::string key, std::optional<Enum>& variable,
                        const std::vector<std::string>& names, std::string help) {
  Option option{.type = OptionType::choice, .help = std::move(help), .choices = names};
  option.automatic = true;
  option.get = [&variable, names]() -> Value {
    return variable ? names.at(static_cast<size_t>(*variable)) : detail::kAuto;
  };
  option.put = [&variable, names](const Value& value) {
    variable.reset();
    if (value != detail::kAuto) variable = static_cast<Enum>(detail::index_of(names, value));
  };
  add_option(std::move(key), std::move(option));
}

}  // namespace lockstep::config
