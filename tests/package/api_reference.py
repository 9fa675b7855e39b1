#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The API reference: the opening comments and public declarations of the installed headers, layer by layer.

usage: api_reference.py SOURCE_DIR [--output FILE]

With --output it writes the page (`make api`). Without, it checks that the page is complete: every installed header has an opening
comment, every name that a header declares is on the page, and declarations have comments.
"""
import argparse
import difflib
import pathlib
import re
import sys

# Types and functions that have no comment today. Lower it when headers gain comments; a new declaration needs one.
MAY_LACK_COMMENTS = 28
# Comments, texts and characters: what is in them is no code.
OPAQUE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'', re.DOTALL)
TYPE = re.compile(r"\s*(?:template\s*<.*?>\s*)*(?:requires[^;{]*?\s)?(enum|class|struct|union)\b")
LABEL = re.compile(r"(public|private|protected)\s*:(?!:)")


def layers(cmake):
    """(layer, headers) in the order of the file."""
    for text in re.findall(r"lockstep_layer\(([^)]*)\)", re.sub(r"#.*", "", cmake)):
        listed = re.search(r"\bHEADERS\s+(.*?)(?:\b[A-Z]{5,}\b|$)", text, re.DOTALL)
        if listed:
            yield text.split()[0], ["lockstep/" + name for name in listed.group(1).split()]


def blanked(text):
    """The same length, with spaces for all that is no code."""
    return OPAQUE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def closing(code, opening):
    """Where the bracket at `opening` is closed."""
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] in "({[") - (code[i] in ")}]")
        if depth == 0:
            return i
    raise ValueError("a bracket is not closed")


def without_templates(head):
    """`std::function<void()> f` -> `std::function f`"""
    head = re.sub(r"operator\s*[^\w\s(]+", "operator", head)
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:
        head = shorter
    return head


def is_function(head):
    head = without_templates(head)
    return "(" in head and not TYPE.match(head) and not re.search(r"=\s*$", head)


def without_initializers(head, code):
    """A constructor's head without `: a_(a), b_(b)`."""
    depth = 0
    for i, c in enumerate(code):
        depth += (c in "([{") - (c in ")]}")
        if c == ":" and depth == 0 and ")" in code[:i] and "::" not in (code[i - 1:i + 1], code[i:i + 2]):
            return head[:i]
    return head


def is_hidden(head):
    """Forward declarations, friends, and definitions of what a class has declared."""
    plain = without_templates(head).strip()
    if plain.startswith("friend "):
        return True
    if head.endswith(";"):
        return bool(re.fullmatch(r"(?:template\s*)?(?:class|struct|union)\s+[\w:]+\s*;", plain))
    name = re.search(r"(operator\b.*|[\w:~]+)\s*\(", plain)
    return bool(name and re.match(r"\w+::", name.group(1)))


class Reader:
    """The declarations of one scope, as lines."""

    def __init__(self, text, visible=True):
        self.text, self.code = text, blanked(text)
        self.visible = visible
        self.lines, self.pending = [], []
        self.kept = False  # whether a declaration came out
        self.at = 0

    def read(self):
        while self.at < len(self.text):
            self.item()
        while self.lines and (not self.lines[-1] or LABEL.match(self.lines[-1].strip())):
            self.lines.pop()
        return self.lines if self.kept else []

    def item(self):
        space = re.compile(r"\s*").match(self.text, self.at).group()
        if space.count("\n") > 1:
            self.pending.append("")
        begin = self.at + space.rfind("\n") + 1 if "\n" in space else self.at
        self.at += len(space)
        rest = self.text[self.at:]
        if not rest:
            return
        if rest.startswith("//"):
            self.pending.append(self.up_to_line_end(begin))
        elif rest.startswith("#"):
            self.at += re.compile(r"(?:[^\n\\]|\\\n|\\.)*").match(rest).end()
        elif label := LABEL.match(rest):
            self.visible = label.group(1) == "public"
            self.at += label.end()
            self.pending = []
            if self.visible:
                self.lines.append(self.text[begin:self.at])
        else:
            self.declaration(begin)

    def up_to_line_end(self, begin):
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end
        return self.text[begin:self.at].rstrip()

    def emit(self, text):
        comment = re.compile(r"[ \t]*//[^\n]*").match(self.text, self.at)
        if comment:
            self.at = comment.end()
            text += "" if "NOLINT" in comment.group() else comment.group()
        if self.visible:
            for line in self.pending:
                begins = not self.lines or not self.lines[-1] or LABEL.match(self.lines[-1].strip())
                if line or not begins:  # one blank line, and not the first
                    self.lines.append(line)
            self.lines += text.rstrip().split("\n")
            self.kept = True
        self.pending = []

    def drop(self):
        """Comments directly above go too; those with a blank line below are about more."""
        while self.pending and self.pending[-1]:
            self.pending.pop()
        self.at = re.compile(r"[ \t]*(?://[^\n]*)?").match(self.text, self.at).end()

    def declaration(self, begin):
        i = self.at
        while self.code[i] not in ";{":
            i = closing(self.code, i) + 1 if self.code[i] in "([" else i + 1
        head = self.code[self.at:i]
        if self.code[i] == "{" and (namespace := re.fullmatch(r"(?:inline\s+)?namespace\b\s*([\w:]*)\s*", head)):
            return self.namespace(begin, i, namespace.group(1))
        if self.code[i] == "{" and TYPE.match(head) and "(" not in without_templates(head):
            return self.type(begin, i, TYPE.match(head).group(1))
        if self.code[i] == "{" and is_function(head):
            return self.function(begin, i)
        while self.code[i] != ";":  # an initializer
            i = closing(self.code, i) + 1 if self.code[i] in "({[" else i + 1
        hidden = is_hidden(self.code[self.at:i + 1])
        self.at = i + 1
        if hidden:
            return self.drop()
        return self.emit(self.text[begin:self.at])

    def function(self, begin, brace):
        head = self.text[begin:brace]
        code = self.code[begin:brace]
        self.at = closing(self.code, brace) + 1
        while more := re.compile(r"\s*(?:,[^{;]*)?\{").match(self.code, self.at):  # the brace was an initializer's
            self.at = closing(self.code, more.end() - 1) + 1
        if is_hidden(code):
            return self.drop()
        return self.emit(without_initializers(head, code).rstrip() + ";")

    def type(self, begin, brace, keyword):
        end = closing(self.code, brace)
        tail = self.code.index(";", end)
        self.at = tail + 1
        if keyword == "enum":
            return self.emit(self.text[begin:self.at])
        body = Reader(self.text[brace + 1:end], visible=keyword != "class").read()
        last = self.text[end:self.at]
        return self.emit("\n".join([self.text[begin:brace + 1], *body, self.indent(begin) + last]) if body
                         else self.text[begin:brace + 1] + last)

    def namespace(self, begin, brace, name):
        end = closing(self.code, brace)
        body = [] if "detail" in name.split("::") or not name else Reader(self.text[brace + 1:end]).read()
        self.at = end + 1
        if body:
            return self.emit("\n".join([self.text[begin:brace + 1], "", *body, "", "}"]))
        return self.drop()

    def indent(self, begin):
        return re.compile(r"[ \t]*").match(self.text, begin).group()


def prose(comment):
    """The opening comment; what is indented in it is code."""
    lines = []
    for line in comment:
        line = re.sub(r"^// ?", "", line)
        if line.startswith(" "):
            if lines and lines[-1] and not lines[-1].startswith("    "):
                lines.append("")
            lines.append("  " + line.rstrip())
        else:
            if line and lines and lines[-1].startswith("    "):
                lines.append("")
            lines.append(re.sub(r"([<*])", r"\\\1", line))
    return lines


class Header:
    """One installed header: its opening comment and its public declarations, as lines."""

    def __init__(self, name, text):
        self.name = name
        self.text = re.sub(r"^// SPDX-[^\n]*\n", "", text, flags=re.MULTILINE).lstrip("\n")
        comment = re.match(r"(?://[^\n]*\n)*", self.text).group()
        self.comment = comment.splitlines()
        self.declarations = Reader(self.text[len(comment):]).read()


def page_of(found):
    """The page, from pairs of a layer and its headers."""
    page = ["# API reference", "", "<!-- Made from the installed headers by `make api`. -->", ""]
    for layer, headers in found:
        page.append(f"- [{layer}](#{layer}): " + " ".join(header.name.split("/", 2)[2].removesuffix(".h") for header in headers))
    for layer, headers in found:
        page += ["", f"## {layer}"]
        for header in headers:
            page += ["", f"### {header.name}", "", *prose(header.comment)]
            if header.declarations:
                page += ["", "```cpp", *header.declarations, "```"]
    return "\n".join(page) + "\n"


def declared_names(text):
    """Names that a header declares in a namespace, found without Reader: clang-format begins only such declarations in the first column."""
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", "", blanked(text), flags=re.MULTILINE)
    while hidden := re.search(r"^namespace *(?:[\w:]*\bdetail\b[\w:]* *)?\{", code, re.MULTILINE):
        code = code[:hidden.start()] + code[closing(code, hidden.end() - 1) + 1:]
    for head in re.findall(r"^(?!namespace\b|using\b)[A-Za-z[][^;{]*[;{]", code, re.MULTILINE):
        plain = without_templates(re.sub(r"\[\[.*?\]\]|\balignas\(.*?\)", "", head))
        if kind := re.match(r"\s*(?:template\s*)?(?:enum class|enum|class|struct|union)\s+(\w+)\b(?!::)", plain):
            if head.endswith("{"):
                yield kind.group(1)
        elif (function := re.search(r"([\w:~]+)\s*\(", plain)) and "::" not in function.group(1):
            yield function.group(1)


def without_comment(declarations):
    """Types and functions of one header that nothing is said about: no comment above, beside or inside, or above the group they are in.
    The first one has the header's opening comment."""
    first, commented = True, False
    for i, line in enumerate(declarations):
        if not line or line.startswith("//"):
            commented = bool(line)
            continue
        if re.match(r"[ }]|namespace\b|using\b|(?:inline )?constexpr\b|enum\b|TORCH_MODULE", line) or "ModuleHolder<" in line:
            continue
        if i > 0 and declarations[i - 1].startswith("template"):
            continue
        body = []
        for later in declarations[i:]:
            body.append(later)
            if later.startswith("}") or later.endswith(";") and later[0] != " ":
                break
        if not first and not commented and not any("//" in text for text in body):
            yield line
        first = False


def errors(found, may_lack_comments):
    page, lacking = page_of(found), []
    for header in [header for _, headers in found for header in headers]:
        if not header.comment:
            yield f"{header.name}: begins without a comment that says what it is for"
        section = page.split(f"\n### {header.name}\n", 1)[1].split("\n### ", 1)[0]
        for name in declared_names(header.text):
            if not re.search(rf"\b{name}\b", section):
                yield f"{header.name}: declares {name}, which is not in the reference"
        lacking += [f"{header.name}: {line}" for line in without_comment(header.declarations)]
    if len(lacking) > may_lack_comments:
        yield f"{len(lacking)} declarations have no comment, at most {may_lack_comments} may:\n" + "\n".join(lacking)


def self_test():
    """Each kind of thing that is left out, once, between things that stay."""
    text = """#include <x>
#ifndef GUARD
#define TWO \\
  2
namespace lockstep::a {
class Forward;  // elsewhere
namespace detail { int hidden; }
// Says {hi}.
template <class T>
struct Options {
  std::function<void()> f = {};  // of (it)
  int b{1};
};
enum class Kind { one, two };

// Of hidden things.
class B : public A {
 public:
  explicit B(int x, C c = {}) : A{x}, c_(c) {}
  bool operator<(const B& o) const { return ";" < o; }
  struct State;

  operator c::D() const { return c_; }  // NOLINT(x)

 private:
  // Secret.
  int c_;
};
inline int f(const char* s = "}") {
  return 1;
}
template <class T>
void B::g(T t) {}
}  // namespace lockstep::a
#endif
"""
    expected = """namespace lockstep::a {

// Says {hi}.
template <class T>
struct Options {
  std::function<void()> f = {};  // of (it)
  int b{1};
};
enum class Kind { one, two };

// Of hidden things.
class B : public A {
 public:
  explicit B(int x, C c = {});
  bool operator<(const B& o) const;

  operator c::D() const;
};
inline int f(const char* s = "}");

}  // namespace lockstep::a"""
    if list(declared_names(text)) != ["Options", "Kind", "B", "f"]:
        sys.exit(f"api_reference: self-test: found the names {list(declared_names(text))}")
    found = "\n".join(Reader(text).read())
    if found != expected:
        sys.exit("api_reference: self-test:\n" + "\n".join(difflib.unified_diff(expected.split("\n"), found.split("\n"), lineterm="")))


def self_test_of_errors():
    """Breaks each rule once: it must be noticed, and a sound header must pass."""
    sound = "// SPDX-License-Identifier: X\n// For a test.\n#pragma once\nnamespace lockstep::a {\nint first();\n\n// Second.\nint second();\n}\n"
    broken = {
        "begins without": sound.replace("// For a test.\n", ""),
        "declares C, which": sound.replace("// Second.", "// Lost.\nclass C {\n};\n\n// Second."),
        "no comment": sound.replace("// Second.\n", ""),
    }
    for expected, text in {None: sound, **broken}.items():
        header = Header("lockstep/a/a.h", text)
        if expected == "declares C, which":  # as if the reader had missed it
            header.declarations = [line for line in header.declarations if "C" not in line]
        found = list(errors([("a", [header])], 0))
        if not (len(found) == 1 and expected in found[0] if expected else not found):
            sys.exit(f"api_reference: self-test: expected {expected!r}, found {found}")


def main():
    self_test()
    self_test_of_errors()
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    root = arguments.source.resolve()
    found = [(layer, [Header(name, (root / name).read_text()) for name in names])
             for layer, names in layers((root / "lockstep/CMakeLists.txt").read_text())]
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(page_of(found))
        return
    broken = list(errors(found, MAY_LACK_COMMENTS))
    for error in broken:
        print(error)
    if broken:
        sys.exit("api_reference: the reference is not complete")


if __name__ == "__main__":
    main()
