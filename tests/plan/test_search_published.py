"""The layouts that three large models were trained with: legal, fitting, as fast as published, and tried by the search.

Each is planned for the software of its time. As a search tries each of them, what it finds is no worse, but for how it
splits the layers (`benchmarks/search.py` runs the searches).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.models import preset_fields
from fivefold.config.rules import LEGALITY, check
from fivefold.config.run import Batch, Data, Model, Parallel, Precision, Recompute, Run, Source
from fivefold.config.run import Cluster as Asked
from fivefold.plan.cluster import cluster_of
from fivefold.plan.memory.peak import memory
from fivefold.plan.search.space import Degrees, degrees, run_of, schedules
from fivefold.plan.software import stack
from fivefold.plan.time.step import step_time


@dataclass(frozen=True)
class Published:
    """A run as its authors tell it."""

    run: Run
    software: str
    seconds: float
    """Of a step, as measured."""


def published(
    preset: str, gpu: str, seq_len: int, batch: Batch, mode: Any, linear: Any = "auto", vocab: int = 0, **parallel: Any
) -> Run:
    gpus = parallel.get("tp", 1) * parallel["pp"] * parallel["dp"]
    return Run(
        name=preset,
        steps=1,
        cluster=Asked(gpu=gpu, gpus=gpus),
        model=Model.model_validate(preset_fields(preset).value | ({"vocab": vocab} if vocab else {})),
        data=Data(train=[Source(path=Path("none"))], seq_len=seq_len),
        batch=batch,
        parallel=Parallel(zero=parallel.pop("zero", 1), **parallel),
        recompute=Recompute(mode=mode),
        precision=Precision(linear=linear),
    )


BLOOM = Published(
    published(
        "bloom-176b", "a100-sxm-80gb", 2048, Batch(global_size=2048, micro_size=2), "full", vocab=250880,
        tp=4, pp=12, dp=8, layers_per_stage=[5, *[6] * 10, 5],
    ),
    "deepspeed-2022",
    104.7,
)  # fmt: skip
LLAMA = Published(
    published(
        "llama-3-405b", "h100", 8192, Batch(global_size=2048, micro_size=1), "none",
        tp=8, pp=16, dp=128, zero=2, schedule="interleaved", chunks=4, layers_per_stage=[1, *[2] * 62, 1],
    ),
    "torchtitan-2024",
    6 * 405.9e9 * 2048 * 8192 / (400e12 * 16384),
)  # fmt: skip
DEEPSEEK = Published(
    published(
        "deepseek-v3", "h800", 4096, Batch(global_size=15360, micro_size=1), "selective", linear="fp8-block",
        pp=16, ep=64, dp=128, schedule="dualpipe-v", chunks=2,
    ),
    "deepseek-2024",
    2.664e6 * 3600 / 2048 / (14.8e12 / (15360 * 4096)),
)  # fmt: skip


@pytest.mark.parametrize("row", [BLOOM, LLAMA, DEEPSEEK], ids=["bloom", "llama", "deepseek"])
def test_a_published_layout_is_legal_fits_and_takes_what_was_measured(row: Published) -> None:
    """Llama 3's 400 TFLOP/s a GPU are taken without attention's; DeepSeek-V3's GPU-hours are of all its tokens."""
    run, on, software = row.run, cluster_of(row.run), stack(row.software)
    assert not check(run, on.gpus, LEGALITY)
    assert memory(run, on, software).fits
    assert step_time(run, on, software).seconds == pytest.approx(row.seconds, rel=0.15)


@pytest.mark.parametrize("row", [BLOOM, LLAMA, DEEPSEEK], ids=["bloom", "llama", "deepseek"])
def test_the_search_tries_the_published_layout_so_that_its_best_is_no_worse(row: Published) -> None:
    run, on, software, parallel = row.run, cluster_of(row.run), stack(row.software), row.run.parallel
    zero = min(parallel.zero, 1) if parallel.pp > 1 else parallel.zero
    layout = Degrees(
        parallel.tp, parallel.cp, parallel.pp, parallel.ep, int(parallel.dp), run.batch.micro_size, zero,
        run.recompute.mode,
    )  # fmt: skip
    assert layout in degrees(run, on)
    schedule = parallel.schedule, parallel.chunks
    assert schedule == ("1f1b", 1) or schedule in schedules(run, layout)
    tried = run_of(run, layout, *schedule)
    assert memory(tried, on, software).fits
    assert step_time(tried, on, software).seconds <= 1.05 * step_time(run, on, software).seconds
