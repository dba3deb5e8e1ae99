"""Holds the size and the order of the tree: counts, and compares each count with its row of limits.txt.

    tidy.py            one line for each finding of a count that is over its limit, and exit status 1
    tidy.py --counts   every count of today beside its limit
    tidy.py --lower    writes every count that has fallen into limits.txt

limits.txt says when a limit may rise. floors.txt orders the folders, from the lowest one.
"""

import ast
import collections
import graphlib
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PRODUCT = ("bench", "examples", "offload", "optim", "runtime", "sharding")
CODE = re.compile(r"\.(h|cc|cu|inc|py|sh)$")
CXX = re.compile(r"\.(h|cc|cu|inc)$")
LONG_FILE, SHORT_FILE, LONG_FUNCTION, WIDE_HEADER = 500, 25, 60, 8


class Tree:
    """The files of the repository, and what was counted in them: key -> findings."""

    def __init__(self) -> None:
        listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
        if listed.returncode != 0:
            print("skipped: not a checkout of git, so generated files cannot be told from the others")
            sys.exit(77)
        self.files = {}
        for name in listed.stdout.split("\n"):
            path = os.path.join(ROOT, name)
            if CODE.search(name) and os.path.isfile(path) and not os.path.islink(path):
                with open(path, encoding="utf-8") as file:
                    self.files[name] = file.read().split("\n")[:-1]
        self.counts: dict[str, int] = collections.Counter()
        self.findings: dict[str, list[str]] = collections.defaultdict(list)

    def product(self, kind: re.Pattern[str] = CODE) -> list[tuple[str, list[str]]]:
        return [(name, lines) for name, lines in self.files.items()
                if name.split("/")[0] in PRODUCT and kind.search(name)]

    def find(self, key: str, finding: str) -> None:
        self.counts[key] += 1
        self.findings[key].append(finding)


def room(name: str) -> str:
    """The folder that a limit of lines is for: runtime/comm, tests/comm, sharding."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] in ("runtime", "examples", "tests") and len(parts) > 2 else parts[0]


def floor(name: str) -> str:
    """The folder within the room, "." for a file that is in no other folder."""
    parts = os.path.relpath(name, room(name)).split("/")
    return parts[0] if len(parts) > 1 else "."


def count_lines(tree: Tree) -> None:
    for name, lines in tree.files.items():
        if name.split("/")[0] in (*PRODUCT, "tests"):
            key = f"lines {room(name)}"
            tree.counts[key] += len(lines)
            tree.findings[key] = [f"{room(name)} has {tree.counts[key]} lines"]


def is_interface(name: str, lines: list[str]) -> bool:
    return name.endswith(".h") and re.search(r"\bvirtual\b[^;{]*= 0;", "\n".join(lines)) is not None


def count_file_sizes(tree: Tree) -> None:
    for name, lines in tree.product():
        mark = "#" if name.endswith((".py", ".sh")) else "//"
        code = sum(1 for line in lines if line.strip() and not line.strip().startswith(mark))
        if code < SHORT_FILE and not is_interface(name, lines):
            tree.find("short files", f"{name}: {code} lines of code, of {SHORT_FILE} that a file should have")
        if len(lines) > LONG_FILE:
            tree.find("long files", f"{name}: {len(lines)} lines, over {LONG_FILE}")


def functions_of_python(lines: list[str]) -> list[tuple[int, int]]:
    nodes = ast.walk(ast.parse("\n".join(lines)))
    return [(node.lineno, node.end_lineno or node.lineno) for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def functions_of_cxx(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of each. In the repository's format a body ends with the first brace that is indented as the line on
    which the definition begins."""
    functions = []
    for last, line in enumerate(lines):
        if not (end := re.match(r"( *)\}$", line)):
            continue
        indent = end.group(1)
        for first in range(last - 1, -1, -1):
            begin = lines[first]
            if not begin.startswith(indent) or begin[len(indent):len(indent) + 1] in ("", " ", "#", "/"):
                continue
            if begin.startswith(indent + "}") or re.match(r" *(public|private|protected):", begin):
                break
            head = " ".join(lines[first:last])[:2000]
            if "(" in head.split("{")[0] and not re.match(r" *(if|for|while|switch|else|do|namespace|enum|case)\b", begin):
                functions.append((first + 1, last + 1))
            break
    return functions


def count_long_functions(tree: Tree) -> None:
    for name, lines in tree.product():
        if name.endswith(".sh"):
            continue
        functions = functions_of_python(lines) if name.endswith(".py") else functions_of_cxx(lines)
        for first, last in functions:
            if last - first + 1 > LONG_FUNCTION:
                tree.find("long functions", f"{name}:{first}: a function of {last - first + 1} lines, over {LONG_FUNCTION}")


def count_comments(tree: Tree) -> None:
    """Comments that begin with the words of a noun's attribute, without the noun."""
    for name, lines in tree.files.items():
        if not CXX.search(name):
            continue
        for number, line in enumerate(lines):
            comment = re.match(r"(.*?)// ?(Of|What|As|The same)\b", line)
            if not comment or '"' in comment.group(1):
                continue
            within = not comment.group(1).strip() and number and lines[number - 1].strip().startswith("//")
            if not within:
                tree.find("comments", f"{name}:{number + 1}: the comment begins with '{comment.group(2)}': name the thing first")


def count_casts(tree: Tree) -> None:
    """Casts of an index or an argument, for which no warning asks. A comparison needs its cast, and so do braces and templates
    that take two values of one type."""
    for name, lines in tree.product(CXX):
        folder = room(name) if room(name) in ("sharding", "runtime/engine") else "elsewhere"
        text = "\n".join(lines)
        for cast in re.finditer(r"static_cast<size_t>\(", text):
            depth, end = 1, cast.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            if text[cast.start() - 1] == "[" and text[end] == "]":
                line = text.count("\n", 0, cast.start()) + 1
                tree.find(f"casts {folder}", f"{name}:{line}: an index needs no static_cast<size_t>")


def included(tree: Tree, name: str) -> list[tuple[int, str]]:
    """Line and file of each header of ours that the file includes."""
    found = []
    for number, line in enumerate(tree.files[name]):
        if include := re.match(r'#include "(.*)"', line):
            path = include.group(1)
            target = path[4:] if path.startswith("ebb/") else os.path.normpath(os.path.join(os.path.dirname(name), path))
            if target in tree.files:
                found.append((number + 1, target))
    return found


def read_floors() -> dict[str, list[str]]:
    with open(os.path.join(HERE, "floors.txt"), encoding="utf-8") as file:
        rows = [line.split(":", 1) for line in file if line.strip() and not line.startswith("#")]
    return {folder.strip(): order.split() for folder, order in rows}


def is_up(order: list[str], here: str, there: str) -> bool:
    for folder in (here, there):
        if folder not in order:
            sys.exit(f"tests/tidy/floors.txt: the folder '{folder}' is missing beside {' '.join(order)}")
    return order.index(there) > order.index(here)


def public_headers() -> set[str]:
    with open(os.path.join(ROOT, "cmake/EbbPublicHeaders.cmake"), encoding="utf-8") as file:
        return set(re.findall(r"^  ([\w/]+\.h)", file.read(), re.MULTILINE))


def count_includes(tree: Tree) -> None:
    floors = read_floors()
    fan_in = collections.defaultdict(set)
    for name, _ in tree.product(CXX):
        for number, target in included(tree, name):
            here, there = room(name), room(target)
            words = f"{name}:{number}: includes {target}, which is above"
            if here != there:
                fan_in[target].add(name)
                if name.split("/")[0] not in ("bench", "examples") and is_up(floors["rooms"], here, there):
                    tree.find("includes up", words)
            elif here in floors and is_up(floors[here], floor(name), floor(target)):
                tree.find(f"includes up {here}", words)
    for header in sorted(set(fan_in) - public_headers()):
        if len(fan_in[header]) > WIDE_HEADER and room(header) != "runtime/base":
            tree.counts[f"included {header}"] = len(fan_in[header])
            tree.findings[f"included {header}"] = [f"{header}: {len(fan_in[header])} files of other rooms include it"]


def count_core(tree: Tree) -> None:
    """The objects that most parts of an engine work on are one struct of references. Parts borrow no others in a struct."""
    header = "runtime/engine/core.h"
    body = "\n".join(tree.files[header]).split("struct Core {", 1)[1].split("};", 1)[0]
    for member in (line.split("//")[0].strip() for line in body.split("\n")):
        if member:
            tree.find("methods of Core" if "(" in member else "members of Core", f"{header}: {member}")
    for name, lines in tree.product(CXX):
        for number, line in enumerate(lines):
            if name.startswith("runtime/engine/") and re.match(r" *struct \w*Parts\b", line):
                tree.find("structs of parts", f"{name}:{number + 1}: take the core and the named parts in the constructor")


def count_names(tree: Tree) -> None:
    """The files that name the purpose of an array, the code or the role of an operation, for the one that most files name: a feature has to
    look into these."""
    for kind in ("Purpose", "Code", "Role"):
        naming: dict[str, list[str]] = collections.defaultdict(list)
        for name, lines in tree.product(CXX):
            for value in set(re.findall(rf"\b{kind}::(k\w+)", "\n".join(lines))):
                naming[value].append(name)
        value = max(naming, key=lambda each: len(naming[each]))
        for name in naming[value]:
            tree.find(f"files that name a {kind.lower()}", f"{name}: names {kind}::{value}")


def count_circles(tree: Tree) -> None:
    """Modules of the Python package that import each other in a circle. Imports inside of functions count too."""
    graph = {}
    for name, lines in tree.product(re.compile(r"^runtime/python/ebb/\w+\.py$")):
        imports = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.ImportFrom) and node.level == 1]
        graph[os.path.basename(name)[:-3]] = {node.module or alias.name for node in imports for alias in node.names}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        tree.find("circles of imports", "runtime/python/ebb: " + " is imported by ".join(error.args[1]))


def count_test_modules(tree: Tree) -> None:
    """Modules of tests/python with one file name: pytest runs them in one process and imports each by that name alone."""
    folders: dict[str, list[str]] = collections.defaultdict(list)
    for name in tree.files:
        if re.match(r"tests/python/.*_test\.py$", name):
            folders[os.path.basename(name)].append(name)
    for name, modules in folders.items():
        for module in modules[1:]:
            tree.find("test modules of one name", f"{module}: {modules[0]} is {name}, too")


def read_limits() -> dict[str, int]:
    with open(os.path.join(HERE, "limits.txt"), encoding="utf-8") as file:
        rows = [line.split(maxsplit=1) for line in file if line.strip() and not line.startswith("#")]
    return {key.strip(): int(number) for number, key in rows}


def lower(counts: dict[str, int]) -> None:
    path = os.path.join(HERE, "limits.txt")
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")[:-1]
    for index, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            number, key = line.split(maxsplit=1)
            lines[index] = f"{min(int(number), counts[key]):6} {key}"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def main() -> int:
    tree = Tree()
    for count in (count_lines, count_file_sizes, count_long_functions, count_comments, count_casts, count_includes, count_core, count_names,
                  count_circles, count_test_modules):
        count(tree)
    if "--lower" in sys.argv[1:]:
        lower(tree.counts)
    limits = read_limits()
    if "--counts" in sys.argv[1:]:
        for key in sorted(tree.counts | limits):
            print(f"{tree.counts[key]:6} of {limits.get(key, 0):6}  {key}")
        return 0
    over = [key for key in sorted(tree.counts) if tree.counts[key] > limits.get(key, 0)]
    for key in over:
        print(f"{key}: {tree.counts[key]}, and tests/tidy/limits.txt allows {limits.get(key, 0)}")
        for finding in tree.findings[key]:
            print(f"  {finding}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
