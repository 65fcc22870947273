"""Rules on mixtures of experts: how a token's experts are chosen, what balances them, the ranks that share them out.

A layer's experts need not be as many as its tokens, or each get one: an expert, and a rank, without a token is sound.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.keys import default_of
from fivefold.config.rule import Rule, choices, divisors_of, multiples_around, value_of
from fivefold.config.run import Experts, Run


def _moe(run: Run) -> Experts:
    assert run.model.moe is not None, "asked only of a model with experts"
    return run.model.moe


def _of_experts(key: str, off: Any) -> Rule:
    """`key` is `off` unless the model has experts."""
    shown = "null" if off is None else off
    return Rule(
        f"{key} is of experts",
        about=(key, "model.moe"),
        broken=lambda run: run.model.moe is None and value_of(run, key) != off,
        says=lambda run: (
            f"{key} = {value_of(run, key)} is of experts, but model.moe = null: there are none; use {key} {shown}"
        ),
    )


def _fitting_groups(experts: int) -> list[int]:
    """Into how many groups so many experts can be divided, each of two or more."""
    return [groups for groups in divisors_of(experts) if groups == 1 or experts // groups > 1]


def _groups_of_one(run: Run) -> bool:
    """Whether each group has a single expert, of several."""
    return run.model.moe is not None and run.model.moe.groups == run.model.moe.experts > 1


def _sound_groups(run: Run) -> bool:
    """Whether groups are equal, of two or more experts, and as many as are chosen: other rules say it if not."""
    moe = run.model.moe
    if moe is None or _groups_of_one(run):
        return False
    return moe.experts % moe.groups == 0 and moe.top_groups <= moe.groups


def _in_chosen_groups(run: Run) -> int:
    """Experts of the groups that a token's are chosen from."""
    moe = _moe(run)
    return moe.experts // moe.groups * moe.top_groups


def _say_chosen_groups(run: Run) -> str:
    moe, found = _moe(run), _in_chosen_groups(run)
    enough = -(-moe.top_k // (moe.experts // moe.groups))
    more_groups = f"model.moe.top_groups {enough} or more, or " if enough <= moe.groups else ""
    return (
        f"model.moe.top_groups {moe.top_groups} x {moe.experts // moe.groups} experts a group = {found} are fewer than "
        f"model.moe.top_k = {moe.top_k}; use {more_groups}model.moe.top_k {found}{' or less' if found > 1 else ''}"
    )


def _say_dense_layers(run: Run) -> str:
    dense, layers = _moe(run).dense_layers, run.model.layers
    return (
        f"model.moe.dense_layers = {dense} leaves none of model.layers = {layers} for experts; use "
        f"model.moe.dense_layers {layers - 1}{' or less' if layers > 1 else ''}, or model.layers {dense + 1} or more"
    )


def _stage_ranks(run: Run) -> int | None:
    """Ranks that hold the same layers, dp x cp x tp; None while dp is auto."""
    parallel = run.parallel
    return None if parallel.dp == "auto" else parallel.dp * parallel.cp * parallel.tp


def _ep_choices(run: Run, number: int) -> str:
    """The degrees that divide `number`, and as far as they are known the experts and the ranks too."""
    ranks = _stage_ranks(run) or number
    experts = run.model.moe.experts if run.model.moe else number
    return f"parallel.ep {choices([ep for ep in divisors_of(number) if ranks % ep == 0 and experts % ep == 0])}"


def _ep_misfits_ranks(run: Run) -> bool:
    ranks = _stage_ranks(run)
    return run.model.moe is not None and ranks is not None and ranks % run.parallel.ep != 0


def _say_stage_ranks(run: Run) -> str:
    parallel, ranks = run.parallel, _stage_ranks(run)
    assert ranks is not None, "broken only when they are known"
    degrees = f"dp {parallel.dp} x cp {parallel.cp} x tp {parallel.tp} = {ranks}"
    return (
        f"parallel.ep = {parallel.ep} does not divide {degrees}, the ranks that hold the same layers; "
        f"use {_ep_choices(run, ranks)}"
    )


def _has_biases(run: Run) -> bool:
    return run.model.moe is not None and run.model.moe.bias


def _say_no_biases(run: Run) -> str:
    rate = f"routing.bias_rate = {run.routing.bias_rate:g}"
    if run.model.moe is None:
        return f"{rate} is of experts, but model.moe = null: there are none; use routing.bias_rate 0"
    return (
        f"{rate} moves the experts' biases, but model.moe.bias = false: there are none; use model.moe.bias true, or "
        "routing.bias_rate 0"
    )


EXPERTS: tuple[Rule, ...] = (
    Rule(
        "a token's experts are among those there are",
        about=("model.moe.experts", "model.moe.top_k"),
        broken=lambda run: run.model.moe is not None and run.model.moe.top_k > run.model.moe.experts,
        says=lambda run: (
            f"model.moe.top_k = {_moe(run).top_k} is more than model.moe.experts = {_moe(run).experts}; use "
            f"model.moe.top_k {_moe(run).experts} or less, or model.moe.experts {_moe(run).top_k} or more"
        ),
    ),
    Rule(
        "groups divide the experts",
        about=("model.moe.experts", "model.moe.groups"),
        broken=lambda run: run.model.moe is not None and run.model.moe.experts % run.model.moe.groups,
        says=lambda run: (
            f"model.moe.groups = {_moe(run).groups} does not divide model.moe.experts = {_moe(run).experts}; use "
            f"model.moe.groups {choices(_fitting_groups(_moe(run).experts))}, or "
            f"model.moe.experts {choices(multiples_around(_moe(run).experts, _moe(run).groups))}"
        ),
    ),
    Rule(
        "a group has two best experts",
        about=("model.moe.experts", "model.moe.groups"),
        broken=_groups_of_one,
        says=lambda run: (
            f"model.moe.groups = {_moe(run).groups} of model.moe.experts = {_moe(run).experts} have one expert each, "
            "and a group is chosen by its two best scores; "
            f"use model.moe.groups {choices(_fitting_groups(_moe(run).experts))}"
        ),
    ),
    Rule(
        "the chosen groups are among those there are",
        about=("model.moe.groups", "model.moe.top_groups"),
        broken=lambda run: run.model.moe is not None and run.model.moe.top_groups > run.model.moe.groups,
        says=lambda run: (
            f"model.moe.top_groups = {_moe(run).top_groups} is more than model.moe.groups = {_moe(run).groups}; use "
            f"model.moe.top_groups {_moe(run).groups}{' or less' if _moe(run).groups > 1 else ''}"
        ),
    ),
    Rule(
        "the chosen groups have a token's experts",
        about=("model.moe.experts", "model.moe.top_k", "model.moe.groups", "model.moe.top_groups"),
        broken=lambda run: _sound_groups(run) and _in_chosen_groups(run) < min(_moe(run).top_k, _moe(run).experts),
        says=_say_chosen_groups,
    ),
    Rule(
        "experts are gated",
        about=("model.moe", "model.activation"),
        broken=lambda run: run.model.moe is not None and run.model.activation != "swiglu",
        says=lambda run: (
            f"model.activation = {run.model.activation}, but the experts of model.moe are gated; "
            "use model.activation swiglu"
        ),
    ),
    Rule(
        "experts have no biases",
        about=("model.moe", "model.bias"),
        broken=lambda run: run.model.moe is not None and run.model.bias,
        says=lambda run: (
            "model.bias = true, but the experts of model.moe and their router have no biases; use model.bias false "
            "(model.moe.bias is of the choice alone)"
        ),
    ),
    Rule(
        "some layer has experts",
        about=("model.layers", "model.moe.dense_layers"),
        broken=lambda run: run.model.moe is not None and run.model.moe.dense_layers >= run.model.layers,
        says=_say_dense_layers,
    ),
    _of_experts("loss.balance_sequence", 0),
    _of_experts("loss.balance_global", 0),
    _of_experts("loss.router_z", 0),
    _of_experts("routing.capacity_factor", None),
    _of_experts("routing.placement", "fixed"),
    _of_experts("parallel.ep", 1),
    Rule(
        "the rate of biases has biases",
        about=("routing.bias_rate", "model.moe", "model.moe.bias"),
        broken=lambda run: run.routing.bias_rate not in (0, default_of("routing.bias_rate")) and not _has_biases(run),
        says=_say_no_biases,
    ),
    Rule(
        "ep divides the experts",
        about=("model.moe.experts", "parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp"),
        broken=lambda run: run.model.moe is not None and run.model.moe.experts % run.parallel.ep,
        says=lambda run: (
            f"model.moe.experts = {_moe(run).experts} cannot be shared out over parallel.ep = {run.parallel.ep}; use "
            f"{_ep_choices(run, _moe(run).experts)}, or "
            f"model.moe.experts {choices(multiples_around(_moe(run).experts, run.parallel.ep))}"
        ),
    ),
    Rule(
        "ep divides the ranks of a stage",
        about=("model.moe.experts", "parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp"),
        broken=_ep_misfits_ranks,
        says=_say_stage_ranks,
    ),
)
"""What holds within a mixture of experts, and between it and the ranks."""
