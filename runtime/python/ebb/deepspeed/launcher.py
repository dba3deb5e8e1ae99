"""The command `deepspeed`: one process for each GPU of this host, with the variables that torch and Ebb read."""

import argparse
import os
import signal
import subprocess
import sys
from typing import Sequence

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
_ELSEWHERE = "Ebb's `deepspeed` starts the ranks of this host alone: use torchrun or srun for others"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("deepspeed", description="Starts a program once for each GPU of this host.")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="the number of processes")
    parser.add_argument("-i", "--include", default="", help="localhost:0,2: these GPUs")
    parser.add_argument("-e", "--exclude", default="", help="localhost:1: all GPUs but these")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--module", action="store_true", help="the program is the name of a module")
    parser.add_argument("--no_python", action="store_true", help="the program is a command")
    parser.add_argument("--no_local_rank", action="store_true", help="do not give --local_rank to the program")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="does nothing: Ebb divides the cores by itself")
    parser.add_argument("-H", "--hostfile", default="/job/hostfile", help="refused if it names other hosts")
    parser.add_argument("--launcher", default="", help="refused")
    parser.add_argument("--autotuning", default="", help="refused")
    for ignored in ("--bind_core_list", "--log_level", "--launcher_args", "--node_rank", "--save_pid_file", "--enable_each_rank_log", "--ssh_port"):
        parser.add_argument(ignored, default=None, help=argparse.SUPPRESS)
    for ignored in ("--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--quiet"):
        parser.add_argument(ignored, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _hosts(file: str) -> list[str]:
    if not os.path.exists(file):
        return []
    with open(file, encoding="utf-8") as lines:
        return [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _chosen(text: str, parser: argparse.ArgumentParser) -> list[int]:
    """The numbers of "localhost:0,1"."""
    host, _, numbers = text.partition(":")
    if "@" in text or host not in ("localhost", "127.0.0.1", os.uname().nodename):
        parser.error(f"'{text}': {_ELSEWHERE}")
    try:
        return [int(number) for number in numbers.split(",") if number]
    except ValueError:
        parser.error(f"'{text}': write localhost:0,1")


def _devices(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The names of the GPUs in CUDA_VISIBLE_DEVICES, one for each rank. Without a GPU: numbers alone."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if not visible:
        import torch

        visible = [str(number) for number in range(torch.cuda.device_count())]
    if not visible:
        visible = [str(number) for number in range(max(options.num_gpus, 1, *(number + 1 for number in _chosen(options.include or "localhost", parser)), 1))]
    chosen = _chosen(options.include or "localhost", parser) or list(range(len(visible)))
    left_out = _chosen(options.exclude or "localhost", parser)
    chosen = [number for number in chosen if number not in left_out]
    if options.num_gpus > 0 and not options.include:
        chosen = chosen[: options.num_gpus]
    if not chosen or max(chosen) >= len(visible) or options.num_gpus > len(visible):
        parser.error(f"this host has {len(visible)} GPU(s), and {options.include or options.num_gpus} were asked for")
    return [visible[number] for number in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the first process that fails, or 0. One that fails ends the others."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for given, name in ((options.launcher, "--launcher"), (options.autotuning, "--autotuning"), (options.num_nodes > 1, "--num_nodes")):
        if given:
            parser.error(f"{name}: {_ELSEWHERE}")
    if any(host not in ("localhost", "127.0.0.1", os.uname().nodename) for host in _hosts(options.hostfile)):
        parser.error(f"--hostfile with other hosts: {_ELSEWHERE}")
    devices = _devices(options, parser)
    start = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    processes = []
    for rank in range(len(devices)):
        variables = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(devices)), "LOCAL_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(len(devices)), "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": options.master_addr or "127.0.0.1",
            "MASTER_PORT": str(options.master_port), "CUDA_VISIBLE_DEVICES": ",".join(devices),
        }
        of_rank = [] if options.no_local_rank else [f"--local_rank={rank}"]
        processes.append(subprocess.Popen([*start, options.program, *of_rank, *options.arguments], env=variables))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: [process.send_signal(received) for process in processes if process.poll() is None])
    return _wait(processes)


def _wait(processes: list[subprocess.Popen]) -> int:
    code = 0
    of = {process.pid: process for process in processes}
    while of:
        pid, status = os.wait()
        process = of.pop(pid, None)
        if process is None:
            continue
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0 and code == 0:
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            for other in of.values():
                other.terminate()
    return code
