"""All-gather and reduce-scatter of gloo through torch.distributed, timed as nccl-tests does.

python gloo_collectives.py BYTES ITERATIONS prints a line of JSON: median seconds on two ranks.
"""

import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing


def median_seconds(iterations, operation):
    seconds = []
    for _ in range(iterations + 2):
        dist.barrier()
        begin = time.perf_counter()
        operation()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def run(rank, ranks, port, total, iterations):
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    whole = torch.ones(total // 4)
    part = torch.ones(total // 4 // ranks)
    result = {
        "all_gather": median_seconds(iterations, lambda: dist.all_gather_into_tensor(whole, part)),
        "all_gather_in_place": median_seconds(
            iterations, lambda: dist.all_gather_into_tensor(whole, whole.chunk(ranks)[rank])),
        "reduce_scatter": median_seconds(iterations, lambda: dist.reduce_scatter_tensor(part, whole)),
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (2, free_port, int(sys.argv[1]), int(sys.argv[2])), nprocs=2)
