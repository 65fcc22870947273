"""Hugging Face directories read as a run reads them, for tests and for their worker processes: no transformers here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from fivefold.config.huggingface import model_fields, read_config
from fivefold.config.run import Model
from fivefold.model.family import family
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_import import Weights, load_into, open_weights
from fivefold.model.transformer import Transformer
from tests.checkpoint.crew import Team


def read_model(directory: Path) -> Model:
    return Model.model_validate(model_fields(read_config(str(directory))))


def adaptor_of(model: Model) -> HFAdaptor:
    adaptor = family(model).huggingface
    assert adaptor is not None
    return adaptor


def opened(directory: Path, **change) -> Weights:
    """The weights of a directory for the model that its config describes, with some fields changed."""
    model = read_model(directory).model_copy(update=change)
    return open_weights(directory, model, adaptor_of(model))


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a directory whose tensors went through `change(dict)`."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def loaded_by_a_rank(team: Team, directory: Path) -> dict[str, Tensor]:
    """Each tensor as its ranks hold it together, after every rank loaded its own shard into dirty memory."""
    model = read_model(directory)
    module = Transformer(model).bfloat16()
    for number, owner in enumerate(m for m in module.modules() if m._parameters):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            dimension = number % parameter.ndim
            dirty = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            sharded = distribute_tensor(dirty, team.meshes["dp3"], [Shard(dimension)])
            setattr(owner, name, nn.Parameter(sharded))
    weights = opened(directory)
    buffers = {name: buffer.fill_(torch.nan) for name, buffer in module.named_buffers() if name in weights.entries}
    load_into(dict(module.named_parameters()) | buffers, weights)
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()} | buffers
