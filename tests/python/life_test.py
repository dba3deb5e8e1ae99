"""What a long run leaves behind, and what one rank hears of another's end."""

import ctypes
import gc
import os
import pathlib
import signal

import pytest
import torch
from ranks import Ranks
from training import config, llama, mlp, offloaded, squared_error, token_batches, vector_batches

import ebb

STEPS = int(os.environ.get("EBB_STEPS", "200"))  # 1000 in a run by hand


def _tensors():
    """How many there are, when what earlier tests have left is gone. A collection may leave garbage for the next one."""
    count, before = -1, None
    while count != before:
        gc.collect()
        count, before = sum(isinstance(one, torch.Tensor) for one in gc.get_objects()), count
    return count


def _resident_bytes():
    """Of this process, when what was freed has been given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _long_run(folder):
    model = llama()
    batches = token_batches(4, 2)
    engine = ebb.initialize(model, config(zero=offloaded(folder) if folder else {}), example=batches[0][0])

    def train(steps):
        for step in range(steps):
            engine.backward(model(**batches[step % 4][engine.world.rank]).loss)
            engine.step()
        return engine.report()

    train(STEPS // 2)
    tensors, memory, resident = _tensors(), engine.memory(), _resident_bytes()
    report = train(STEPS // 2)
    grown = _resident_bytes() - resident
    assert _tensors() == tensors
    assert engine.memory() == memory
    assert report.step == STEPS // 2 * 2
    engine.close()
    return grown


@pytest.mark.parametrize("place", ["device", "disk"])
def test_a_long_run_takes_no_more_memory(two, tmp_path, place):
    """Later steps as against the first half of them. 1 MiB is less than what one step allocates."""
    assert max(two.run(_long_run, str(tmp_path) if place == "disk" else None)) < 2**20


def _kept_bytes(keep):
    engine = ebb.initialize(mlp(), config(), keep_memory=keep)
    held = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before = held()
    torch.ones(2**24)
    kept = held() - before
    engine.close()
    return kept


@pytest.mark.skipif(any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ), reason="malloc was set from outside")
def test_the_process_keeps_what_a_step_has_freed_only_where_that_is_asked_for():
    ranks = Ranks(1)  # of its own, because the setting lasts until the process ends
    without = ranks.run(_kept_bytes, False)[0]
    kept = ranks.run(_kept_bytes, True)[0]
    ranks.stop()
    assert without < 2**25 < kept  # of 64 MiB


def _one_dies():
    model = mlp()
    batches = vector_batches(2, 2)
    engine = ebb.initialize(model, config())
    rank = engine.world.rank
    engine.backward(squared_error(model, batches[0][rank]))
    engine.step()
    engine.report()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ebb.Error, match="rank 1"):
        engine.backward(squared_error(model, batches[1][rank]))
        engine.step()
        engine.report()


def test_the_end_of_another_rank_is_an_error():
    ranks = Ranks(2)
    with pytest.raises(AssertionError) as caught:
        ranks.run(_one_dies)
    assert "rank 1 has died, exit code -9" in str(caught.value) and "rank 0" not in str(caught.value)
