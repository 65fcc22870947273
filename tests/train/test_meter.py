"""What ranks read of a step: what one of them asked for, and the figures of experts, right and the same on all."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fivefold.config.run import Data, Experts, Loss, Model, Parallel, Run, Source
from fivefold.model.ledger import Totals
from fivefold.parallel.mesh import mesh_of
from fivefold.parallel.moment import Moment
from fivefold.parallel.stopwatch import Lap
from fivefold.train.meter import Meter
from fivefold.train.progress import Progress
from fivefold.train.reported import choices_by_layer, reported
from fivefold.train.step import StepResult
from tests.ranks import crew


def run_of(**model: object) -> Run:
    """A run of a small model."""
    return Run(
        name="asked",
        steps=1,
        model=Model(**({"layers": 3, "hidden": 4, "heads": 1, "ffn": 4, "vocab": 8} | model)),
        data=Data(train=[Source(path=Path("none"))]),
    )


DENSE = run_of()
SPARSE = run_of(moe=Experts(experts=4, top_k=2, ffn=4, dense_layers=1), mtp=1)


def numbers(*values: object) -> torch.Tensor:
    """A tensor as the ledger's are."""
    return torch.tensor(values, dtype=torch.float64)


def totals(counts: list[list[int]], dropped: list[int], mtp: list[float]) -> Totals:
    """With a balance loss of 0.5 and a z-loss of 0.25."""
    shaped = numbers(*counts).reshape(len(counts), len(counts[0]) if counts else 0)
    return Totals(shaped, numbers(*dropped), numbers(0.5)[0], numbers(0.25)[0], numbers(*mtp))


NOTHING = totals([], [], [])
UNEVEN = totals([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]], [0, 6, 0], [2.5])


def lap(seconds: float) -> Lap:
    """So long."""
    return Lap([(Moment(1.0, None), Moment(1.0 + seconds, None))])


def read(run: Run, step: Totals, by_rank: list[tuple[bool, bool]], waited: Sequence[list[float]] = ()) -> list:
    """What a rank reads of steps, after each rank has asked for its part of `by_rank`; `waited` by step and rank. The
    update takes rank 0 a second more in each step, and rank 1 half of that."""
    mesh = mesh_of(Parallel(), torch.device("cpu"))
    meter = Meter(run, mesh, ["weight"])
    one = torch.ones((), dtype=torch.float64)
    readings = []
    for number, seconds in enumerate([None, *waited], 1):
        if seconds is not None:
            meter.exchange = lap(seconds[mesh.rank])
        result = StepResult(one, one, one[None], step, lap(number / (1 + mesh.rank)))
        readings.append(meter.push(Progress(number, 8, 256), 1e-3, result, asks=by_rank[mesh.rank]))
    return readings


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """Two ranks."""
    with crew(tmp_path_factory.mktemp("meter")) as pair:
        yield pair


def test_what_one_rank_asks_for_all_ranks_read_in_the_same_step(ranks) -> None:
    nothing, stop, save = (False, False), (True, False), (False, True)
    for by_rank in ([nothing, nothing], [nothing, stop], [save, nothing], [stop, save]):
        both = tuple(any(each) for each in zip(*by_rank, strict=True))
        for (reading,) in ranks.run(2, read, DENSE, NOTHING, by_rank):
            assert reading.asked == both
            assert reading.choices == {}
            assert [key for key in reading.record if "loss" in key or "moe" in key] == ["loss"]


def test_the_record_has_the_loads_of_experts_and_who_waited_longest_in_the_step_before(ranks) -> None:
    waited = [[0.25, 0.5], [2.0, 1.0]]
    for first, second, third in ranks.run(2, read, SPARSE, UNEVEN, [(False, False)] * 2, waited):
        assert first.choices == {1: [4, 4, 4, 4], 2: [16, 0, 0, 0], 3: [8, 8, 0, 0]}
        assert first.record["moe_load_max"] == 4.0
        assert first.record["mtp_loss/1"] == 2.5
        assert "moe_exchange_s" not in first.record
        assert (second.record["moe_exchange_s"], third.record["moe_exchange_s"]) == (0.5, 2.0)
        assert "update_s" not in first.record
        assert (second.record["update_s"], third.record["update_s"]) == (1.0, 2.0)


def test_figures_of_experts_are_those_of_the_counts() -> None:
    fields = reported(SPARSE, UNEVEN)
    assert fields == pytest.approx(
        {
            "moe_load_max": 4.0,
            "moe_load_mean": (1 + 4 + 2) / 3,
            "moe_entropy": (1 + 0 + math.log(2) / math.log(4)) / 3,
            "moe_dropped": 6 / 48,
            "mtp_loss/1": 2.5,
        },
        rel=1e-12,
    )


def test_losses_that_the_run_does_not_weigh_are_not_told() -> None:
    weighed = {"balance_sequence": "balance_loss", "balance_global": "balance_loss", "router_z": "z_loss"}
    for key, told in weighed.items():
        run = SPARSE.model_copy(update={"loss": Loss(**{key: 0.01})})
        fields = reported(run, UNEVEN)
        assert {name: fields[name] for name in fields if name in ("balance_loss", "z_loss")} == {
            told: 0.5 if told == "balance_loss" else 0.25
        }
    assert reported(DENSE, NOTHING) == {}


def test_one_expert_is_loaded_evenly() -> None:
    run = run_of(layers=1, moe=Experts(experts=1, top_k=1, ffn=4))
    alone = totals([[64]], [0], [])
    assert reported(run, alone) == {"moe_load_max": 1, "moe_load_mean": 1, "moe_entropy": 1, "moe_dropped": 0}
    assert choices_by_layer(run.model, alone) == {0: [64]}
