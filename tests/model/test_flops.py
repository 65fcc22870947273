"""The FLOPs that plans and MFU count are those that torch counts in the models themselves, for every preset.

torch counts attention without its mask, so the whole square is compared and not half of it. The models are built on the
meta device, where nothing is computed: how many rows each expert gets is unknown there, and all go to the first one,
which costs as much. Of each kind of layer a preset has two, since many tell no more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.models import preset_fields, preset_names
from fivefold.config.run import Model
from fivefold.kernels import expert_feed_forward as kernels
from fivefold.model.family import family
from fivefold.model.part import WHOLE
from fivefold.model.spec import attention_flops_per_token, forward_flops_per_token

LENGTH = 64


@pytest.fixture
def rows_to_the_first_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped product of the experts reads on the host where each one's rows end."""

    def product(x_ri: Tensor, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        return x_ri @ weight_eoi[0].T

    monkeypatch.setattr(kernels, "grouped_multiply", product)


@pytest.mark.usefixtures("rows_to_the_first_expert")
@pytest.mark.parametrize("name", preset_names())
def test_a_forward_has_as_many_flops_as_torch_counts(name: str) -> None:
    fields = preset_fields(name).value
    layers = 2 + min(2, fields.get("moe", {}).get("dense_layers", 0))
    moe = {"moe": fields["moe"] | {"dense_layers": layers - 2}} if "moe" in fields else {}
    vocab = 1003 if fields["vocab"] == "auto" else fields["vocab"]
    model = Model.model_validate(fields | moe | {"layers": layers, "vocab": vocab, "mtp": 0})
    with torch.device("meta"):
        built = family(model).build(model, WHOLE).bfloat16()
        tokens_bs = torch.zeros(1, LENGTH, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(tokens_bs)
    unmasked = forward_flops_per_token(model, LENGTH) + attention_flops_per_token(model, LENGTH)
    assert counter.get_total_flops() == LENGTH * (unmasked + filled_up(model))


def filled_up(model: Model) -> int:
    """FLOPs a token of the zeros with which latent attention fills its values up to the width of its keys."""
    if model.mla is None:
        return 0
    return model.layers * 2 * LENGTH * model.heads * (model.mla.plain + model.mla.rotated - model.mla.value)
