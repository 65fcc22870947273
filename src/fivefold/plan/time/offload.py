"""What offload adds to a step: copies between a GPU and its CPU's memory, and updates that the CPU makes.

Activations leave beside a stage's forward and come back beside its backward, each way on a copy engine of its own, so
what a pass takes is the longer of the two. Copies run at the rate that `fivefold bench` measured, else at the share of
the datasheet's that it measured on an H200. What the CPU does has the rates of one host of an H200 (16 cores): updates
of 4.54B parameters took 1.46 s, and with the weights in CPU memory, too, another 2.1 s. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.config.run import Run
from fivefold.pipeline.heavy import offloaded_layers
from fivefold.pipeline.layer_bytes import LayerCount
from fivefold.pipeline.of_run import microbatches_of
from fivefold.pipeline.stage_bytes import master_bytes
from fivefold.plan.cluster import Cluster
from fivefold.plan.time.layers import PassTime

OF_THE_LINK = 0.87
"""Share of the datasheet's bytes/s that a copy of pinned memory reaches."""
UPDATE = 87e9
"""bytes/s at which a CPU updates for one GPU: it reads weight, gradient and moments, and writes three of them."""
WEIGHTS = 17e9
"""bytes/s at which weights in CPU memory are gathered on the GPU, and gradients come to them."""


def link_rate(cluster: Cluster) -> float:
    """bytes/s between a GPU and CPU memory in the slower direction; infinite where both are the same memory."""
    accelerator = cluster.accelerator
    if accelerator.measured is not None and accelerator.measured.host:
        return min(accelerator.measured.host.values())
    return accelerator.pcie * OF_THE_LINK or float("inf")


def add_activations(run: Run, cluster: Cluster, passes: Sequence[PassTime]) -> None:
    """Lengthens the stages' passes by what computation does not hide of their activations' way."""
    if not {"activations", "heavy-activations"} & set(run.offload):
        return
    count, rate = LayerCount(run), link_rate(cluster)
    for stage, layers in zip(passes, offloaded_layers(run), strict=True):
        way = sum(map(count.saved, layers)) / rate
        forward, backward = max(0.0, way - stage.forward), max(0.0, way - stage.backward)
        stage.forward += forward
        stage.input += backward
        stage.parts["offload"] = forward + backward


def update_seconds(run: Run, cluster: Cluster, parameters: float) -> float | None:
    """Seconds of updating so many parameters a rank in CPU memory; None if the GPU updates them.

    One parameter's gradient comes while another is updated and the new weights of a third go, so the slowest counts.
    """
    if not {"optimizer", "parameters"} & set(run.offload):
        return None
    piece = parameters * master_bytes(run.precision)
    update = 7 * piece / UPDATE
    if "parameters" not in run.offload:
        return max(update, piece / link_rate(cluster))
    gathers = 2 * microbatches_of(run) if run.parallel.zero == 3 else 1
    return update + (1 + gathers) * piece / WEIGHTS
