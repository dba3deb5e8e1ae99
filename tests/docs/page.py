"""Runs what a page of the documentation shows.

  page.py PAGE --source DIR --programs DIR --scratch DIR [--compiled]

The word behind a fence says what a block is, and so what is done with it:

  sh            run, in a scratch folder with the programs; gpt is cut down to a tiny model and two steps
  cpp           compiled by tests/docs/CMakeLists.txt, which says so with --compiled
  c, cpp, sh of F   a part of the file F
  json          a configuration: gpt --explain-config takes it; json machine: ebb-plan --machine takes it
  python        compiled; run by tests/python/pages_test.py, where torch is
  (nothing)     output or a picture. After a first line "$ COMMAND" it is what COMMAND prints; "..." stands for any text
  KIND not run: REASON

Any other fence is an error, and so is a link to a page or a heading that is not there, or a block that runs for five minutes.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

TINY = "--steps 2 --layers 1 --heads 2 --width 32 --context 16 --vocabulary 256 --batch 1 --threads 1 --data my.txt"
LIMIT_SECONDS = 300  # a rank that waits for another one in vain would take 600
PREDICTS = "--predict --show-plan --show-plan=operations --explain-config --help --version"


def blocks(text):
    """(line, the word behind the fence, the code) of each block."""
    found, start, info, code = [], 0, None, []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            code.append(line)
        elif info is None:
            start, info, code = number, line[3:].strip(), []
        else:
            found.append((start, info, "\n".join(code) + "\n"))
            info = None
    if info is not None:
        raise SystemExit(f"line {start}: a block that does not end")
    return found


def headings(text):
    """What a link calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        path = page.parent / target if target else page
        if not path.exists() or heading and heading not in headings(path.read_text()):
            yield f"{target}#{heading}"


def run_within_limit(command, folder, environment):
    """Exit status and output. At the limit all processes of the command are killed, those in the background too."""
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            raise ValueError(f"it had not ended after {LIMIT_SECONDS} s:\n{printed}") from None
    return process.returncode, printed


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Page:
    def __init__(self, arguments):
        self.arguments = arguments
        self.scratch = pathlib.Path(arguments.scratch)
        self.programs = pathlib.Path(arguments.programs)
        self.source = pathlib.Path(arguments.source)
        self.environment = dict(os.environ)

    def prepare(self):
        """A folder like the repository's root, with the files that the pages name."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        bin_folder, tools = self.scratch / "build/release/bin", self.scratch / "tools"
        for folder in (bin_folder, tools, self.scratch / "runs"):
            folder.mkdir(parents=True)
        for program in self.programs.iterdir():
            if program.name != "gpt":
                (bin_folder / program.name).symlink_to(program)
        executable(bin_folder / "gpt",
                   "#!/bin/sh\nfor word in %s; do case \" $* \" in *\" $word \"*) exec %s \"$@\" ;; esac; done\n"
                   "exec %s \"$@\" %s\n" % (PREDICTS, self.programs / "gpt", self.programs / "gpt", TINY))
        # The targets of "cmake --build" are built already.
        executable(tools / "cmake",
                   "#!/bin/sh\nwhile [ $# -gt 0 ] && [ \"$1\" != --target ]; do shift; done\n[ $# -eq 0 ] || shift\n"
                   "for target; do ls build/release/bin/\"$target\" || exit 1; done\n")
        self.environment["PATH"] = f"{tools}:{bin_folder}:{os.environ['PATH']}"
        # Its scripts install no packages here.
        self.scratch.joinpath("examples").symlink_to(self.source / "examples")
        self.scratch.joinpath("cmake").mkdir()
        self.scratch.joinpath("cmake/packages.sh").write_text("install_packages() { :; }\n")
        shutil.copy(self.source / "LICENSE", self.scratch / "my.txt")
        shutil.copy(self.source / "examples/gpt/config.json", self.scratch / "ds_config.json")
        self.run("gpt --ranks 1 --export gpt2-folder --save runs/a && cp -r runs/a runs/b\n"
                 "cp gpt2-folder/config.json . && cp gpt2-folder/model.safetensors model-1.safetensors")

    def run(self, commands):
        """Output of commands, of which none may fail."""
        status, printed = run_within_limit(["bash", "-euo", "pipefail", "-c", commands], self.scratch, self.environment)
        if status != 0:
            raise ValueError(f"exit status {status}:\n{printed}")
        return printed

    def shows(self, command, expected):
        """What the command prints has the expected text, blanks apart."""
        environment = dict(self.environment, PATH=f"{self.programs}:{os.environ['PATH']}")
        _, printed = run_within_limit(["bash", "-c", command], self.scratch, environment)
        rest = " ".join(printed.split())
        for part in re.split(r"(?<!\.)\.\.\.(?!\.)", expected):
            part = " ".join(part.split())
            if part not in rest:
                raise ValueError(f"not printed, or not there: {part}\nPrinted:\n{printed}")
            rest = rest[rest.index(part) + len(part):]

    def check(self, info, code):
        """What was done with the block; ValueError: it is wrong."""
        skipped = re.fullmatch(r"(sh|cmake|python|cpp|text) not run: (.+)", info)
        quoted = re.fullmatch(r"(?:c|cpp|sh) of (\S+)", info)
        if skipped:
            if skipped[1] == "python":
                compile(code, "block", "exec")
            return info
        if quoted:
            if code not in self.source.joinpath(quoted[1]).read_text():
                raise ValueError(f"{quoted[1]} has no such lines")
        elif info == "sh":
            self.run(code)
        elif info == "cpp":
            if not self.arguments.compiled:
                raise ValueError("name the page in tests/docs/CMakeLists.txt, which compiles it")
        elif info in ("json", "json machine"):
            self.scratch.joinpath("block.json").write_text(code)
            self.run("gpt --explain-config block.json" if info == "json" else "ebb-plan --machine block.json --show-machine")
        elif info == "python":
            compile(code, "block", "exec")
        elif info == "" and code.startswith("$ "):
            command, _, expected = code[2:].partition("\n")
            self.shows(command, expected)
        elif info != "":
            raise ValueError(f"an unknown kind of block: {info}")
        return info or "output"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page")
    for name in ("source", "programs", "scratch"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    page = Page(arguments)
    found = blocks(pathlib.Path(arguments.page).read_text())
    page.prepare()
    wrong = 0
    for line, info, code in found:
        try:
            print(f"line {line}: {page.check(info, code)}", flush=True)
        except (ValueError, SyntaxError) as error:
            wrong += 1
            print(f"{arguments.page}:{line}: {error}", file=sys.stderr)
    for link in dead_links(pathlib.Path(arguments.page)):
        wrong += 1
        print(f"{arguments.page}: a link to {link}, which is not there", file=sys.stderr)
    return 1 if wrong else 0


sys.exit(main())
