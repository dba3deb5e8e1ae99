"""A process that has imported torch and transformers, and runs one job after another, each in a process of its own: a job is one rank of one
system. Each line of the input is a job as JSON, each line of the output its result; run.py has the names. A job that passes its time or its
RAM is ended, and the steps that it has timed until then are its result. On a GPU a job is a fork of this process as long as CUDA can be
used there; otherwise it is a new Python."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for a GPU must not start CUDA, because a fork could not use it then

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))

import torch
from systems import MAKERS, NotHere

CANNOT_FORK = 99
WARM_UP_BATCHES = 2


def resident(process: int | str = "self") -> int:
    """Bytes of RAM that are a process's own, without pages of files."""
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def available() -> int:
    line = next(line for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


class Ram:
    """Bytes that a job has taken, above this process as it was. A driver's pinned memory is in no process, only missing on the machine."""

    def __init__(self, on_gpu: bool):
        self.idle, self.on_gpu, self.available = resident(), on_gpu, available()

    def taken(self, process: int | str) -> int:
        missing = self.available - available() if self.on_gpu else 0
        return max(0, resident(process) - self.idle, missing)


def disk_bytes() -> tuple[int, int]:
    """What the system counts as read from and written to disks by this process."""
    counts = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def folder_bytes(folder: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in pathlib.Path(folder).rglob("*") if path.is_file())


def write(path: str, result: dict[str, Any]) -> None:
    whole = pathlib.Path(path + ".part")
    whole.write_text(json.dumps(result))
    whole.replace(path)


def train(job: dict[str, Any], ram: Ram) -> None:
    """Writes the result after each timed step."""
    os.environ.update(job["environment"])
    on_gpu = job["device"] == "cuda"
    device = torch.device(job["device"])
    torch.set_num_threads(job["threads"])
    if on_gpu:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(CANNOT_FORK)
    begin = time.monotonic()
    try:
        trained = MAKERS[job["program"]](job, device)
    except NotHere as reason:
        return write(job["result"], {"not_run": str(reason)})
    except ModuleNotFoundError as error:
        return write(job["result"], {"not_run": f"{error.name} is not installed; bench/one_card/peers.sh installs it"})
    generator = torch.Generator().manual_seed(job["rank"])

    def batches(count: int) -> list[torch.Tensor]:
        return [torch.randint(0, job["model"]["vocab_size"], job["batch"], generator=generator).to(device) for _ in range(count)]

    trained.step(batches(min(WARM_UP_BATCHES, job["micro_batches"])))
    made = time.monotonic() - begin
    seconds: list[float] = []
    disk: list[tuple[int, ...]] = []
    losses: list[float] = []
    # The ranks leave together, because each has the same number of steps. The last step is begun only if it ends in time.
    while len(seconds) < job["steps"] and (job["ranks"] > 1 or not seconds or time.monotonic() + 1.2 * seconds[-1] < job["deadline"]):
        ids = batches(job["micro_batches"])
        if on_gpu:
            torch.cuda.synchronize()
        begin, before = time.monotonic(), disk_bytes()
        losses.append(trained.step(ids))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
        disk.append(tuple(after - then for after, then in zip(disk_bytes(), before)))
        write(job["result"], {
            "seconds": seconds, "losses": losses, "made_seconds": made, "disk": disk, "ram": ram.taken("self"), "files": folder_bytes(job["folder"]),
            "torch_device": torch.cuda.memory_allocated() if on_gpu else 0, "torch_device_peak": torch.cuda.max_memory_reserved() if on_gpu else 0,
            **trained.counts(),
        })


def one(job: dict[str, Any], ram: Ram) -> int:
    try:
        train(job, ram)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


class Server:
    def __init__(self) -> None:
        self.forks = True

    def finished(self, job: dict[str, Any]) -> dict[str, Any]:
        result = self.attempt(job)
        if result is None:
            self.forks = False
            result = self.attempt(job)
        return result or {}

    def attempt(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """None: this process has started CUDA, so a fork cannot use it."""
        ram = Ram(job["device"] == "cuda")
        process = self.start(job, ram)
        peak, why = 0, ""
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                break
            peak = max(peak, ram.taken(process))
            if peak > job["host_memory"]:
                why = f"took more than {job['host_memory'] / 2**30:g} GiB of RAM"
            elif time.monotonic() > job["deadline"]:
                why = "its time was over"
            if why:
                os.killpg(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
                break
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(status)
        if code == CANNOT_FORK and self.forks:
            return None
        path = pathlib.Path(job["result"])
        result = json.loads(path.read_text()) if path.exists() else {}
        if (why or code) and not result.get("seconds"):
            lines = [line for line in pathlib.Path(job["log"]).read_text(errors="replace").splitlines() if line.strip()]
            result["failed"] = why or f"exit status {code}: {lines[-1][:300] if lines else 'without output'}"
        return result | {"ram_peak": peak}

    def start(self, job: dict[str, Any], ram: Ram) -> int:
        """The process of the job, which leads a group of its own."""
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        if not self.forks:
            environment = os.environ | job["environment"]
            process = subprocess.Popen([sys.executable, __file__, json.dumps(job)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)
            os.close(log)
            return process.pid
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            os.dup2(log, 1), os.dup2(log, 2)
            os._exit(one(job, ram))  # threads of libraries would end it with an error
        os.close(log)
        os.setpgid(process, process)  # the first of both calls counts
        return process


def main() -> None:
    if len(sys.argv) > 1:
        job = json.loads(sys.argv[1])
        os._exit(one(job, Ram(job["device"] == "cuda")))
    print("READY", json.dumps({"torch": torch.__version__, "gpus": torch.cuda.device_count()}), flush=True)
    server = Server()
    for line in sys.stdin:
        print("RESULT", json.dumps(server.finished(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
