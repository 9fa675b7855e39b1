// SPDX-License-Identifier: Apache-2.0
// Values of options, and their spelling in files, flags and messages.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep::config {

using Value = std::variant<bool, int64_t, double, std::string, std::vector<double>>;

// "12", "1_000"; "0.5", "1e-4" (whole numbers too). None where the text is anything else, or the
// number too large.
std::optional<int64_t> parse_integer(std::string_view text);
std::optional<double> parse_number(std::string_view text);
// "8GB", "1.5 MiB", "4096": a unit is a power of 1024, with or without the i.
std::optional<int64_t> parse_bytes(std::string_view text);
// "0.9, 0.95" or "[0.9, 0.95]"; nothing between the brackets is an empty list.
std::optional<std::vector<double>> parse_numbers(std::string_view text);

// The shortest text that is read back as the same number.
std::string number_text(double number);
// "8GB" where the largest unit that divides it leaves a whole number; else the bytes.
std::string bytes_text(int64_t bytes);
// As TOML writes it: strings in quotes, a point in every floating-point number.
std::string toml_literal(const Value& value);
// As a flag takes it: strings and lists bare.
std::string plain_text(const Value& value);

// How many characters must be changed, added or left out to make one of the other.
size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace lockstep::config
