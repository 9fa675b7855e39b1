#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes unicode_table.cpp from two files of the Unicode Character Database.

usage: make_unicode_table.py DerivedGeneralCategory.txt PropList.txt > unicode_table.cpp

The files are https://www.unicode.org/Public/16.0.0/ucd/extracted/DerivedGeneralCategory.txt and
https://www.unicode.org/Public/16.0.0/ucd/PropList.txt. Take the version that the Hugging Face
tokenizers library has: its regular expressions are those of Oniguruma 6.9.10, Unicode 16.0.
"""
import re
import sys

CLASSES = {"other": 0, "letter": 1, "number": 2, "space": 3}
PER_LINE = 12

HEAD = """// Written by make_unicode_table.py; edit that. Unicode {version}.
#include "lockstep/data/tokenizer/unicode_table.h"

#include <algorithm>
#include <iterator>

namespace lockstep::formats {{
namespace {{

// Where the class changes, in increasing order: the first character, times 4, plus its class.
// clang-format off
constexpr uint32_t kChanges[] = {{
{rows}
}};
// clang-format on

}}  // namespace

CharClass char_class(uint32_t code_point) {{
  const auto after = std::upper_bound(std::begin(kChanges), std::end(kChanges), code_point * 4 + 3);
  return static_cast<CharClass>(*std::prev(after) % 4);
}}

}}  // namespace lockstep::formats
"""


def ranges(path, wanted):
    for line in open(path, encoding="utf-8"):
        match = re.match(r"([0-9A-F]+)(?:\.\.([0-9A-F]+))?\s*;\s*(\w+)", line)
        if match and wanted(match[3]):
            yield int(match[1], 16), int(match[2] or match[1], 16)


def main():
    categories, properties = sys.argv[1:]
    version = re.search(r"-(\d+\.\d+)", open(categories, encoding="utf-8").readline())[1]
    of_character = [CLASSES["other"]] * 0x110000
    for name, path, wanted in (
        ("letter", categories, lambda value: value.startswith("L")),
        ("number", categories, lambda value: value.startswith("N")),
        ("space", properties, lambda value: value == "White_Space"),
    ):
        for first, last in ranges(path, wanted):
            for code in range(first, last + 1):
                of_character[code] = CLASSES[name]
    changes = [f"0x{code * 4 + kind:x}," for code, kind in enumerate(of_character)
               if code == 0 or kind != of_character[code - 1]]
    rows = ["    " + " ".join(changes[i:i + PER_LINE]) for i in range(0, len(changes), PER_LINE)]
    sys.stdout.write(HEAD.format(version=version, rows="\n".join(rows)))


main()
