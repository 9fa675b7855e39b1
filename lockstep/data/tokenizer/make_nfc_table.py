#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes nfc_table.cpp: what Unicode's canonical composition (NFC) needs to know.

usage: make_nfc_table.py DerivedAge.txt > nfc_table.cpp

DerivedAge.txt is a file of the Unicode Character Database, https://www.unicode.org/Public/UCD/latest/ucd/DerivedAge.txt.
Decompositions and combining classes come from Python's unicodedata. They never change once a character exists, so any
version from 9.0 on gives the table of 9.0: that of the Hugging Face tokenizers library (unicode-normalization-alignments
0.1.12), which leaves characters of later versions as they are.
"""
import re
import sys
import unicodedata

VERSION = (9, 0)
HANGUL = range(0xac00, 0xd7a4)  # by rule
LINE = 100

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Written by make_nfc_table.py; edit that. Unicode {version}.
#include "lockstep/data/tokenizer/nfc_table.h"

namespace lockstep::data {{
namespace {{

// clang-format off
constexpr uint64_t kSingles[] = {{
{singles}
}};
constexpr uint64_t kPairs[] = {{
{pairs}
}};
constexpr uint32_t kClasses[] = {{
{classes}
}};
// clang-format on

}}  // namespace

const NfcTable& nfc_table() {{
  static constexpr NfcTable kTable{{kSingles, kPairs, kClasses}};
  return kTable;
}}

}}  // namespace lockstep::data
"""


def characters(path):
    for line in open(path, encoding="utf-8"):
        match = re.match(r"([0-9A-F]+)(?:\.\.([0-9A-F]+))?\s*;\s*(\d+)\.(\d+)", line)
        if match and (int(match[3]), int(match[4])) <= VERSION:
            yield from range(int(match[1], 16), int(match[2] or match[1], 16) + 1)


def rows(values):
    lines, line = [], " "
    for value in values:
        if len(line) + len(value) + 1 > LINE:
            lines.append(line)
            line = " "
        line += " " + value
    return "\n".join([*lines, line])


def main():
    assert tuple(map(int, unicodedata.unidata_version.split(".")[:2])) >= VERSION, unicodedata.unidata_version
    known = [code for code in sorted(characters(sys.argv[1])) if not 0xd800 <= code < 0xe000]
    singles, pairs, classes = [], [], []
    last = 0
    by_code = {code: unicodedata.combining(chr(code)) for code in known}
    for code in range(0x110000):
        value = by_code.get(code, 0)
        if value != last:
            classes.append(f"0x{code << 8 | value:x},")
            last = value
    for code in known:
        parts = unicodedata.decomposition(chr(code)).split()
        if not parts or parts[0].startswith("<") or code in HANGUL:
            continue
        first, *rest = [int(part, 16) for part in parts]
        if not rest:
            singles.append(f"0x{code << 21 | first:x},")
            continue
        (second,) = rest
        composes = unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(code)
        pairs.append(f"0x{composes << 63 | code << 42 | first << 21 | second:x},")
    sys.stdout.write(HEAD.format(version=".".join(map(str, VERSION)), singles=rows(singles), pairs=rows(pairs), classes=rows(classes)))


main()
