"""From the run file to a model on its ranks: built without memory, wrapped, then given its initial weights."""

from __future__ import annotations

import torch
from torch import nn

from fivefold.config.run import Run
from fivefold.model.family import family
from fivefold.model.hf_import import OnEvent, load_huggingface
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import master_dtype, shard_data_parallel


def build_model(run: Run, mesh: Mesh) -> nn.Module:
    """The model, sharded, on this rank's device; its weights are not set yet."""
    with torch.device("meta"):
        model = family(run.model).build(run.model)
    model.to(master_dtype(run.precision))
    shard_data_parallel(model, mesh, run.parallel.zero, run.precision)
    model.to_empty(device=mesh.device)
    return model.train()


def load_initial_weights(model: nn.Module, run: Run, on_event: OnEvent) -> None:
    """New weights, which depend on the seed but on no layout, or those of the Hugging Face directory of `model.from`.

    Raises UserError if the directory does not hold exactly this model's weights.
    """
    chosen = family(run.model)
    if run.model.weights == "load":
        load_huggingface(model, run.model, chosen.huggingface, on_event)
    else:
        chosen.initialize(model, run.model, run.seed)
