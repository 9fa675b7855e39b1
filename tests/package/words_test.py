#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds words and sentences that readers stumble over: words.py FOLDER.

In pages (*.md): phrases that have a better term, and sentences of more than 35 words. In sources: the phrases, in comments
and in string literals. Code blocks, tables' code and links' targets are left out. In tests: string literals that quote a
message of lockstep/, so that it could not be reworded. Exits with 1 if there is a finding.
"""
import ast
import pathlib
import re
import sys
import tempfile

# Each has a term of the field that says more: concurrently with, again, the rank or caller by its name, resume or continue,
# in flight, offloaded, initial values.
PHRASES = [r"beside", r"anew", r"whoever", r"somebody", r"nobody", r"go(?:es|ing)? on", r"under way", r"puts? aside",
           r"first values", r"lets it"]
PHRASE = re.compile(r"\b(?:" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
LONGEST = 35

# More ordinary words in a row than this, as a string literal of lockstep/ has them, are a quotation. A test compares facts:
# values, names, quoted input, the term that tells one error from another (tests/support/says.h).
QUOTED = 3
ORDINARY = re.compile(r"a|[a-z]+(?:['-]?[a-z])+")
LITERAL = re.compile(r"""//[^\n]*|R"\((.*?)\)"|"((?:[^"\\\n]|\\.)*)"|'(?:\\[^']+|[^'\\])'""", re.DOTALL)
# Not about messages: what a failed test prints, what a test throws itself, and names of events in a trace.
OWN_TEXT = re.compile(r"<<\s*$|\b(?:throw|return)\s(?:[^;{}]*\?)?[^;{}?]*$")
OWN_CALLS = re.compile(r"check|fail|require|require_same|spans|runtime_error|puts|printf")
OWN_MESSAGES = ("api_reference.py", "layers_test.py", "words_test.py")


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


def literals(code):
    """(place, text) of string literals in C++, neighbours as one; and the code with spaces for them and for comments."""
    found, bare = [], list(code)
    for match in LITERAL.finditer(code):
        bare[match.start() : match.end()] = re.sub(r"[^\n]", " ", match.group())
        text = match.group(1) if match.group(1) is not None else match.group(2)
        if text is None:
            continue
        if found and not "".join(bare[found[-1][1] : match.start()]).strip():
            found[-1][1:] = match.end(), found[-1][2] + text
        else:
            found.append([match.start(), match.end(), text])
    return [(start, text) for start, _, text in found], "".join(bare)


def runs(text):
    """Ordinary words that follow each other in a literal; `*` is a value that is put in. Columns of a table are no sentence."""
    run = []
    for token in re.sub(r"\{[^{}]*\}", " * ", re.sub(r"\\[nt]|\n| {2,}", " | ", text)).split():
        opening, word, end = re.fullmatch(r"(\(?)(.*?)([,;:.!?)]*)", token).groups()
        if opening:
            yield run
            run = []
        ordinary = word == "*" or ORDINARY.fullmatch(word)
        if ordinary:
            run.append(word)
        if end or not ordinary:
            yield run
            run = []
    yield run


def quotations(text):
    return {tuple(run[i : i + QUOTED + 1]) for run in runs(text) for i in range(len(run) - QUOTED)}


def call_around(bare, place):
    """The name of the call whose argument is at this place, or nothing."""
    depth = 0
    for i in range(place - 1, -1, -1):
        if bare[i] in ")]}":
            depth += 1
        elif bare[i] in "([{":
            depth -= 1
            if depth < 0:
                name = re.search(r"(\w+)(?:<[^<>;]*>)?\s*$", bare[max(0, i - 99) : i]) if bare[i] == "(" else None
                return name.group(1) if name else ""
    return ""


def is_a_message(bare, place, text):
    """Whether a literal at this place of a test is compared with a message."""
    statement = bare[bare.rfind(";", 0, place) + 1 : place]
    # What a command prints to stdout, and what has several lines, is a format: tables, pages, rendered schedules.
    formatted = re.search(r"(?:\\n|\n).", text) or re.search(r"\.out\b", statement)
    return not (formatted or OWN_TEXT.search(statement) or OWN_CALLS.fullmatch(call_around(bare, place)))


def quoting_tests(root):
    """Literals of tests with more than QUOTED words in a row of a message."""
    said = set()
    for path in root.glob("lockstep/**/*"):
        if path.suffix in (".h", ".cpp", ".cu"):
            for _, text in literals(path.read_text())[0]:
                said |= {words for words in quotations(text) if words.count("*") < 2}

    def quoted(text):
        for words in quotations(text):
            if words in said or any(words[:i] + ("*",) + words[i + 1 :] in said for i in range(len(words))):
                return " ".join(words)

    for path in sorted(root.glob("tests/**/*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            code = path.read_text()
            found, bare = literals(code)
            quotes = [(code.count("\n", 0, place) + 1, quoted(text)) for place, text in found
                      if quoted(text) and is_a_message(bare, place, text)]
        elif path.suffix == ".py" and path.name not in OWN_MESSAGES:
            nodes = list(ast.walk(ast.parse(path.read_text())))
            comments = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            quotes = [(node.lineno, quoted(node.value)) for node in nodes if isinstance(node, ast.Constant)
                      and isinstance(node.value, str) and id(node) not in comments and quoted(node.value)]
        else:
            continue
        for number, words in quotes:
            yield path, number, f"quotes a message, '{words}'; compare its facts"


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
    yield from quoting_tests(root)


def self_test():
    """Quotations in a small tree: those on lines with `quotes` are noticed, no others."""
    source = 'throw Error(format("[mesh] axis {} is named twice; "\n  "every rank must give {} names", a, b));\n'
    test = r'''EXPECT_THAT(error.what(), HasSubstr("axis dp is named twice"));  // quotes
refused(mesh, "every rank must "  // quotes
        "give 3 names");
constexpr Case cases[] = {{"dp", "[mesh] every rank must give"}};  // quotes
EXPECT_THAT(error.what(), says("axis dp ... twice ... every rank ... 3 names"));
EXPECT_EQ(names, 3) << "every rank must give three";
EXPECT_THAT(run().out, HasSubstr("every rank must give 3"));
EXPECT_EQ(page, "# Names\n\nevery rank must give 3 names\n");
throw Error("every rank must give up");
check(done, "every rank must give three");
write_file(path, "some other text of a test");
'''
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in {"lockstep/a.cpp": source, "tests/a_test.cpp": test,
                           "tests/a_test.py": '"""every rank must give"""\nassert "every rank must give 3" in error  # quotes\n'}.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        found = [(path.name, number) for path, number, _ in quoting_tests(root)]
        expected = [(path.name, number) for path in sorted(root.glob("tests/*"))
                    for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(" quotes")]
        if found != expected:
            sys.exit(f"words_test: self-test: expected {expected}, found {found}")


def main():
    self_test()
    found = list(findings(sys.argv[1]))
    for path, number, what in found:
        print(f"{path}:{number}: {what}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
