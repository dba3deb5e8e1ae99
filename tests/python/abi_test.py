"""The package's structs and functions are those of runtime/c/ebb.h."""

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from ebb import _library

HEADER = pathlib.Path(__file__).parents[2] / "runtime" / "c" / "ebb.h"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structs_have_the_offsets_of_the_compiler(tmp_path):
    lines = []
    for name, struct in _library.STRUCTS.items():
        lines.append(f'printf("{name} %zu", sizeof({name}));')
        lines += [f'printf(" {field}:%zu:%zu", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));' for field, *_ in struct._fields_]
        lines.append('printf("\\n");')
    source = tmp_path / "offsets.c"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
    program = tmp_path / "offsets"
    subprocess.run(["cc", "-std=c99", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = []
    for name, struct in _library.STRUCTS.items():
        fields = [f"{field}:{getattr(struct, field).offset}:{getattr(struct, field).size}" for field, *_ in struct._fields_]
        ours.append(" ".join([f"{name} {ctypes.sizeof(struct)}", *fields]))
    assert ours == printed


def test_every_struct_and_function_is_bound():
    text = HEADER.read_text()
    assert set(re.findall(r"^} (ebb_\w+);", text, re.M)) == set(_library.STRUCTS)
    assert set(re.findall(r"\b(ebb_\w+)\(", text)) == set(_library.SIGNATURES)
    assert len(_library.SIGNATURES) <= 57


def test_numbers_are_those_of_the_header():
    values = dict(re.findall(r"\b(EBB_\w+) = (\d+)", HEADER.read_text()))
    for number, state in enumerate(_library.STATES):
        assert values["EBB_" + state.upper()] == str(number)
    for number, code in enumerate(_library.CODES[:-1]):
        assert values["EBB_" + code] == str(number)


def test_errors_have_a_code_and_a_text():
    with pytest.raises(_library.Error, match="engine is null") as caught:
        _library.check(_library.library.ebb_engine_close(None))
    assert caught.value.code == "INVALID_ARGUMENT"
