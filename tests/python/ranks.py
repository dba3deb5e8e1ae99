"""Two ranks that stay: processes which run a function at a time, all of them the same, so that torch is imported once."""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import socket
import traceback
from typing import Any, Callable, Iterator

TIMEOUT = 300  # seconds of one function; a rank that hangs is a failure


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1", EBB_LOG_LEVEL=os.environ.get("EBB_LOG_LEVEL", "err"),
    )
    import torch

    torch.set_num_threads(1)
    while True:
        call = pipe.recv()
        if call is None:
            return
        function, arguments, keywords = call
        try:
            pipe.send((True, function(*arguments, **keywords)))
        except BaseException:
            import ebb._world

            text = traceback.format_exc()
            for memory in list(ebb._world.memories):
                memory.close()
            pipe.send((False, text))


class Ranks:
    def __init__(self, size: int):
        self.size = size
        self.processes: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """What `function` returns on each rank. The first rank's exception is raised, and the processes are begun anew."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments, keywords))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT if not failures else 20):
                failures.append(f"rank {rank} did not answer")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                self.processes[rank].join(TIMEOUT)  # the pipe closes before the process has ended
                ok, value = False, f"rank {rank} has died, exit code {self.processes[rank].exitcode}"
            results.append(value) if ok else failures.append(f"rank {rank}: {value}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self.pipes = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []


def staying(size: int) -> Iterator[Ranks]:
    """The body of a fixture: ranks until its scope ends."""
    ranks = Ranks(size)
    yield ranks
    ranks.stop()


class _Body:
    """The function of a test, which the processes import by its name."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name

    def __call__(self, place: Any = None, **given: Any) -> Any:
        body = getattr(importlib.import_module(self.module), self.name).__wrapped__
        of_place = {"place": place, "settings": place and place.with_sgd()}
        return body(**given, **{name: of_place[name] for name in inspect.signature(body).parameters if name in of_place})


def _on(ranks: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that runs in the processes of the fixture `ranks`. Its parameters are fixtures and values of parametrize,
    `folder` is str(tmp_path), and in reports/ `place` is the Place, and `settings` its configuration for SGD."""

    def made(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(**given: Any) -> None:
            processes = given.pop(ranks)
            if "tmp_path" in given:
                given["folder"] = str(given.pop("tmp_path"))
            if ranks != "at" and {"place", "settings"} & set(parameters):
                from places import Place

                given["place"] = Place(ranks, processes.size)
            processes.run(_Body(body.__module__, body.__name__), **given)

        names = [ranks, *("tmp_path" if name == "folder" else name for name in parameters if name not in ("place", "settings"))]
        test.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
        return test

    return made


on_one, on_two, on_ranks, on_places = _on("one"), _on("two"), _on("ranks"), _on("at")
on_pair, on_four, on_fresh, on_alone = _on("pair"), _on("four"), _on("fresh"), _on("alone")
