"""From the run file to a rank's part of the model: built without memory, wrapped, then given its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fivefold.config.run import Experts, Model, Run
from fivefold.errors import UserError
from fivefold.kernels.linear import Deferral
from fivefold.model.family import family
from fivefold.model.hf_import import OnEvent, load_huggingface
from fivefold.model.objective import Objective
from fivefold.model.part import WHOLE, Part
from fivefold.model.reach import goes_by_node
from fivefold.parallel.accumulation import Accumulation
from fivefold.parallel.axis import ALONE, Axis
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import ShardedParameter
from fivefold.parallel.tied import tied_embedding
from fivefold.parallel.zero import (
    DTYPES,
    master_dtype,
    replicas,
    shard_data_parallel,
)
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
    stages = build_stages(run, mesh, schedule.placement, pipelined)
    offloaded = "parameters" in run.offload and mesh.device.type != "cpu"
    accumulations = {
        stage: Accumulation(model, deferral, run.parallel.zero, pipelined, run.precision, offloaded)
        for stage, (model, deferral) in stages.items()
    }
    models = {stage: model for stage, (model, _) in stages.items()}
    boundary = Boundary(run.model.hidden, mesh.tp.size * mesh.cp.size, DTYPES[run.precision.compute], mesh.device)
    tied = tied_embedding(models, schedule.placement, mesh)
    return Pipeline(run.model, models, accumulations, schedule, mesh.pp, boundary, tied)


def build_stages(
    run: Run, mesh: Mesh, placement: Sequence[int], pipelined: bool
) -> dict[int, tuple[nn.Module, Deferral]]:
    """This rank's stages by number, each sharded, on its device or, if the run says so, in CPU memory.

    With each comes what takes the gradients of its large weights: in a pipeline of all, else of those that one rank has
    alone. Their weights are not set yet. Raises UserError if the family cannot be split as the layout asks.
    """
    layers, offloaded = stage_layers(run), offloaded_layers(run)
    mine = [stage for stage, rank in enumerate(placement) if rank == mesh.pp.rank]
    deferrals = {stage: Deferral() for stage in mine}
    parts = {stage: _part(run, mesh, stage, layers, offloaded[stage]) for stage in mine}
    dense = pipelined or replicas(mesh.dense).size() == 1
    spread = None if run.model.moe is None else mesh.experts  # made by all ranks, those with dense layers alone too
    experts = spread is not None and (pipelined or replicas(spread).size() == 1)
    for stage, part in parts.items():
        own = deferrals[stage]
        parts[stage] = replace(part, deferral=own if dense else None, expert_deferral=own if experts else None)
    return {stage: (_build(run, mesh, part), deferrals[stage]) for stage, part in parts.items()}


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
    _renew_buffers(model, mesh.device)
    return model.train()


def empty_model(model: Model, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A whole model, of which nothing is set yet: its parameters in `dtype`, its buffers as in training."""
    with torch.device("meta"):
        built = family(model).build(model, WHOLE)
    built.to(dtype).to_empty(device=device)
    _renew_buffers(built, device)
    return built


def _renew_buffers(model: nn.Module, device: torch.device) -> None:
    """State that is no parameter is small, and changes by little a step: what is a fraction is kept in at least fp32,
    and all of it where the model computes, wherever its parameters are."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            wide = torch.promote_types(buffer.dtype, torch.float32) if buffer.is_floating_point() else buffer.dtype
            setattr(module, name, torch.empty_like(buffer, dtype=wide, device=device))


def _part(run: Run, mesh: Mesh, stage: int, layers: list[range], offloaded: Collection[int]) -> Part:
    """What a stage is of the model, of whose stages `layers` are all, and the ranks that it computes with."""
    return Part(
        layers=None if len(layers) == 1 else layers[stage],
        first=stage == 0,
        last=stage == len(layers) - 1,
        tp=mesh.tp,
        cp=mesh.cp,
        cp_method=run.parallel.cp_method,
        ep=ALONE if run.model.moe is None else mesh.ep,
        ep_legs=_legs(run.model.moe, mesh),
        recompute=run.recompute,
        offload_activations=offloaded,
        objective=Objective.of(run),
    )


def _legs(moe: Experts | None, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes along which tokens travel to their experts, one after the other."""
    if moe is None or mesh.ep.size == 1:
        return ()
    return mesh.ep_by_node if goes_by_node(moe, mesh.ep.size, mesh.ep_near) else (mesh.ep,)


def buffers_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """The state of this rank's stages that is no parameter, by its name in the whole model; on each rank the same."""
    return {name: buffer for stage in sorted(stages) for name, buffer in stages[stage].named_buffers()}


def load_initial_weights(
    parameters: Mapping[str, ShardedParameter], buffers: Mapping[str, Tensor], run: Run, on_event: OnEvent
) -> None:
    """New weights, which depend on the seed but on no layout, or those of the Hugging Face directory of `model.from`.

    Raises UserError if the directory does not hold exactly this model's weights.
    """
    chosen = family(run.model)
    whole = {name: parameter.whole for name, parameter in parameters.items()} | dict(buffers)
    if run.model.weights == "load":
        if buffers:  # no file holds all of them, such as the load that a router remembers
            chosen.initialize(buffers, run.model, run.seed)
        load_huggingface(whole, run.model, chosen.huggingface, on_event)
    else:
        chosen.initialize(whole, run.model, run.seed)
