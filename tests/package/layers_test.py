#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The layer rule, the same rule for the rooms inside a layer, details that stay inside, and what a source file may hold. Reads the tree; builds nothing.

usage: layers_test.py SOURCE_DIR
"""
import pathlib
import re
import sys
import tempfile

# A folder under lockstep/ may include itself and the folders before it. The list holds planned folders too.
WITHOUT_TORCH = ["core", "codec", "layout", "schedule", "plan", "io", "flight", "formats", "data", "config", "report", "launch", "fabric"]
WITH_TORCH = ["memory", "comm", "mesh", "nn", "optim", "parallel", "checkpoint", "model", "train", "cli"]
LAYERS = WITHOUT_TORCH + WITH_TORCH
# The first use the second as a user's program could: by installed headers, but for texts and bytes, which a program has ways of its own for.
LIKE_A_USER = {"model", "train"}
OF_PARALLELISM = {"memory", "comm", "mesh", "optim", "parallel", "checkpoint"}
FOR_ANYBODY = {"lockstep/" + name for name in ["comm/control/rank_consistency.h", "comm/control/rank_texts.h", "memory/device_graph.h", "memory/device_size.h", "memory/meter.h", "memory/pinning/pinned_pages.h", "memory/tensor_bytes.h", "parallel/pipeline/timeline.h"]}

# What programs include. Of the installed headers it includes all but those that need the headers of another library.
UMBRELLA = "lockstep/lockstep.h"
NEED_OTHERS = {"lockstep/comm/backends/" + name for name in ["gloo/adopt_c10d.h", "mpi/adopt_mpi.h", "nccl/adopt.h"]}
MAX_INSTALLED = 71  # headers

MAX_FILES = 30  # sources in a folder, without those in its rooms
MAX_LINES = 500  # without the line of the license
LICENSE = b"SPDX-License-Identifier: Apache-2.0"
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".py"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".txt", ".cmake", ".in", ".md", ".json", ".sh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
# Core has no namespace of its own.
DETAIL = re.compile(r"\b(lockstep|" + "|".join(LAYERS) + r")::detail\b")
COMMENT = re.compile(r"//.*")
FORMATTING = re.compile(r"^(fmt|spdlog)/|^lockstep/core/format\.h$")


def files(root, folders, suffixes):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in suffixes:
                yield path


def installed_headers(root):
    """The umbrella and the HEADERS lists of lockstep/CMakeLists.txt, as paths from the root."""
    text = re.sub(r"#.*", "", (root / "lockstep/CMakeLists.txt").read_text())
    headers = {UMBRELLA}
    for layer in re.findall(r"lockstep_layer\(([^)]*)\)", text):
        listed = re.search(r"\bHEADERS\s+(.*?)(?:\b[A-Z]{5,}\b|$)", layer, re.DOTALL)
        if listed:
            headers |= {"lockstep/" + name for name in listed.group(1).split()}
    return headers


def reachable(root, start):
    """All headers of ours that a header includes, itself among them."""
    found, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in found and (root / name).is_file():
            found.add(name)
            todo += [included for mark, included in INCLUDE.findall((root / name).read_text()) if included.startswith("lockstep/")]
    return found


def surface_errors(root, installed):
    """The installed headers are few, and are what the umbrella includes."""
    if len(installed) > MAX_INSTALLED:
        yield f"lockstep/CMakeLists.txt: installs {len(installed)} headers, at most {MAX_INSTALLED}; make others private first"
    included = reachable(root, UMBRELLA)
    for name in sorted(installed - included - NEED_OTHERS):
        if not (root / name).is_file():
            continue
        yield f"{name}: is installed, but {UMBRELLA} does not include it; remove it from HEADERS, or include it there"
    for mark, name in INCLUDE.findall((root / UMBRELLA).read_text()):  # what these include is include_errors' business
        if name not in installed:
            yield f"{UMBRELLA}: includes {name}, which is not installed (HEADERS in lockstep/CMakeLists.txt)"


def include_errors(root, path, name, installed):
    """What is wrong with the includes of one file under lockstep/. `name` is its path from the root."""
    if name == UMBRELLA:  # above all layers
        return
    layer = name.split("/")[1]
    if layer not in LAYERS:
        yield f"{name}: folder {layer} is not in the list of layers (tests/package/layers_test.py)"
        return
    public = name in installed
    for mark, included in INCLUDE.findall(path.read_text(errors="replace")):
        if mark == '"' and not included.startswith("lockstep/"):
            yield f'{name}: includes "{included}"; write our headers from the root, "lockstep/...", and others with <>'
        if included.startswith("lockstep/"):
            target = included.split("/")[1]
            if not (root / included).is_file():
                yield f"{name}: includes {included}, which does not exist"
            if target not in LAYERS or LAYERS.index(target) > LAYERS.index(layer):
                yield f"{name}: includes {included}, but {layer} may use only: {' '.join(LAYERS[:LAYERS.index(layer) + 1])}"
            if layer in LIKE_A_USER and target in OF_PARALLELISM and included not in installed | FOR_ANYBODY:
                yield f"{name}: includes {included}, which is not installed, but {layer} may use only what a user can"
            if public and included not in installed:
                yield f"{name}: is installed and includes {included}, which is not (HEADERS in lockstep/CMakeLists.txt)"
        if included == "torch/torch.h":
            yield f"{name}: includes torch/torch.h, which takes 14 s to compile; include what is used"
        elif TORCH.match(included) and layer in WITHOUT_TORCH:
            yield f"{name}: includes {included}, but {layer} belongs to the half without torch"
        if public and FORMATTING.match(included):
            yield f"{name}: is installed and includes {included}; formatting and logging are for sources"
        if included.startswith("spdlog/") and name != "lockstep/core/log.cpp":
            yield f"{name}: includes {included}; only lockstep/core/log.cpp may"


def detail_errors(path, name):
    """Uses of what another layer keeps to itself."""
    layer = name.split("/")[1]
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
        for owner in DETAIL.findall(COMMENT.sub("", line)):
            if owner != ("lockstep" if layer == "core" else layer):
                yield f"{name}:{number}: uses {owner}::detail, which belongs to another layer; give what it needs a name outside detail"


def room_errors(root):
    """Folders that include each other, at any depth and by any way round, and folders that hold too much."""
    uses = {}
    for path in files(root, ["lockstep"], {".h", ".cpp", ".cu"}):
        folder = path.parent.relative_to(root / "lockstep").as_posix()
        uses.setdefault(folder, set())
        for mark, included in INCLUDE.findall(path.read_text(errors="replace")):
            if included.startswith(f"lockstep/{folder.split('/')[0]}/"):  # other layers are the layer rule's business
                uses[folder].add(included[len("lockstep/"):].rpartition("/")[0])

    def reaches(start):
        seen, todo = set(), [start]
        while todo:
            for folder in uses.get(todo.pop(), ()):
                if folder not in seen:
                    seen.add(folder)
                    todo.append(folder)
        return seen

    reached = {folder: reaches(folder) - {folder} for folder in uses}
    cycles = {tuple(sorted({folder} | {other for other in reached[folder] if folder in reached.get(other, ())})) for folder in uses}
    for cycle in sorted(cycles):
        if len(cycle) > 1:
            yield f"lockstep: these folders include each other: {' '.join(cycle)}"
    for folder in sorted(uses):
        count = sum(1 for path in (root / "lockstep" / folder).glob("*") if path.suffix in {".h", ".cpp", ".cu"})
        if count > MAX_FILES:
            yield f"lockstep/{folder}: {count} sources, at most {MAX_FILES}; give it rooms"


def errors(root):
    installed = installed_headers(root)
    for name in sorted(installed):
        if not (root / name).is_file():
            yield f"lockstep/CMakeLists.txt: installs {name}, which does not exist"
    for path in files(root, ["lockstep"], {".h", ".cpp", ".cu"}):
        name = path.relative_to(root).as_posix()
        yield from include_errors(root, path, name, installed)
        yield from detail_errors(path, name)
    yield from surface_errors(root, installed)
    yield from room_errors(root)
    for path in files(root, ["lockstep", "tests", "examples", "bench"], SOURCE_SUFFIXES):
        lines = path.read_bytes().split(b"\n")
        if not any(LICENSE in line for line in lines[:2]):
            yield f"{path.relative_to(root)}: does not begin with {LICENSE.decode()}"
        if len(lines) - 2 > MAX_LINES:
            yield f"{path.relative_to(root)}: {len(lines) - 2} lines, at most {MAX_LINES}; two ideas share this file, give each its own"
    top = [path for path in root.glob("*") if path.is_file() and path.suffix in TEXT_SUFFIXES]
    for path in top + list(files(root, ["lockstep", "tests", "examples", "bench", "cmake", "docs"], TEXT_SUFFIXES)):
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if any(byte > 126 for byte in line):
                yield f"{path.relative_to(root)}:{number}: is not ASCII"


def self_test():
    """Breaks each rule once in a small tree: every one must be noticed, and the sound tree must pass."""
    cmake = "lockstep_layer(core HEADERS core/a.h SOURCES core/a.cpp)\nlockstep_layer(comm TORCH HEADERS comm/c.h DEPENDS x)\n"
    sound = {
        "lockstep/CMakeLists.txt": cmake,
        "lockstep/lockstep.h": '#include "lockstep/core/a.h"\n#include "lockstep/comm/c.h"\n',
        "lockstep/core/a.h": "#include <string>\n",
        "lockstep/core/hidden.h": "",
        "lockstep/core/format.h": "",
        "lockstep/core/a.cpp": '#include "lockstep/core/a.h"\n#include "lockstep/core/format.h"\n',
        "lockstep/core/log.cpp": "#include <spdlog/spdlog.h>\n",
        "lockstep/comm/c.h": '#include <ATen/core/Tensor.h>\n#include "lockstep/core/a.h"\nusing comm::detail::World;\n',
    }
    many = [f"core/room{n % 9}/n{n}.h" for n in range(MAX_INSTALLED - 2)]
    broken = {
        "may use only": {"lockstep/core/a.cpp": '#include "lockstep/comm/c.h"\n'},
        "which is not (HEADERS": {"lockstep/comm/c.h": '#include "lockstep/core/hidden.h"\n'},
        "only what a user can": {"lockstep/train/t.cpp": '#include "lockstep/comm/hidden.h"\n#include "lockstep/core/hidden.h"\n', "lockstep/comm/hidden.h": ""},
        "does not include it": {"lockstep/lockstep.h": '#include "lockstep/comm/c.h"\n', "lockstep/comm/c.h": ""},
        "which is not installed": {"lockstep/lockstep.h": sound["lockstep/lockstep.h"] + '#include "lockstep/core/hidden.h"\n'},
        "make others private": {
            "lockstep/CMakeLists.txt": cmake.replace("a.h", " ".join(["a.h", *many])),
            "lockstep/lockstep.h": sound["lockstep/lockstep.h"] + "".join(f'#include "lockstep/{name}"\n' for name in many),
            **{f"lockstep/{name}": "" for name in many},
        },
        "which does not exist": {"lockstep/core/a.cpp": '#include "lockstep/core/gone.h"\n'},
        "belongs to another layer": {"lockstep/comm/c.cpp": "int a = lockstep::detail::kA;  // core::detail\n"},
        "uses comm::detail": {"lockstep/cli/x.cpp": "using comm::detail::World;\nusing cli::detail::Own;\n"},
        "include each other": {
            "lockstep/core/a.cpp": '#include "lockstep/core/room/b.h"\n',
            "lockstep/core/room/b.h": '#include "lockstep/core/room/deep/c.h"\n',
            "lockstep/core/room/deep/c.h": '#include "lockstep/core/a.h"\n',
        },
        "give it rooms": {f"lockstep/core/many{n}.h": "" for n in range(MAX_FILES)},
        "from the root": {"lockstep/core/a.cpp": '#include "../comm/c.h"\n'},
        "half without torch": {"lockstep/core/a.cpp": "  # include <c10/core/Device.h>\n"},
        "14 s": {"lockstep/comm/c.cpp": "#include <torch/torch.h>\n"},
        "are for sources": {"lockstep/comm/c.h": "#include <fmt/format.h>\n"},
        "core/log.cpp may": {"lockstep/comm/c.cpp": "#include <spdlog/spdlog.h>\n"},
        "not in the list of layers": {"lockstep/extra/x.h": ""},
        "does not exist": {"lockstep/CMakeLists.txt": cmake.replace("a.h", "a.h core/gone.h")},
        "is not ASCII": {"docs/x.md": "caf\u00e9\n"},
        "at most": {"tests/long.cpp": "\n" * (MAX_LINES + 1)},
        "does not begin": {"tests/x.py": None},
    }
    for expected, change in {None: {}, **broken}.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**sound, **change}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                license = "" if text is None else LICENSE.decode() + "\n"
                (root / name).write_text(license + (text or ""), encoding="utf-8")
            found = list(errors(root))
            noticed = len(found) == 1 and expected in found[0] if expected else not found
            if not noticed:
                sys.exit(f"layers_test: self-test: expected {expected!r}, found {found}")


def main():
    self_test()
    found = list(errors(pathlib.Path(sys.argv[1]).resolve()))
    for error in found:
        print(error)
    print(f"layers_test: {len(found)} broken rules")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
