// SPDX-License-Identifier: Apache-2.0
// Compares the facts in a message (values, names, the term that tells one error from another), not
// its sentences: "heads is 4 ... divisible ... tp 3" asks for three facts, in any order. `heads is
// 4` and `heads = 4` are the same fact.
#pragma once

#include <gmock/gmock.h>

#include <cctype>
#include <string>
#include <string_view>

namespace lockstep::test {

// Whether a cut before `at` divides a word or a number: 3 is not in 13, -3, 3.5 or w3, and step 1
// is not in step 10.
inline bool divides(std::string_view text, size_t at) {
  const auto is_digit = [&](size_t i) {
    return i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]));
  };
  const auto is_word = [&](size_t i) {
    return i < text.size() && (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_');
  };
  if (at == 0 || at >= text.size()) return false;
  const char before = text[at - 1];
  return (is_word(at - 1) && is_word(at)) || (before == '-' && is_digit(at) && !is_word(at - 2)) ||
         (before == '.' && is_digit(at) && is_digit(at - 2)) ||
         (text[at] == '.' && is_digit(at - 1) && is_digit(at + 1));
}

inline bool has_fact(std::string_view text, std::string_view fact) {
  for (size_t at = text.find(fact); at != std::string_view::npos; at = text.find(fact, at + 1)) {
    if (!divides(text, at) && !divides(text, at + fact.size())) return true;
  }
  return false;
}

inline std::string without_equals_signs(std::string text) {
  for (size_t at = 0; (at = text.find(" = ", at)) != std::string::npos;)
    text.replace(at, 3, " is ");
  return text;
}

// The first of the facts that the text does not have; empty if it has all.
inline std::string missing_fact(const std::string& message, const std::string& asked) {
  constexpr std::string_view kBetween = "...";
  const std::string text = without_equals_signs(message), all = without_equals_signs(asked);
  std::string_view facts = all;
  while (!facts.empty()) {
    const size_t end = facts.find(kBetween);
    std::string_view fact = facts.substr(0, end);
    facts = end == std::string_view::npos ? "" : facts.substr(end + kBetween.size());
    while (fact.starts_with(' ')) fact.remove_prefix(1);
    while (fact.ends_with(' ')) fact.remove_suffix(1);
    if (!has_fact(text, fact)) return std::string(fact);
  }
  return {};
}

MATCHER_P(HasFacts, facts, "says " + testing::PrintToString(facts)) {
  const std::string text(arg), missing = missing_fact(text, facts);
  if (!missing.empty()) *result_listener << "which does not say '" << missing << "'";
  return missing.empty();
}

inline auto says(const std::string& facts) { return HasFacts(facts); }

}  // namespace lockstep::test
