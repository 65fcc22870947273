"""The model on a GPU, with its own kernels, against the same model on a CPU in fp64."""

from __future__ import annotations

import copy

import pytest
import torch

from fivefold.config.run import LatentAttention, Model, RopeScaling
from fivefold.model.init import initialize
from fivefold.model.transformer import Transformer

pytestmark = pytest.mark.gpu
LLAMA = Model(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1003, context=512, init_std=0.05)
BLOOM = LLAMA.model_copy(
    update={
        "family": "bloom",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "position": "alibi",
        "embedding_norm": True,
        "kv_heads": 4,
        "tied": True,
    }
)
MODELS = {
    "llama": LLAMA,
    "qwen3": LLAMA.model_copy(update={"qk_norm": True, "head_dim": 128}),
    "latent attention": LLAMA.model_copy(
        update={
            "kv_heads": "auto",
            "head_dim": "auto",
            "mla": LatentAttention(q_rank=96, kv_rank=64, plain=128, rotated=64, value=128),
            "rope_scaling": RopeScaling(type="yarn", factor=8.0, original_context=64, mscale=1.0, mscale_all_dim=1.0),
        }
    ),
    "bloom": BLOOM,
    "bloom of 6 heads": BLOOM.model_copy(update={"heads": 6, "kv_heads": 6, "hidden": 384}),
}
LENGTH = 300  # no multiple of any block


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels of which a third is left out, and documents with other boundaries in each row."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 1003, (3, LENGTH + 1), generator=generator)
    labels = torch.where(torch.rand(3, LENGTH, generator=generator) < 0.3, -100, rows[:, 1:])
    starts = torch.rand(3, LENGTH, generator=generator) < 0.03
    starts[:, 0] = False
    starts[2] = False
    return rows[:, :-1].contiguous(), labels, starts.cumsum(1).to(torch.int32)


def loss_and_gradients(model: torch.nn.Module, packed: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss and its gradients, brought to the CPU in fp64."""
    device = next(model.parameters()).device
    tokens, labels, documents = (x.to(device) for x in inputs())
    loss = model(tokens, labels, documents, packed) / (labels >= 0).sum()
    loss.backward()
    return loss.item(), {name: p.grad.double().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_gradient"), [(torch.float32, 1e-5, 1e-3), (torch.bfloat16, 3e-3, 0.06)]
)
def test_loss_and_gradients_on_a_gpu_are_those_of_the_cpu(name, packed, dtype, of_loss, of_gradient):
    on_cpu = Transformer(MODELS[name]).double()
    initialize(dict(on_cpu.named_parameters()), MODELS[name], 0)
    on_gpu = copy.deepcopy(on_cpu).to("cuda", dtype)
    expected, gradients = loss_and_gradients(on_cpu, packed)
    loss, found = loss_and_gradients(on_gpu, packed)
    assert loss == pytest.approx(expected, rel=of_loss)
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for key, gradient in gradients.items():
        error = (found[key] - gradient).norm() / torch.maximum(gradient.norm(), 1e-2 * total)
        assert error < of_gradient, f"{key}: {error:.1e}"


def test_initial_weights_on_a_gpu_are_those_of_the_cpu():
    on_cpu, on_gpu = Transformer(LLAMA), Transformer(LLAMA).to("cuda")
    initialize(dict(on_cpu.named_parameters()), LLAMA, 0)
    initialize(dict(on_gpu.named_parameters()), LLAMA, 0)
    for (name, ours), (_, theirs) in zip(on_gpu.named_parameters(), on_cpu.named_parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-6, atol=1e-9, msg=name)
