"""From the run file to a rank's part of the model: built without memory, wrapped, then given its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.kernels.linear import Deferral
from fivefold.model.family import family
from fivefold.model.hf_import import OnEvent, load_huggingface
from fivefold.model.part import Part
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import ShardedParameter
from fivefold.parallel.tied import tied_embedding
from fivefold.parallel.zero import DTYPES, Accumulation, master_dtype, shard_data_parallel
from fivefold.pipeline.execute import Boundary, Pipeline
from fivefold.pipeline.heavy import offloaded_layers
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.stages import stage_layers


def build_pipeline(run: Run, mesh: Mesh) -> Pipeline:
    """This rank's stages and the schedule by which they work, of a run whose ranks are known; a collective call.

    Their weights are not set yet. Raises UserError if the schedule cannot run, or if the family cannot be split as the
    layout asks.
    """
    schedule = schedule_of_run(run)
    pipelined = schedule.stages > 1 or schedule.splits
    deferrals = {stage: Deferral() for stage in range(schedule.stages)} if pipelined else {}
    stages = build_stages(run, mesh, schedule.placement, deferrals)
    accumulations = {
        stage: Accumulation(model, deferrals.get(stage), run.parallel.zero, pipelined, run.precision)
        for stage, model in stages.items()
    }
    boundary = Boundary(run.model.hidden, mesh.tp.size * mesh.cp.size, DTYPES[run.precision.compute], mesh.device)
    tied = tied_embedding(stages, schedule.placement, mesh)
    return Pipeline(stages, accumulations, schedule, mesh.pp, boundary, tied)


def build_stages(
    run: Run, mesh: Mesh, placement: Sequence[int], deferrals: Mapping[int, Deferral] = MappingProxyType({})
) -> dict[int, nn.Module]:
    """This rank's stages by number, each sharded, on its device or, if the run says so, in CPU memory.

    Their weights are not set yet. Raises UserError if the family cannot be split as the layout asks.
    """
    layers, offloaded = stage_layers(run), offloaded_layers(run)
    return {
        stage: _build(run, mesh, _part(run, mesh, stage, layers, offloaded[stage], deferrals.get(stage)))
        for stage, rank in enumerate(placement)
        if rank == mesh.pp.rank
    }


def _build(run: Run, mesh: Mesh, part: Part) -> nn.Module:
    chosen = family(run.model)
    if not part.plain and not chosen.splits:
        raise UserError(
            f"model.family {chosen.name} can be spread by data parallelism alone; use parallel.tp, parallel.cp, "
            "parallel.pp and parallel.chunks 1, recompute.mode none, and do not offload activations"
        )
    with torch.device("meta"):
        model = chosen.build(run.model, part)
    model.to(master_dtype(run.precision))
    in_cpu_memory = "parameters" in run.offload
    shard_data_parallel(model, mesh, run.parallel.zero, run.precision, in_cpu_memory)
    model.to_empty(device="cpu" if in_cpu_memory else mesh.device)
    return model.train()


def _part(
    run: Run, mesh: Mesh, stage: int, layers: list[range], offloaded: Collection[int], deferral: Deferral | None
) -> Part:
    """What a stage is of the model, of whose stages `layers` are all, and the ranks that it computes with."""
    return Part(
        layers=None if len(layers) == 1 else layers[stage],
        first=stage == 0,
        last=stage == len(layers) - 1,
        tp=mesh.tp,
        cp=mesh.cp,
        cp_method=run.parallel.cp_method,
        recompute=run.recompute,
        offload_activations=offloaded,
        deferral=deferral,
    )


def load_initial_weights(parameters: Mapping[str, ShardedParameter], run: Run, on_event: OnEvent) -> None:
    """New weights, which depend on the seed but on no layout, or those of the Hugging Face directory of `model.from`.

    Raises UserError if the directory does not hold exactly this model's weights.
    """
    chosen = family(run.model)
    whole = {name: parameter.whole for name, parameter in parameters.items()}
    if run.model.weights == "load":
        load_huggingface(whole, run.model, chosen.huggingface, on_event)
    else:
        chosen.initialize(whole, run.model, run.seed)
