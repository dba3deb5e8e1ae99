"""Programs that are compared in turns: ranks as processes, processes that answer line by line, and tables."""

import argparse
import os
import pathlib
import socket
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
BUILT = HERE.parent / "build/release/bin"


def parser_of(text):
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)


def in_turn(names, turn):
    """The names in an order that changes, so that other load on the machine disturbs all alike."""
    names = list(names)
    first = turn % len(names)
    return names[first:] + names[:first]


def environments_of(ranks):
    """What torchrun sets for each rank on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
             "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def peaks_of(command, environments, stderr=None):
    """Runs a process for each environment. Returns the peak resident set of each, in KiB."""
    command = [str(word) for word in command]
    started = [subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=stderr)
               for environment in environments]
    ends = [os.wait4(process.pid, 0) for process in started]
    if any(status != 0 for _, status, _ in ends):
        sys.exit(f"{' '.join(command)} has failed")
    return [usage.ru_maxrss for _, _, usage in ends]


def output(command, stderr=None, **environment):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=stderr, check=True, text=True,
                          env=os.environ | environment).stdout


class Failed(SystemExit):
    """Ends the comparison with its message, unless it is caught."""


class Peer:
    """A process for all turns, because its start takes longer than a turn. It answers each line with a line."""

    def __init__(self, command, stderr=None, **environment):
        self.command = [str(word) for word in command]
        self.process = subprocess.Popen(self.command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                                        env=os.environ | environment)

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self, is_answer):
        """The next line that is one. Libraries may print others before it."""
        for line in self.process.stdout:
            if is_answer(line):
                return line.strip()
        raise Failed(f"{' '.join(self.command)} has failed, exit status {self.process.wait()}")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def is_number(line):
    return line[:1].isdigit()


def median_ratio(these, those):
    """The median of the ratios within a turn."""
    return statistics.median(this / that for this, that in zip(these, those))


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def print_head(*cells):
    print_row(*cells)
    print("|" + "---|" * len(cells))
