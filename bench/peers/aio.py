"""DeepSpeed's aio over one file, for io_against_peers.py: aio.py FILE BYTES BLOCK_SIZE QUEUE_DEPTH.

The first line of the output says whether huge pages were granted. For each line of the input, "write|read OVERLAP_EVENTS
HUGE_PAGES LOOPS" (1 or 0), it makes LOOPS passes over the file and prints the bytes per second. A pass is a single operation
on a tensor that the handle has pinned, because that is fastest.
"""

import ctypes
import logging
import sys
import time

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

logging.disable(logging.WARNING)
MADV_COLLAPSE = 25  # <linux/mman.h>; Linux 6.1

path, size, block_size, depth = sys.argv[1], *map(int, sys.argv[2:])
aio = AsyncIOBuilder().load()
handles = [aio.aio_handle(block_size, depth, False, overlap, 1) for overlap in [False, True]]
memory = [handles[0].new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)) for _ in range(2)]
assert all(handle.is_pinned(tensor) for handle in handles[:1] for tensor in memory)
page = 2 << 20
begin = (memory[1].data_ptr() + page - 1) // page * page
end = (memory[1].data_ptr() + size) // page * page
madvise = ctypes.CDLL(None, use_errno=True).madvise
granted = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE) == 0
for tensor in memory:
    tensor.fill_(1)
print("ready" if granted else "ready, no huge pages", flush=True)
for line in sys.stdin:
    direction, overlap, huge, loops = line.split()
    handle, tensor = handles[int(overlap)], memory[int(huge)]
    start = time.perf_counter()
    for _ in range(int(loops)):
        operation = handle.sync_pwrite if direction == "write" else handle.sync_pread
        if operation(tensor, path, 0) != 1:
            sys.exit(f"aio.py: cannot {direction} {path}")
    print(int(loops) * size / (time.perf_counter() - start), flush=True)
