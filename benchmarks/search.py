"""How long a layout search takes, and how its best compares with the published layout by the planner's own measure.

    python benchmarks/search.py [bloom] [llama] [deepseek]

Llama 3 405B on 16,384 H100s, BLOOM on 384 A100s, DeepSeek-V3 on 2,048 H800s, each with the published degrees told apart
from the search. Prints seconds of CPU, so that a busy machine does not count.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fivefold.config.models import preset_fields
from fivefold.config.run import Batch, Cluster, Data, Model, Parallel, Recompute, Run, Source
from fivefold.plan.cluster import cluster_of
from fivefold.plan.search.best import search

RUNS = {
    "bloom": ("bloom-176b", {"vocab": 250880}, "a100-sxm-80gb", 384, 2048, Batch(global_size=2048, micro_size=2),
              Parallel(tp=4, pp=12, dp=8), "full"),
    "llama": ("llama-3-405b", {}, "h100", 16384, 8192, Batch(global_size=2048, micro_size=1),
              Parallel(tp=8, pp=16, dp=128, zero=3), "none"),
    "deepseek": ("deepseek-v3", {}, "h800", 2048, 4096, Batch(global_size=15360, micro_size=1),
                 Parallel(pp=16, dp=128, ep=64), "full"),
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:] or RUNS:
        preset, fields, gpu, gpus, seq_len, batch, parallel, mode = RUNS[name]
        run = Run(
            name=name,
            steps=1,
            cluster=Cluster(gpu=gpu, gpus=gpus),
            model=Model.model_validate(preset_fields(preset).value | fields),
            data=Data(train=[Source(path=Path("none"))], seq_len=seq_len),
            batch=batch,
            parallel=parallel,
            recompute=Recompute(mode=mode),
        )
        began = time.process_time()
        found = search(run, cluster_of(run))
        print(f"{name}: {time.process_time() - began:.1f} s of CPU, {found.seconds:.1f} s in all")
        print("\n".join(found.lines()), "\n")


if __name__ == "__main__":
    main()
