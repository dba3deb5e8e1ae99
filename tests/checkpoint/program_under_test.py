"""The common part of the tests of ebb-checkpoint against other packages: it runs the program and looks for the packages.

    NAME_test.py EBB_CHECKPOINT
"""
import importlib
import os
import subprocess
import sys

tool = os.path.abspath(sys.argv[1])
# ebb-checkpoint starts python3, which is the one of this test.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]


def require(*packages):
    """Skips the test (exit status 77) where the Python that runs it lacks one."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"Skipped: {error}; install {', '.join(packages)} for the first python3 of PATH")
            sys.exit(77)


def run(*arguments, code=0):
    """Returns its output of both streams."""
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def peak_memory(*arguments):
    """The bytes that the larger of its processes held. A process of few bytes starts it, because a child begins with its parent's peak."""
    starts = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); " \
             "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    return 1024 * int(subprocess.check_output([sys.executable, "-S", "-c", starts, tool, *map(str, arguments)]))
