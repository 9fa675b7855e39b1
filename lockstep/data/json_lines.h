// SPDX-License-Identifier: Apache-2.0
// Files of JSON lines: documents, or prompts with their completions. Private: not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::data {

// Whether a file holds one JSON object per line: its name ends in .jsonl.
bool is_json_lines_file(const std::string& path);

struct Record {
  std::string text = {};        // a document, or the prompt of an example
  std::string completion = {};  // of an example
  std::string where = {};       // "tune.jsonl:17"
};

// Reads files whose records are all of one kind.
class JsonLines {
 public:
  // Calls `use` with every record of the file, in order; blank lines are skipped. ConfigError with
  // file, line and reason where a record has neither `text` nor both `prompt` and `completion`, or
  // is of another kind than the first record of the first file.
  void read(const std::string& path, const std::function<void(const Record&)>& use);

  // The records are prompts with completions. False before the first record.
  bool has_examples() const { return examples_.value_or(false); }

 private:
  Record parse(const std::string& line, const std::string& where);

  std::optional<bool> examples_;
  std::string first_;  // where the first record is
};

}  // namespace lockstep::data
