"""Worker processes for tests with several ranks: started once, joined into a gloo group of as many as a call asks for.

They come from multiprocessing's fork server, which has imported torch once, so that a process costs milliseconds. A
group stays until another number of ranks is asked for, and the processes for the tests of one file: a gloo group has a
thread that wakes a hundred times a second, and with hundreds of groups little time would be left for the tests. When a
rank fails the others would wait for it, so all processes are ended and the next call starts new ones: a failure costs a
second, not a group's timeout.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.launch.local import LOOPBACK, worker_environment

Call = tuple[Callable[..., Any], tuple[Any, ...]]
PATIENCE_S = 120.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "fivefold.train.loop",
        "torch._dynamo",  # which FSDP imports at its first use: more than a second of each process
        "tests.ranks",
        "tests.parity.rank",
        "tests.checkpoint.crew",
        "tests.checkpoint.example",
    ]
)

place: list[Any] = []
"""This process's rank, the number of ranks and where they met."""
kept: dict[Any, Any] = {}
"""What a call leaves for later calls in the same group, such as a mesh; forgotten before the group ends."""


class Crew:
    """Up to eight processes. `run` has the first `world` of them call a function together, as one group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = 0
        self.meetings = 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned, by rank. Raises AssertionError with the traceback of the first rank to fail."""
        if world != self.world:
            self._regroup(world)
        return self._ask(world, (function, arguments))

    def close(self) -> None:
        """End the processes, in good order."""
        if self.world:
            self._regroup(0)
        self._end()

    def _regroup(self, world: int) -> None:
        self.meetings += 1
        while len(self.processes) < world:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(len(self.processes), there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        store = str(self.folder / f"meeting{self.meetings}")
        self._ask(max(world, self.world), (_join, (world, store)))
        self.world = world

    def _ask(self, ranks: int, call: Call) -> list[Any]:
        for pipe in self.pipes[:ranks]:
            pipe.send(call)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < ranks:
            waiting = {self.pipes[rank]: rank for rank in range(ranks) if rank not in answers}
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                answers[waiting[pipe]] = self._answer(pipe, waiting[pipe])
            if time.monotonic() > deadline:
                self._end()
                raise AssertionError(f"no answer of ranks {sorted(waiting.values())} in {PATIENCE_S:.0f} s")
        return [answers[rank] for rank in range(ranks)]

    def _answer(self, pipe: Any, rank: int) -> Any:
        try:
            value, error = pipe.recv()
        except EOFError:
            value, error = None, "its process died"
        if error is not None:
            self._end()
            raise AssertionError(f"rank {rank} of {self.world}: {error}")
        return value

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes, self.world = [], [], 0


def run_on_ranks(world: int, calls: Sequence[Call], folder: Path) -> list[list[Any]]:
    """What each call returned, by call and then by rank. Every rank makes all calls, in order, inside one group."""
    with crew(folder) as ranks:
        return [ranks.run(world, function, *arguments) for function, arguments in calls]


@contextmanager
def crew(folder: Path) -> Iterator[Crew]:
    """A crew that is closed at the end."""
    ranks = Crew(folder)
    try:
        yield ranks
    finally:
        ranks.close()


def run_workers(world: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """Run a function in `world` processes that find in their environment what a launcher tells its workers."""
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    workers = [
        context.Process(target=_as_worker, args=(worker_environment(rank, world, meeting), function, arguments))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * world


def _as_worker(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    function(*arguments)


def _work(rank: int, pipe: Connection) -> None:
    """A process's life: it ends with its parent's end of the pipe."""
    torch.set_num_threads(1)
    if loopback := LOOPBACK.get(sys.platform):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            value = _join(rank, *arguments) if function is _join else function(*arguments)
            pipe.send((value, None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _join(rank: int, world: int, store: str) -> None:
    """Leave the group of before and join the one of `world` ranks, if this rank is among them.

    What still refers to the old group goes first: a group that is destroyed under a living FSDP model can abort.
    """
    if dist.is_initialized():
        kept.clear()
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    if rank < world:
        place[:] = [rank, world, store]
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)


def rejoin() -> None:
    """Begin a new group of the same ranks, without what belonged to the old one; a collective call."""
    rank, world, store = place
    _join(rank, world, f"{store}-again")
