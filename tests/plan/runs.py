"""Run files of the tests of this room: the largest published layout, and a small model on any layout."""

from __future__ import annotations

from typing import Any

from fivefold.config.models import preset_fields
from fivefold.config.run import Batch, Cluster, Data, Model, Parallel, Run, Source

SMALL = Model(layers=5, hidden=48, heads=12, kv_heads=4, head_dim=8, ffn=80, vocab=1003)


def small_run(model: Model = SMALL, gpus: int | str = "auto", seq_len: int = 64, **parallel: Any) -> Run:
    """The small model on a layout; the batch fits every dp up to 8."""
    return Run(
        name="small",
        steps=1,
        cluster=Cluster(gpus=gpus),  # type: ignore[arg-type]
        model=model,
        data=Data(train=[Source(path="none")], seq_len=seq_len),  # type: ignore[arg-type]
        batch=Batch(global_size=48, micro_size=2),
        parallel=Parallel(**parallel),
    )


def llama_405b(**parallel: Any) -> Run:
    """Llama 3 405B on 16,384 GPUs, as its authors trained it but for the batch."""
    return Run(
        name="llama-405b",
        steps=1,
        cluster=Cluster(gpus_per_node=8),
        model=Model.model_validate(preset_fields("llama-3-405b").value),
        data=Data(train=[Source(path="none")], seq_len=8192),  # type: ignore[arg-type]
        batch=Batch(global_size=2048, micro_size=1),
        parallel=Parallel(**({"tp": 8, "pp": 16, "dp": 128} | parallel)),
    )
