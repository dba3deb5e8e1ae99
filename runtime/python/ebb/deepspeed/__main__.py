"""python -m ebb.deepspeed train.py ... | COMMAND ... | --check FILE...: a program that imports deepspeed, on Ebb."""

from __future__ import annotations

import ast
import os
import sys
from typing import Iterator

from . import PATH, environment

USAGE = """usage: python -m ebb.deepspeed SCRIPT.py [argument...]     a script, -m MODULE or -c TEXT
       python -m ebb.deepspeed COMMAND [argument...]       accelerate, torchrun, deepspeed, ...
       python -m ebb.deepspeed --check FILE.py...          the names below deepspeed that it uses, and what Ebb does with them"""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--check":
        return check(arguments[1:])
    if arguments[0] == "deepspeed":
        arguments = [os.path.join(PATH, "bin", "deepspeed"), *arguments[1:]]  # with this Python
    is_python = arguments[0].endswith((".py", "bin/deepspeed")) or arguments[0] in ("-m", "-c")
    command = [sys.executable, *arguments] if is_python else arguments
    variables = {**os.environ, **environment()}
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        print(f"python -m ebb.deepspeed: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def check(files: list[str]) -> int:
    """Prints each name with "runs", "refused: why" or "unknown". Returns 1 if there is one that does not run."""
    from . import names

    if not files:
        print(USAGE, file=sys.stderr)
        return 2
    is_all = True
    for file in files:
        with open(file, encoding="utf-8") as text:
            used = dict.fromkeys(names_used(ast.parse(text.read(), file)))
        for name in used:
            verdict = names.verdict(name)
            is_all = is_all and verdict == "runs"
            print(f"{file}: {name}: {verdict}")
    return 0 if is_all else 1


def names_used(tree: ast.AST) -> Iterator[str]:
    """The names below deepspeed: what is imported, and attributes of what is imported."""
    meaning: dict[str, str] = {}  # of names in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "deepspeed":
                    meaning[one.asname or "deepspeed"] = one.name if one.asname else "deepspeed"
                    yield one.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "deepspeed":
            for one in node.names:
                name = node.module if one.name == "*" else f"{node.module}.{one.name}"
                meaning[one.asname or one.name] = name
                yield name
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):  # outer attributes come first
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                inner.add(at)
                parts.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id in meaning:
                yield ".".join([meaning[at.id], *reversed(parts)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
