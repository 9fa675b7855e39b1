// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/markup.h"

#include "lockstep/core/format.h"

namespace lockstep::report {
namespace {

// How many bytes the character at the front has; 0 where it is no UTF-8.
size_t utf8_size(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t size = byte(0) < 0x80   ? 1
                      : byte(0) < 0xc2 ? 0
                      : byte(0) < 0xe0 ? 2
                      : byte(0) < 0xf0 ? 3
                      : byte(0) < 0xf5 ? 4
                                       : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Too long a form, a surrogate, or beyond the last character.
  if ((byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) > 0x9f) ||
      (byte(0) == 0xf0 && byte(1) < 0x90) || (byte(0) == 0xf4 && byte(1) > 0x8f))
    return 0;
  return size;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t size = utf8_size(text);
    const char c = text[0];
    if (size == 0 || (size == 1 && (c == 127 || (c >= 0 && c < 32 && c != '\n' && c != '\t')))) {
      result += '?';
    } else if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else if (c == '\'') {
      result += "&#39;";
    } else {
      result += text.substr(0, size);
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return result;
}

// Outside of strings JSON has none of these characters.
std::string script_json(std::string_view json) {
  std::string result;
  for (const char c : json) {
    if (c == '<' || c == '>' || c == '&') {
      result += format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::string table(std::string_view caption, const std::vector<std::string>& head,
                  const std::vector<std::vector<Cell>>& rows) {
  std::string html =
      format("<div class=\"scroll\"><table><caption>{}</caption><thead><tr>", escaped(caption));
  for (size_t i = 0; i < head.size(); ++i) {
    const bool is_number = !rows.empty() && i < rows[0].size() && rows[0][i].is_number;
    html +=
        format("<th scope=\"col\"{}>{}</th>", is_number ? " class=\"n\"" : "", escaped(head[i]));
  }
  html += "</tr></thead><tbody>";
  for (const auto& row : rows) {
    html += "<tr>";
    for (const Cell& cell : row)
      html += format("<td{}>{}</td>", cell.is_number ? " class=\"n\"" : "", cell.html);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

}  // namespace lockstep::report
