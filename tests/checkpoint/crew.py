"""Worker processes for checkpoint tests: four gloo ranks for the tests of a file, and single children to kill.

They come from multiprocessing's fork server, which has imported torch once, so a child costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["fivefold.checkpoint.checkpointer", "tests.checkpoint.crew", "tests.checkpoint.example"]
)


@dataclass
class Team:
    """What a function run by the crew knows of itself: its rank among `size` ranks, their group and meshes by name."""

    rank: int
    size: int
    group: dist.ProcessGroup
    meshes: dict[str, DeviceMesh]


class Crew:
    """`size` processes of one gloo group. `run` has the first `ranks` of them call a function together."""

    def __init__(self, size: int, folder: Path):
        self.size = size
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, str(folder / "store"), there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """What the function returned on each rank. Raises AssertionError with the first traceback."""
        ranks = ranks or self.size
        for pipe in self.pipes[:ranks]:
            pipe.send((function, ranks, arguments))
        outcomes = [pipe.recv() if pipe.poll(60) else (None, "no answer in 60 s") for pipe in self.pipes[:ranks]]
        for rank, (_, error) in enumerate(outcomes):
            assert error is None, f"rank {rank} of {ranks}: {error}"
        return [value for value, _ in outcomes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _work(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    meshes = {f"dp{n}": DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",)) for n in range(1, size + 1)}
    meshes["2x2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
    while (task := pipe.recv()) is not None:
        function, ranks, arguments = task
        try:
            pipe.send((function(Team(rank, ranks, groups[ranks], meshes), *arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()
