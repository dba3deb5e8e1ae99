"""The wheel that is installed: one for all Pythons, and nothing of its machine in it."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from ebb import _library

HEADER = pathlib.Path(__file__).parents[2] / "runtime" / "c" / "ebb.h"
LIBRARY = pathlib.Path(_library.library._name)
# What every system has on which torch starts: glibc's libraries and the compiler's.
OF_THE_SYSTEM = {"linux-vdso.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"}

from_a_wheel = pytest.mark.skipif("EBB_LIBRARY" in os.environ, reason="the package as it lies in the tree")


@from_a_wheel
def test_one_wheel_is_for_all_pythons_of_a_platform():
    tags = re.findall(r"^Tag: (.*)$", importlib.metadata.distribution("ebb").read_text("WHEEL"), re.M)
    assert tags and all(re.fullmatch(r"py3-none-manylinux_\d+_\d+_\w+", tag) for tag in tags), tags


@from_a_wheel
@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd")
def test_what_the_library_needs_is_in_the_wheel():
    site = LIBRARY.parents[1]
    needed = subprocess.run(["ldd", LIBRARY], check=True, capture_output=True, text=True).stdout
    assert "not found" not in needed
    for line in needed.splitlines():
        name, _, path = line.strip().partition(" => ")
        name = name.split()[0]
        if name in OF_THE_SYSTEM or name.startswith("/lib"):  # that is the loader
            continue
        assert pathlib.Path(path.split()[0]).resolve().is_relative_to(site.resolve()), line


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_the_library_exports_what_the_header_declares():
    symbols = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True).stdout
    exported = {words[2].split("@")[0] for words in map(str.split, symbols.splitlines()) if words[1] != "A"}
    assert exported == set(re.findall(r"\b(ebb_\w+)\(", HEADER.read_text()))
