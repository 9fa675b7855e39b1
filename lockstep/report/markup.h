// SPDX-License-Identifier: Apache-2.0
// Pieces of HTML. Everything that comes from a run goes through escaped(), or through
// script_json().
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::report {

// For text and for attributes in double quotes. What is no UTF-8, and control characters, become
// question marks.
std::string escaped(std::string_view text);
// JSON that may stand in a script element: nothing in it can end the element.
std::string script_json(std::string_view json);

struct Cell {
  std::string html = {};
  bool is_number = false;
};
// `caption` is for readers that cannot see the table.
std::string table(std::string_view caption, const std::vector<std::string>& head,
                  const std::vector<std::vector<Cell>>& rows);

inline Cell number_cell(std::string text) { return {std::move(text), true}; }
inline Cell text_cell(std::string_view text) { return {escaped(text), false}; }

}  // namespace lockstep::report
