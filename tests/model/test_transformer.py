"""The transformer as a whole: every field of the run file's model, packed documents, and life inside FSDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.run import Model, Precision
from fivefold.errors import UserError
from fivefold.kernels.attention import Dense
from fivefold.model.attention import Attention, Context
from fivefold.model.init import initialize
from fivefold.model.spec import parameter_shapes
from fivefold.model.transformer import Transformer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import shard_data_parallel

TINY = Model(layers=2, hidden=48, heads=6, kv_heads=2, head_dim=10, ffn=36, vocab=131, context=64)
BLOOM = {"norm": "layernorm", "activation": "gelu", "bias": True, "position": "alibi", "kv_heads": "auto"}
VARIANTS = {
    "llama": {},
    "llama, tied": {"tied": True},
    "qwen3": {"qk_norm": True},
    "bloom": {**BLOOM, "head_dim": "auto", "embedding_norm": True, "tied": True},
    "rmsnorm with gelu and alibi": {"activation": "gelu", "position": "alibi"},
    "layernorm without bias": {"norm": "layernorm"},
    "rmsnorm with biases": {"bias": True},
    "layernorm with norms of queries and keys": {"norm": "layernorm", "bias": True, "qk_norm": True},
    "embedding norm, untied": {"embedding_norm": True},
}


def variant(name: str) -> Model:
    return TINY.model_copy(update=VARIANTS[name])


def build(model: Model, dtype: torch.dtype = torch.float64) -> Transformer:
    """With random norms and biases, since ones and zeros hide faults."""
    transformer = Transformer(model).to(dtype)
    initialize(dict(transformer.named_parameters()), model.model_copy(update={"init_std": 0.2}), seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in transformer.parameters():
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.3 * noise.to(dtype)
    return transformer


def batch(rows: int = 2, length: int = 24) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 131, (rows, length + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, 4] = -100
    return tokens[:, :-1], labels


def documents(rows: list[list[int]]) -> Tensor:
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(row), dtype=torch.int32), torch.tensor(row)) for row in rows]
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_that_the_spec_counts(name: str) -> None:
    model = variant(name)
    found = {parameter: tuple(tensor.shape) for parameter, tensor in Transformer(model).named_parameters()}
    assert list(found.items()) == list(parameter_shapes(model).items())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_the_sum_of_the_logits_losses_and_every_parameter_gets_its_gradient(name: str) -> None:
    model = build(variant(name))
    tokens, labels = batch()
    loss, logits = model(tokens, labels), model(tokens)
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    loss.backward()
    ours = gradients(model)
    model.zero_grad()
    reference.backward()
    torch.testing.assert_close(ours, gradients(model), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_a_later_one(name: str) -> None:
    model, (tokens, _) = build(variant(name)), batch()
    changed = tokens.clone()
    changed[:, 15:] = 7
    assert torch.equal(model(tokens)[:, :15], model(changed)[:, :15])
    assert not torch.equal(model(tokens)[:, 15:], model(changed)[:, 15:])


@pytest.mark.parametrize("name", ["llama", "qwen3", "bloom"])
def test_a_packed_row_gives_the_logits_of_its_documents_alone(name: str) -> None:
    model, (tokens, _) = build(variant(name)), batch()
    lengths = [[9, 1, 14], [1, 1, 22]]
    together = model(tokens, documents_bs=documents(lengths), packed=True)
    for row, parts in enumerate(lengths):
        alone = [model(part[None])[0] for part in tokens[row].split(parts)]
        torch.testing.assert_close(together[row], torch.cat(alone), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("before", [1, 7, 8, 16, 23])
def test_what_stands_in_the_document_before_changes_no_bit(name: str, before: int, dtype: torch.dtype) -> None:
    """The fault elsewhere: positions restarted, but attention still crossed the boundary."""
    model, (tokens, labels) = build(variant(name), dtype), batch()
    other = [5, 19]  # the second row's boundary lies elsewhere
    split = documents([[before, 24 - before], other])
    losses = []
    for seed in (0, 1):
        changed = tokens.clone()
        changed[0, :before] = torch.randint(0, 131, (before,), generator=torch.Generator().manual_seed(seed))
        changed[1, :5] = torch.randint(0, 131, (5,), generator=torch.Generator().manual_seed(seed))
        logits = model(changed, documents_bs=split, packed=True)
        token_losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        masked = labels.clone()
        masked[0, :before], masked[1, :5] = -100, -100
        losses.append((token_losses[0, before:], token_losses[1, 5:], model(changed, masked, split, True)))
    for first, second in zip(*losses, strict=True):
        assert torch.equal(first, second)


def test_a_tied_weight_gets_the_gradient_of_both_its_uses() -> None:
    tied, untied = build(variant("llama, tied")), build(variant("llama"))
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    for model in (tied, untied):
        model(*batch()).backward()
    parts = gradients(untied)
    expected = parts["embedding.weight"] + parts["head.weight"]
    torch.testing.assert_close(gradients(tied)["embedding.weight"], expected, rtol=1e-12, atol=1e-14)


def test_alibi_goes_on_beyond_the_declared_context() -> None:
    """Trained at 2,048, used at 8,192: nothing is sized by the context."""
    model = variant("bloom").model_copy(update={"layers": 1, "context": 16})
    tokens = torch.randint(0, 131, (1, 80))
    with torch.no_grad():
        assert build(model)(tokens).isfinite().all()


def test_a_vocabulary_that_is_not_known_yet_is_refused() -> None:
    with pytest.raises(UserError, match="vocab is auto"):
        Transformer(TINY.model_copy(update={"vocab": "auto"}))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "bloom", "embedding norm, untied"])
def test_inside_fsdp_the_loss_and_all_gradients_are_the_same(name: str, stage: int, one_rank: Mesh) -> None:
    model = build(variant(name))
    wrapped = copy.deepcopy(model)
    shard_data_parallel(wrapped, one_rank, stage, Precision(compute="fp64"))
    tokens, labels = batch()
    split = documents([[9, 1, 14], [1, 1, 22]])
    losses = []
    for module in (model, wrapped):
        losses.append(module(tokens, labels, split, True))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert gradients(model).keys() == gradients(wrapped).keys()
    torch.testing.assert_close(gradients(wrapped), gradients(model), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_a_model_built_on_meta_and_wrapped_starts_as_one_built_plainly(name: str, one_rank: Mesh) -> None:
    model = variant(name)
    with torch.device("meta"):
        wrapped = Transformer(model)
    shard_data_parallel(wrapped, one_rank, 1, Precision(compute="fp32"))
    wrapped.to_empty(device="cpu")
    plain = Transformer(model)
    initialize(dict(wrapped.named_parameters()), model, seed=5)
    initialize(dict(plain.named_parameters()), model, seed=5)
    for (name, ours), theirs in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    tokens, labels = batch()
    assert torch.equal(wrapped(tokens, labels), plain(tokens, labels))


@pytest.mark.parametrize(("name", "packed"), [("llama", False), ("llama", True), ("bloom", False)])
def test_in_mixed_precision_angles_and_biases_stay_wide(
    name: str, packed: bool, one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP casts a block's arguments to bf16, in which position 300 would have the angle of 299."""
    seen: set[tuple[torch.dtype, ...]] = set()
    forward = Attention.forward

    def watch(self: Attention, x: Tensor, shared: Context) -> Tensor:
        tables = [*(shared.turn or ()), *([shared.mask.bias_bhss] if isinstance(shared.mask, Dense) else [])]
        seen.add((x.dtype, *{table.dtype for table in tables}))
        return forward(self, x, shared)

    monkeypatch.setattr(Attention, "forward", watch)
    model = build(variant(name), torch.float32)
    shard_data_parallel(model, one_rank, 1, Precision(compute="bf16"))
    model(*batch(), documents([[9, 1, 14], [1, 1, 22]]), packed).backward()
    assert seen == {(torch.bfloat16, torch.float32)}
