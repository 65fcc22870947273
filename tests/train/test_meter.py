"""What one rank asks for is done by all in the same step: a stop that some ranks do not hear of can only hang."""

from pathlib import Path

import torch

from fivefold.config.run import Data, Model, Parallel, Run, Source
from fivefold.parallel.mesh import mesh_of
from fivefold.train.meter import Meter
from fivefold.train.progress import Progress
from fivefold.train.step import StepResult
from tests.ranks import run_on_ranks

RUN = Run(
    name="asked",
    steps=1,
    model=Model(layers=1, hidden=4, heads=1, ffn=4, vocab=8),
    data=Data(train=[Source(path=Path("none"))]),
)


def asked(by_rank):
    """What a rank reads after each rank has asked for its part of `by_rank`."""
    mesh = mesh_of(Parallel(), torch.device("cpu"))
    one = torch.ones((), dtype=torch.float64)
    return (
        Meter(RUN, mesh, ["weight"])
        .push(Progress(1, 8, 256), 1e-3, StepResult(one, one, one[None]), asks=by_rank[mesh.rank])
        .asked
    )


def test_what_one_rank_asks_for_all_ranks_read_in_the_same_step(tmp_path):
    nothing, stop, save = (False, False), (True, False), (False, True)
    calls = [(asked, (each,)) for each in ([nothing, nothing], [nothing, stop], [save, nothing], [stop, save])]
    assert run_on_ranks(2, calls, tmp_path) == [[each, each] for each in (nothing, stop, save, (True, True))]
