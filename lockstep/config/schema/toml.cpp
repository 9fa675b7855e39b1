// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <optional>
#include <set>
#include <string_view>

#include "lockstep/config/schema/settings.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::config {
namespace {

bool is_bare(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-';
}

void append_utf8(std::string& text, uint32_t code) {
  const auto add = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xc0 | code >> 6);
    add(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    add(0xe0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3f));
    add(0x80 | (code & 0x3f));
  } else {
    add(0xf0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3f));
    add(0x80 | (code >> 6 & 0x3f));
    add(0x80 | (code & 0x3f));
  }
}

// One line, read from left to right.
class Line {
 public:
  Line(std::string_view text, const std::string& path, int number)
      : rest_(text), path_(path), number_(number) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(format("{}:{}: {}", path_, number_, what));
  }

  // Skips spaces. At the end, and at a comment, '\0'.
  char next() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\t')) rest_.remove_prefix(1);
    return rest_.empty() || rest_[0] == '#' ? '\0' : rest_[0];
  }
  bool take(std::string_view text) {
    next();
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  void expect_end() {
    if (next() != '\0') fail(format("unexpected '{}' after the value", rest_));
  }

  // a.b."c": joined with dots.
  std::string key() {
    std::string name = key_part();
    while (take(".")) name += format(".{}", key_part());
    return name;
  }

  Value value() {
    switch (next()) {
      case '\0':
        fail("a value must follow the =");
      case '"':
      case '\'':
        return string();
      case '[':
        return list();
      case '{':
        fail("inline tables are not supported; use a [section] or dotted keys");
      default:
        return word(rest_.substr(0, rest_.find_first_of(" \t#")));
    }
  }

 private:
  std::string key_part() {
    const char first = next();
    if (first == '"' || first == '\'') return string();
    size_t length = 0;
    while (length < rest_.size() && is_bare(rest_[length])) ++length;
    if (length == 0) fail(format("a key must stand before '{}'", rest_));
    return cut(length);
  }

  std::string cut(size_t length) {
    std::string text(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return text;
  }

  std::string string() {
    const char quote = rest_[0];
    if (rest_.starts_with(R"(""")") || rest_.starts_with("'''"))
      fail("strings of several lines are not supported");
    rest_.remove_prefix(1);
    std::string text;
    while (true) {
      if (rest_.empty()) fail("a string must end on the line where it begins");
      const char c = rest_[0];
      rest_.remove_prefix(1);
      if (c == quote) return text;
      if (c == '\\' && quote == '"') {
        escape(text);
      } else {
        text += c;
      }
    }
  }

  // What follows a backslash.
  void escape(std::string& text) {
    constexpr std::string_view kLetters = "btnfr\"\\", kMeanings = "\b\t\n\f\r\"\\";
    const char letter = rest_.empty() ? '\0' : rest_[0];
    if (const size_t found = kLetters.find(letter); found != std::string_view::npos) {
      rest_.remove_prefix(1);
      text += kMeanings[found];
      return;
    }
    if (letter != 'u' && letter != 'U')
      fail(format("\\{} is not an escape of TOML; a backslash is written \\\\", letter));
    const size_t digits = letter == 'u' ? 4 : 8;
    uint32_t code = 0;
    for (const char c : rest_.substr(1, digits)) {
      const size_t digit = std::string_view("0123456789abcdef").find(c | 0x20);
      if (digit == std::string_view::npos) code = UINT32_MAX;
      if (code != UINT32_MAX) code = code << 4 | static_cast<uint32_t>(digit);
    }
    if (rest_.size() <= digits || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      fail(format("\\{} must be followed by {} hexadecimal digits of a character", letter, digits));
    rest_.remove_prefix(1 + digits);
    append_utf8(text, code);
  }

  Value list() {
    const size_t end = rest_.find(']');
    if (end == std::string_view::npos) fail("a list must end on the line where it begins");
    const auto numbers = parse_numbers(rest_.substr(0, end + 1));
    if (!numbers) fail(format("{} must be a list of numbers", rest_.substr(0, end + 1)));
    rest_.remove_prefix(end + 1);
    return *numbers;
  }

  Value word(std::string_view text) {
    rest_.remove_prefix(text.size());
    if (text == "true" || text == "false") return text == "true";
    if (const auto integer = parse_integer(text)) return *integer;
    if (const auto number = parse_number(text)) return *number;
    fail(format("{} is not a number, true or false; a string needs quotes", text));
  }

  std::string_view rest_;
  const std::string& path_;
  int number_;
};

}  // namespace

std::vector<Setting> read_toml(const std::string& text, const std::string& path) {
  std::vector<Setting> settings;
  std::set<std::string> sections;
  std::string section;
  std::string_view rest = text;
  if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);  // some editors' mark of UTF-8
  for (int number = 1; !rest.empty(); ++number) {
    const size_t end = rest.find('\n');
    std::string_view content = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (content.ends_with('\r')) content.remove_suffix(1);

    Line line(content, path, number);
    if (line.next() == '\0') continue;
    if (line.take("[")) {
      if (line.take("[")) line.fail("lists of tables are not supported");
      section = line.key();
      if (!line.take("]")) line.fail(format("] must follow [{}", section));
      if (!sections.insert(section).second)
        line.fail(format("section [{}] is defined a second time", section));
    } else {
      const std::string key = line.key();
      if (!line.take("=")) line.fail(format("= must follow {}", key));
      const Value value = line.value();
      settings.push_back({section.empty() ? key : format("{}.{}", section, key), value, number});
    }
    line.expect_end();
  }
  return settings;
}

}  // namespace lockstep::config
