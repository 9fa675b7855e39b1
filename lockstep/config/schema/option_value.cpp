// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/schema/option_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

constexpr std::string_view kUnits = "KMGTP";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Without the underscores that stand between digits; none where one stands elsewhere.
std::optional<std::string> without_underscores(std::string_view text) {
  std::string bare;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      bare += text[i];
    } else if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
      return std::nullopt;
    }
  }
  return bare;
}

template <class T>
std::optional<T> parse_all(std::string_view text) {
  const auto bare = without_underscores(text);
  if (!bare) return std::nullopt;
  std::string_view digits = *bare;
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.remove_prefix(1);
  T number{};
  const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (failure != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (code < 0x20 || code == 0x7f) {
      out += format("\\u{:04x}", code);
    } else {
      out += c;
    }
  }
  out += '"';
  return out;
}

std::string list_text(const std::vector<double>& numbers, const char* separator) {
  std::vector<std::string> texts;
  for (const double number : numbers) texts.push_back(number_text(number));
  return join(texts, separator);
}

}  // namespace

std::optional<int64_t> parse_integer(std::string_view text) { return parse_all<int64_t>(text); }

std::optional<double> parse_number(std::string_view text) {
  const auto number = parse_all<double>(text);
  return number && std::isfinite(*number) ? number : std::nullopt;
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  if (text.ends_with('B')) text.remove_suffix(1);
  if (text.ends_with('i')) text.remove_suffix(1);
  double scale = 1;
  if (!text.empty()) {
    // As sizes are written in messages.
    const char prefix = text.back() == 'k' ? 'K' : text.back();
    if (const size_t unit = kUnits.find(prefix); unit != std::string_view::npos) {
      scale = std::ldexp(1.0, static_cast<int>(10 * (unit + 1)));
      text.remove_suffix(1);
    }
  }
  while (text.ends_with(' ')) text.remove_suffix(1);
  if (scale == 1) return parse_integer(text);
  const auto count = parse_number(text);
  if (!count || std::abs(*count * scale) >= 0x1p63) return std::nullopt;
  return static_cast<int64_t>(*count * scale);
}

std::optional<std::vector<double>> parse_numbers(std::string_view text) {
  const auto trim = [](std::string_view part) {
    const size_t first = part.find_first_not_of(" \t");
    if (first == std::string_view::npos) return std::string_view();
    return part.substr(first, part.find_last_not_of(" \t") - first + 1);
  };
  text = trim(text);
  if (text.starts_with('[') != text.ends_with(']')) return std::nullopt;
  if (text.starts_with('[')) text = trim(text.substr(1, text.size() - 2));
  std::vector<double> numbers;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const auto number = parse_number(trim(text.substr(0, comma)));
    if (!number) return std::nullopt;
    numbers.push_back(*number);
    // A comma after the last number is allowed.
    text = comma == std::string_view::npos ? std::string_view() : trim(text.substr(comma + 1));
  }
  return numbers;
}

std::string number_text(double number) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), number).ptr;
  return {buffer, end};
}

std::string bytes_text(int64_t bytes) {
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? std::to_string(bytes) : format("{}{}B", bytes, kUnits[unit - 1]);
}

std::string toml_literal(const Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return quoted(*text);
  if (const auto* number = std::get_if<double>(&value)) {
    std::string text = number_text(*number);
    if (text.find_first_not_of("-0123456789") == std::string::npos) text += ".0";
    return text;
  }
  if (const auto* numbers = std::get_if<std::vector<double>>(&value))
    return format("[{}]", list_text(*numbers, ", "));
  return plain_text(value);
}

std::string plain_text(const Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* integer = std::get_if<int64_t>(&value)) return std::to_string(*integer);
  if (const auto* number = std::get_if<double>(&value)) return number_text(*number);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  return list_text(std::get<std::vector<double>>(value), ",");
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances from the part of a so far to each part of b
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

}  // namespace lockstep::config
