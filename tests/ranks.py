"""Functions run together by the ranks of a gloo group: one set of processes for as many calls as a test module has."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fivefold.launch.local import worker_environment

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def run_on_ranks(world: int, calls: Sequence[Call], folder: Path) -> list[list[Any]]:
    """What each call returned, by call and then by rank. Every rank makes all calls, in order, inside one group."""
    (folder / "calls").write_bytes(pickle.dumps(list(calls)))
    command = [sys.executable, "-m", "tests.ranks", str(folder)]
    workers = [
        subprocess.Popen(command, env=worker_environment(rank, world, folder / "meeting")) for rank in range(world)
    ]
    assert [worker.wait() for worker in workers] == [0] * world
    by_rank = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def _work(folder: Path) -> None:
    import torch

    from fivefold.config.run import Parallel
    from fivefold.parallel.mesh import connect

    torch.set_num_threads(1)
    with connect(Parallel()) as mesh:
        results = [function(*arguments) for function, arguments in pickle.loads((folder / "calls").read_bytes())]
        (folder / f"rank{mesh.rank}").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
