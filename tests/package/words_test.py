#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds words and sentences that readers stumble over: words.py FOLDER.

In pages (*.md): phrases that have a better term, and sentences of more than 35 words. In sources: the phrases, in comments
and in string literals. Code blocks, tables' code and links' targets are left out. Exits with 1 if there is a finding.
"""
import pathlib
import re
import sys

# Each has a term of the field that says more: concurrently with, again, the rank or caller by its name, resume or continue,
# in flight, offloaded, initial values.
PHRASES = [r"beside", r"anew", r"whoever", r"somebody", r"nobody", r"go(?:es|ing)? on", r"under way", r"puts? aside",
           r"first values", r"lets it"]
PHRASE = re.compile(r"\b(?:" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
LONGEST = 35


def page_text(text):
    """(line number, text) of the prose of a page: paragraphs, list items and cells of tables."""
    pieces, current, start, fenced = [], [], 0, False

    def flush():
        if current:
            pieces.append((start, " ".join(current)))
            current.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            flush()
            fenced = not fenced
        elif fenced or line.startswith("    ") and not current:
            continue
        elif not line.strip() or line.startswith("<"):
            flush()
        elif line.lstrip().startswith("|"):
            flush()
            pieces += [(number, cell.strip()) for cell in line.strip().strip("|").split("|")]
        else:
            if re.match(r"\s*([-*]|\d+\.|#+)\s", line):
                flush()
                line = re.sub(r"^\s*([-*]|\d+\.|#+)\s+", "", line)
            if not current:
                start = number
            current.append(line.strip())
    flush()
    for number, piece in pieces:
        piece = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", piece)
        yield number, re.sub(r"`[^`]*`", "X", piece)


def source_text(text):
    """(line number, text) of comments and string literals."""
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.search(r"(?<!:)//(.*)", line)
        if comment and line[: comment.start()].count('"') % 2 == 0:
            yield number, comment.group(1)
        for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', line if not comment else line[: comment.start()]):
            if " " in literal and not line.lstrip().startswith("#include"):
                yield number, literal


def findings(folder):
    root = pathlib.Path(folder)
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]
    for path in sorted(pages):
        for number, piece in page_text(path.read_text()):
            for phrase in PHRASE.findall(piece):
                yield path, number, f"'{phrase}'"
            for sentence in re.split(r"(?<=[.!?:;])\s+", piece):
                words = len(re.findall(r"[\w'-]+", sentence))
                if words > LONGEST:
                    yield path, number, f"a sentence of {words} words: {sentence[:60]}..."
    for layer in ("lockstep", "examples", "bench"):
        for path in sorted(root.glob(f"{layer}/**/*")):
            if path.suffix not in (".h", ".cpp", ".cu"):
                continue
            for number, piece in source_text(path.read_text()):
                for phrase in PHRASE.findall(piece):
                    yield path, number, f"'{phrase}'"


def main():
    found = list(findings(sys.argv[1]))
    for path, number, what in found:
        print(f"{path}:{number}: {what}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
