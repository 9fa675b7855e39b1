// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/json_lines.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"

namespace lockstep::data {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 40;

constexpr const char* kFields = "\"text\", or \"prompt\" and \"completion\"";

std::string text_of(const io::OrderedJson& record, const char* key, const std::string& where) {
  const io::OrderedJson& value = record.at(key);
  if (!value.is_string()) {
    throw ConfigError(format("{}: \"{}\" is {}, must be a string", where, key, value.type_name()));
  }
  return value.get<std::string>();
}

}  // namespace

bool is_json_lines_file(const std::string& path) { return path.ends_with(".jsonl"); }

Record JsonLines::parse(const std::string& line, const std::string& where) {
  const io::OrderedJson json = io::parse_user_json(line, where);
  if (!json.is_object()) {
    throw ConfigError(
        format("{}: is {}, must be an object with {}", where, json.type_name(), kFields));
  }
  const bool text = json.contains("text"), prompt = json.contains("prompt");
  const bool completion = json.contains("completion");
  if (text ? prompt || completion : !prompt || !completion) {
    std::string names;
    for (const auto& [key, value] : json.items())
      names += format("{}\"{}\"", names.empty() ? "" : ", ", key);
    throw ConfigError(
        format("{}: has the fields {}, must have {}; a .jsonl file is never read as plain text",
               where, names.empty() ? "none" : names, kFields));
  }
  if (!examples_) {
    examples_ = prompt;
    first_ = where;
  }
  if (*examples_ != prompt) {
    throw ConfigError(format("{}: is {}, but {} is {}; all records must be of one kind", where,
                             prompt ? "a prompt with a completion" : "text", first_,
                             prompt ? "text" : "a prompt with a completion"));
  }
  if (text) return {.text = text_of(json, "text", where), .where = where};
  return {.text = text_of(json, "prompt", where),
          .completion = text_of(json, "completion", where),
          .where = where};
}

void JsonLines::read(const std::string& path, const std::function<void(const Record&)>& use) {
  const std::string text = read_text(path, kMostBytes);
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    use(parse(line, format("{}:{}", path, number)));
  }
}

}  // namespace lockstep::data
