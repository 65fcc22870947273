"""From the run file to a rank's part of the model: built without memory, wrapped, then given its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.model.family import family
from fivefold.model.hf_import import OnEvent, load_huggingface
from fivefold.model.part import Part
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import ShardedParameter
from fivefold.parallel.zero import master_dtype, shard_data_parallel
from fivefold.pipeline.stages import stage_layers


def build_model(run: Run, mesh: Mesh) -> nn.Module:
    """This rank's part of the model, sharded, on its device or, if the run says so, in CPU memory; its weights are not
    set yet.

    Raises UserError if the family cannot be split as the layout asks.
    """
    chosen, part = family(run.model), part_of(run, mesh)
    if not part.plain and not chosen.splits:
        raise UserError(
            f"model.family {chosen.name} can be spread by data parallelism alone; use parallel.tp, parallel.cp and "
            "parallel.pp 1, recompute.mode none, and do not offload activations"
        )
    with torch.device("meta"):
        model = chosen.build(run.model, part)
    model.to(master_dtype(run.precision))
    in_cpu_memory = "parameters" in run.offload
    shard_data_parallel(model, mesh, run.parallel.zero, run.precision, in_cpu_memory)
    model.to_empty(device="cpu" if in_cpu_memory else mesh.device)
    return model.train()


def part_of(run: Run, mesh: Mesh) -> Part:
    """What this rank builds."""
    stages, stage = mesh.grid.pp, mesh.grid.role(mesh.rank).pp
    return Part(
        layers=None if stages == 1 else stage_layers(run.model, run.parallel)[stage],
        first=stage == 0,
        last=stage == stages - 1,
        tp=mesh.tp,
        cp=mesh.cp,
        cp_method=run.parallel.cp_method,
        recompute=run.recompute,
        offload_activations="activations" in run.offload,
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
