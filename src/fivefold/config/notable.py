"""What is legal and should be known: keys that do nothing in this run, and experts that nothing balances.

`fivefold check` and `fivefold plan` say it as notes. A key at its default is never noted. That which is of a part the
model does not have is refused by a rule; what only the layout at hand leaves without effect stands here, since one run
file serves many layouts. Whoever adds a key that some other key can silence adds a row.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.config.keys import default_of
from fivefold.config.ranges import FAMILIES
from fivefold.config.rule import Rule, value_of
from fivefold.config.run import RopeScaling, Run

SCALING_OF = {"original_context": ("llama3", "yarn"), "low_freq_factor": ("llama3",), "high_freq_factor": ("llama3",)}
"""The types of rope scaling that read a key; those not named here are of yarn, but for type and factor."""


def _idle(key: str, reads: tuple[str, ...], silent: Callable[[Run], object], why: Callable[[Run], str]) -> Rule:
    """`key`, which `silent` runs do not read because of the keys that it `reads`; noted unless it has its default."""
    default = default_of(key)
    return Rule(
        f"{key} does something",
        about=(key, *reads),
        broken=lambda run: value_of(run, key) not in (None, default) and silent(run),
        says=lambda run: f"{key} = {value_of(run, key)} does nothing: {why(run)}",
    )


def _one_stage(run: Run) -> bool:
    return run.parallel.pp * run.parallel.chunks == 1


def _of_stages(key: str) -> Rule:
    return _idle(
        key, ("parallel.pp", "parallel.chunks"), _one_stage, lambda run: "with parallel.pp = 1 there is a single stage"
    )


def _of_scaling(key: str) -> Rule:
    types = SCALING_OF.get(key, ("yarn",))
    return _idle(
        f"model.rope_scaling.{key}",
        ("model.rope_scaling.type",),
        lambda run: value_of(run, "model.rope_scaling.type") not in types,
        lambda run: f"it is of {' and '.join(types)}, and type = {value_of(run, 'model.rope_scaling.type')}",
    )


def _of_grouped_attention(key: str) -> Rule:
    return _idle(
        key,
        ("model.mla",),
        lambda run: run.model.mla is not None,
        lambda run: "the heads of model.mla have sizes of their own",
    )


def _of_validation(key: str) -> Rule:
    return _idle(
        key, ("data.validation",), lambda run: not run.data.validation, lambda run: "data.validation has no token set"
    )


def _never_full(run: Run) -> bool:
    """Whether an expert has room for every token of a sequence."""
    moe, factor = run.model.moe, run.routing.capacity_factor
    return moe is not None and factor is not None and factor * moe.top_k >= moe.experts


def _why_nothing_moves(run: Run) -> str | None:
    """Why no expert ever moves, if none does."""
    moe, ep, every = run.model.moe, run.parallel.ep, run.checkpoint.every
    if ep == 1:
        return "it moves experts between the ranks of parallel.ep, which is 1"
    if moe is not None and ep == moe.experts:
        return f"each of parallel.ep = {ep} ranks has one expert of each layer, wherever they lie"
    if moe is not None and ep == moe.groups:
        return f"each of parallel.ep = {ep} ranks has one of model.moe.groups = {ep}, whose experts stay together"
    if moe is not None and moe.top_k == moe.experts:
        return f"model.moe.top_k = {moe.top_k} sends each token to all experts, which are even"
    if every is None or every == "never" or (isinstance(every, int) and every >= run.total_steps):
        return (
            "experts move at checkpoints before the last step, and checkpoint.every = "
            f"{'null' if every is None else every} writes none in {run.total_steps:,} steps"
        )
    return None


IDLE: tuple[Rule, ...] = (
    _of_stages("parallel.schedule"),
    _of_stages("parallel.schedule_memory"),
    _idle(
        "parallel.layers_per_stage",
        ("parallel.pp", "parallel.chunks"),
        lambda run: run.parallel.layers_per_stage == "memory" and _one_stage(run),
        lambda run: "with parallel.pp = 1 there is a single stage",
    ),
    _idle(
        "parallel.zero",
        ("parallel.pp",),
        lambda run: run.parallel.zero == 2 and run.parallel.pp > 1,
        lambda run: f"with parallel.pp = {run.parallel.pp} gradients are reduced once a step, as with 1",
    ),
    _idle(
        "parallel.cp_method",
        ("parallel.cp",),
        lambda run: run.parallel.cp == 1,
        lambda run: "with parallel.cp = 1 no rank shares a sequence",
    ),
    _idle(
        "routing.placement",
        (
            *("parallel.ep", "model.moe.experts", "model.moe.groups", "model.moe.top_k"),
            *("checkpoint.every", "steps", "tokens"),
        ),
        _why_nothing_moves,
        lambda run: _why_nothing_moves(run) or "",
    ),
    _idle(
        "routing.capacity_factor",
        ("model.moe.experts", "model.moe.top_k"),
        _never_full,
        lambda run: (
            f"so many times an even share, {value_of(run, 'model.moe.top_k')} / {value_of(run, 'model.moe.experts')} "
            "of a sequence's tokens, is all of them"
        ),
    ),
    _idle(
        "optim.final_lr_fraction",
        ("optim.decay",),
        lambda run: run.optim.decay == "constant",
        lambda run: "optim.decay = constant ends as it began",
    ),
    _of_validation("validate.every"),
    _of_validation("validate.tokens"),
    _of_grouped_attention("model.kv_heads"),
    _of_grouped_attention("model.head_dim"),
    _idle(
        "model.rope_theta",
        ("model.position",),
        lambda run: run.model.position != "rope",
        lambda run: f"model.position = {run.model.position} turns nothing",
    ),
    *(
        _of_scaling(key)
        for key in RopeScaling.model_fields
        if key not in ("type", "factor", "mscale", "mscale_all_dim")
    ),
    _idle(
        "model.options",
        ("model.family",),
        lambda run: run.model.family in FAMILIES,
        lambda run: f"it is for a family of your own, and {run.model.family} is built in",
    ),
)
"""Keys that do nothing in a run."""


def _unbalanced(run: Run) -> bool:
    """Whether nothing keeps the choice of experts even; where each token goes to all of them nothing has to."""
    moe, loss = run.model.moe, run.loss
    if moe is None or moe.top_k >= moe.experts:
        return False
    return not (loss.balance_sequence or loss.balance_global or (moe.bias and run.routing.bias_rate))


def _say_unbalanced(run: Run) -> str:
    moe = run.model.moe
    assert moe is not None, "asked only of a model with experts"
    bias = f"model.moe.bias = {str(moe.bias).lower()}"
    why = "routing.bias_rate = 0 leaves model.moe.bias as it is" if moe.bias else f"{bias} gives them no bias"
    way = "routing.bias_rate 0.001"
    if not moe.bias:
        way = "model.moe.bias true (which Mixtral and Qwen3-MoE have no format for)"
    return (
        f"nothing balances the {moe.experts} experts: loss.balance_sequence and loss.balance_global are 0, and {why}; "
        "few of them may come to get most of the tokens. Use loss.balance_global 0.01 (as Switch Transformers), or "
        f"{way}"
    )


def _constant_gates(run: Run) -> bool:
    moe = run.model.moe
    return moe is not None and moe.top_k == 1 < moe.experts and moe.normalize


NOTABLE: tuple[Rule, ...] = (
    *IDLE,
    Rule(
        "what is predicted beyond the next token is trained",
        about=("model.mtp", "loss.mtp"),
        broken=lambda run: run.model.mtp and not run.loss.mtp,
        says=lambda run: (
            f"model.mtp = {run.model.mtp} predicts further tokens, but loss.mtp = 0 trains none of it; use model.mtp "
            "0, or loss.mtp above 0"
        ),
    ),
    Rule(
        "something balances the experts",
        about=(
            *("model.moe.experts", "model.moe.top_k", "model.moe.bias", "routing.bias_rate"),
            *("loss.balance_sequence", "loss.balance_global"),
        ),
        broken=_unbalanced,
        says=_say_unbalanced,
    ),
    Rule(
        "the router learns from what its experts give",
        about=("model.moe.experts", "model.moe.top_k", "model.moe.normalize"),
        broken=_constant_gates,
        says=lambda run: (
            "model.moe.normalize with model.moe.top_k = 1 makes every gate 1, so the router learns nothing from the "
            "tokens that it sends; use model.moe.normalize false"
        ),
    ),
)
"""What should be known of a legal run."""


def notes_on(run: Run) -> tuple[str, ...]:
    """A sentence for each row that applies to a legal run."""
    return tuple(rule.says(run) for rule in NOTABLE if rule.broken(run))
