"""Initial weights: the same numbers on every layout, of the right sizes, from the seed and the name alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.config.run import Model
from fivefold.model import init
from fivefold.model.init import fill_normal, initialize
from fivefold.model.transformer import Transformer

MODEL = Model(layers=8, hidden=64, heads=4, ffn=96, vocab=500, bias=True, norm="layernorm", init_std=0.02)

KNOWN = ["-0x1.a2115a2631141p-1", "-0x1.301368bd5141dp+0", "-0x1.aa83a9a4ddedbp-6", "0x1.60a2b4c3ed91cp-2"]


def whole(shape: tuple[int, ...], seed: int = 0, name: str = "w") -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    fill_normal(tensor, 1.0, seed, name)
    return tensor


@pytest.fixture(params=range(6))
def rank_of_six(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of six that are not there; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(12, 4), (7, 5), (2, 3), (1, 9), (13,), (3, 4, 5)])
@pytest.mark.parametrize("dimension", [0, -1])
def test_a_shard_holds_its_part_of_the_whole(rank_of_six: int, shape: tuple[int, ...], dimension: int) -> None:
    """Also uneven shards, and empty ones: 2 rows over 6 ranks."""
    reference = whole(shape)
    mesh = init_device_mesh("cpu", (6,))
    expected = distribute_tensor(reference, mesh, [Shard(dimension % len(shape))], src_data_rank=None)
    found = distribute_tensor(torch.full(shape, 9.0).double(), mesh, expected.placements, src_data_rank=None)
    fill_normal(found, 1.0, 0, "w")
    assert torch.equal(found.to_local(), expected.to_local())


@pytest.mark.parametrize(
    "placements", [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(1))]
)
def test_on_two_dimensions_of_ranks_too(rank_of_six: int, placements: tuple[Shard | Replicate, ...]) -> None:
    reference, mesh = whole((7, 11)), init_device_mesh("cpu", (2, 3))
    expected = distribute_tensor(reference, mesh, placements, src_data_rank=None)
    found = distribute_tensor(torch.zeros(7, 11).double(), mesh, placements, src_data_rank=None)
    fill_normal(found, 1.0, 0, "w")
    assert torch.equal(found.to_local(), expected.to_local())


def test_fsdp_over_tensor_parallel_shards_of_the_same_dimension() -> None:
    """The outer dimension then cuts the inner one's parts, and the global order is strided.

    In a process of its own, since torch remembers the first rank's place in a joined mesh.
    """
    process = mp.get_context("spawn").Process(target=_fill_strided_shard)
    process.start()
    process.join()
    assert process.exitcode == 0


def _fill_strided_shard() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))

    def sharded(values: torch.Tensor) -> DTensor:
        module = nn.Linear(5, 12, bias=False, dtype=torch.float64)
        module.weight = nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)], src_data_rank=None))
        fully_shard(module, mesh=mesh["dp"])
        assert isinstance(module.weight, DTensor)
        return module.weight

    expected, found = sharded(whole((12, 5))), sharded(torch.zeros(12, 5).double())
    assert torch.equal(expected.to_local(), whole((12, 5))[6:8])
    fill_normal(found, 1.0, 0, "w")
    assert torch.equal(found.to_local(), expected.to_local())


@pytest.mark.parametrize("block", [1, 7, 64, 10**6])
def test_the_size_of_a_block_changes_no_number(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = whole((6, 5, 7))
    monkeypatch.setattr(init, "BLOCK", block)
    assert torch.equal(whole((6, 5, 7)), reference)


def test_known_numbers_stay_what_they_are() -> None:
    """A change here changes every run that was ever started."""
    expected = [float.fromhex(number) for number in KNOWN]
    torch.testing.assert_close(
        whole((4,), seed=3, name="layers.0.ffn.down.weight").tolist(), expected, rtol=1e-14, atol=0
    )


def test_narrower_formats_hold_the_same_numbers_rounded() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        narrow = torch.empty(50, 3, dtype=dtype)
        fill_normal(narrow, 1.0, 0, "w")
        assert torch.equal(narrow, whole((50, 3)).to(dtype))


def test_the_numbers_are_normal_and_independent() -> None:
    x = whole((500, 1000)).flatten()
    n = len(x)
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    for lag in (1, 2, 1000):
        assert abs((x[:-lag] * x[lag:]).mean()) < 4 / n**0.5
    within = (x.abs() < 1).double().mean()
    assert abs(within - math.erf(0.5**0.5)) < 4 * (0.25 / n) ** 0.5


def test_another_seed_or_name_gives_unrelated_numbers() -> None:
    x = whole((100, 100))
    for other in (whole((100, 100), seed=1), whole((100, 100), name="v")):
        assert abs((x * other).mean()) < 0.04


def test_sizes_are_by_the_kind_of_parameter() -> None:
    model = Transformer(MODEL)
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    initialize(dict(model.named_parameters()), MODEL, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            expected = 0.02 / (4 if residual else 1)  # sqrt(2 x 8 layers) = 4
            assert abs(parameter.std() / expected - 1) < 0.05, name


def test_the_first_loss_is_that_of_guessing() -> None:
    model = Transformer(MODEL)
    initialize(dict(model.named_parameters()), MODEL, seed=0)
    tokens = torch.randint(0, 500, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert abs(loss / math.log(500) - 1) < 0.02
