"""What would make a run fit: changes alone and two together, found where recompute by itself is no way out."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.models import preset_fields
from fivefold.config.run import Batch, Cluster, Data, Model, Parallel, Recompute, Run, Source
from fivefold.plan.planned import plan


def published_deepseek(**parallel: object) -> Run:
    """DeepSeek-V3 on 2,048 H800 without recompute, which does not fit in bf16."""
    model = preset_fields("deepseek-v3").value | {"context": 4096, "rope_scaling": None}
    return Run(
        name="deepseek",
        tokens=14.8e12,
        cluster=Cluster(gpu="h800", gpus=2048),
        model=Model.model_validate(model),
        data=Data(train=[Source(path=Path("none"))], seq_len=4096),
        batch=Batch(global_size=15360, micro_size=1),
        parallel=Parallel.model_validate({"pp": 16, "dp": 128, "ep": 64} | parallel),
    )


def kinds(flags: str) -> set[str]:
    """Which kinds of change some flags are; dp follows from the others."""
    return set(flags.split()[::2]) - {"--parallel.dp"}


def test_a_schedule_whose_weight_gradients_wait_is_mended_by_another_with_full_recompute() -> None:
    """Under zb-v what waits for W is not recomputed, so that recompute alone was no remedy, and none was told of it."""
    run = published_deepseek(schedule="zb-v", chunks=2)
    found = plan(run).forecast()
    by_flags = {remedy.flags: remedy for remedy in found.remedies}
    pair = by_flags["--parallel.schedule 1f1b --parallel.chunks 1 --recompute.mode full"]
    assert {"--recompute.mode full", "--recompute.mode selective"}.isdisjoint(by_flags)
    mended = plan(
        run.model_copy(
            update={
                "parallel": run.parallel.model_copy(update={"schedule": "1f1b", "chunks": 1}),
                "recompute": Recompute(mode="full"),
            }
        )
    ).forecast()
    assert (mended.fits, mended.step.seconds) == (True, pair.step_seconds)
    assert pair.line() in (found.too_much() or "")


def test_two_changes_are_told_where_none_is_enough_and_neither_of_them_is() -> None:
    run = published_deepseek(pp=4, dp=512, ep=8)
    remedies = plan(run).forecast().remedies
    assert 1 < len(remedies) <= 6
    assert all(len(kinds(remedy.flags)) == 2 for remedy in remedies), remedies
    assert any("--parallel.ep 32" in remedy.flags for remedy in remedies)
