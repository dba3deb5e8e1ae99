"""Checkpoints on demand: checkpoints.py torch|deepspeed FOLDER UNITS ELEMENTS_OF_A_UNIT [SAVING_THREADS].

One rank has as many parameters as checkpoint_bench, with fp32 masters and Adam's two fp32 states. For each line of the
input ("save" or "load") it prints a line with seconds. A save ends when all of its files are synced. A load begins with
all files dropped from the page cache.
"""

import os
import pathlib
import shutil
import socket
import sys
import time

import torch

library, folder, units, elements = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def files():
    return [path for path in folder.rglob("*") if path.is_file()]


def sync():
    for path in files() + [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_from_page_cache():
    for path in files():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def torch_calls():
    import torch.distributed.checkpoint as dcp

    torch.distributed.init_process_group("gloo")
    state = {f"w{u}": {name: torch.full((2048, elements // 2048), float(u + 1)) for name in ["master", "exp_avg", "exp_avg_sq"]}
             for u in range(units)}
    threads = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    return (lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=threads)),
            lambda path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)))


def deepspeed_calls():
    import deepspeed

    # One rank needs no collectives between ranks of a host, and DeepSpeed would have to build them first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2048, elements // 2048))

        def forward(self, x):
            return x + self.weight[0, 0]

    model = torch.nn.Sequential(*(Layer() for _ in range(units)))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "bf16": {"enabled": True},
    })
    engine.backward(engine(torch.zeros(1, dtype=torch.bfloat16)).sum())
    engine.step()
    return (lambda path: engine.save_checkpoint(str(path), tag="step"),
            lambda path: engine.load_checkpoint(str(path), tag="step"))


# Only answers go to standard output. A library's own output goes to standard error.
answers, sys.stdout = sys.stdout, sys.stderr
save, load = {"torch": torch_calls, "deepspeed": deepspeed_calls}[library]()
print("ready", file=answers, flush=True)
for line in sys.stdin:
    if line.strip() == "save":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        start = time.perf_counter()
        save(folder)
        sync()
    else:
        drop_from_page_cache()
        start = time.perf_counter()
        load(folder)
    print(f"{time.perf_counter() - start:.6f}", file=answers, flush=True)
