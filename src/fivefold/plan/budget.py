"""The budget of a model before any layout: what its state weighs, what its training computes, how many GPUs that is.

Textbook arithmetic, to be done on the back of an envelope and here with every step shown; what a layout really takes is
`memory/peak.py` and `time/step.py`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from fivefold.config.run import Precision, Run
from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.model.spec import parameters as model_parameters
from fivefold.model.spec import train_flops_per_token
from fivefold.near import did_you_mean
from fivefold.pipeline.stage_bytes import master_bytes
from fivefold.plan.quantities import (
    HOUR,
    YEAR_HOURS,
    at_least,
    count,
    formula,
    fraction,
    percent,
    positive,
    size,
    whole,
)
from fivefold.plan.software import STATES, StateBytes

TOKENS_A_PARAMETER = 20.0
"""Of a model that is trained with the least compute for its loss (Hoffmann et al. 2022, "Chinchilla")."""
FLOPS_A_PARAMETER = 6.0
"""And a token: 2 forward, 4 backward (Kaplan et al. 2020)."""


MIXED = StateBytes(weights=2, gradients=2, optimizer=12)
"""Mixed-precision Adam, 16 bytes a parameter: weight 2, gradient 2, and in fp32 master weight, momentum and variance 4
each (Rajbhandari et al. 2020, section 3.1). What other stacks keep is `software.STATES`."""


def state_of(precision: Precision) -> StateBytes:
    """What a run of this precision keeps: weight, gradient and both moments in the master format."""
    kept = float(master_bytes(precision))
    return StateBytes(weights=0, gradients=kept, optimizer=3 * kept)


def state_named(stack: str) -> StateBytes:
    """What a software stack keeps (`software.STATES`), or `mixed`. Raises UserError, with a near name, for others."""
    known = {"mixed": MIXED, **STATES}
    if stack not in known:
        raise UserError(
            f"what {stack!r} keeps of a parameter is not known; {did_you_mean(stack, known)}known are "
            f"{', '.join(known)}"
        )
    return known[stack]


def say_state(state: StateBytes) -> str:
    """`16 bytes (weights 2, gradients 2, optimizer 12)`."""
    parts = ", ".join(f"{name} {value:g}" for name, value in asdict(state).items() if value)
    return f"{count(state.total)} bytes ({parts})"


@dataclass(frozen=True)
class TokenCount:
    """How many tokens a model is trained on, and why."""

    tokens: float
    why: str
    """`given`, or the rule with its numbers."""
    basis: str
    """`given` or `assumed`."""


def given_tokens(tokens: float) -> TokenCount:
    """So many. Raises UserError unless they are a number of at least 1."""
    at_least("the number of tokens", tokens, 1, "tokens", "give all of them, such as 15e12")
    return TokenCount(float(tokens), "given", "given")


def optimal_tokens(
    parameters: float, active: float | None = None, a_parameter: float = TOKENS_A_PARAMETER
) -> TokenCount:
    """The compute-optimal number, 20 a parameter that a token meets (Hoffmann et al. 2022).

    `active` are those parameters of a sparse model. The rule was measured on dense models; on the active parameters it
    is a lower bound for sparse ones, and what it would be on all of them is said beside it.
    """
    positive("the number of parameters", parameters, "parameters")
    positive("tokens a parameter", a_parameter, "tokens")
    if active is None or active == parameters:
        why = f"compute-optimal: {count(a_parameter)} a parameter x {count(parameters)} parameters"
        return TokenCount(a_parameter * parameters, why, "assumed")
    _check_active(parameters, active)
    why = (
        f"compute-optimal by active parameters: {count(a_parameter)} x {count(active)} active; by all "
        f"{count(parameters)} it would be {count(a_parameter * parameters)}"
    )
    return TokenCount(a_parameter * active, why, "assumed")


@dataclass(frozen=True)
class Budget:
    """State, work and the GPUs that they are, without any layout."""

    parameters: float
    active: float
    """Parameters that a token meets; of a dense model all."""
    tokens: TokenCount
    state: StateBytes
    flops_a_token: float
    """Forward and backward."""
    flops_words: str
    """How `flops_a_token` comes about."""
    gpu: str
    gpu_memory: float
    """Bytes of one GPU, as it is sold."""
    peak: float
    """FLOP/s of one GPU, dense."""
    efficiency: float
    """The share of the peak that is reached, an assumption here."""

    @property
    def state_bytes(self) -> float:
        """Of the whole model."""
        return self.state.total * self.parameters

    @property
    def state_gpus(self) -> int:
        """GPUs whose memory the state alone fills."""
        return ceil(self.state_bytes / self.gpu_memory * (1 - 1e-12))

    @property
    def flops(self) -> float:
        """Of the whole training."""
        return self.flops_a_token * self.tokens.tokens

    @property
    def gpu_hours(self) -> float:
        """At the efficiency, without any failure."""
        return self.flops / (self.peak * self.efficiency) / HOUR

    @property
    def gpu_years(self) -> float:
        """As `gpu_hours`, in years of 365.25 days."""
        return self.gpu_hours / YEAR_HOURS

    def state_bytes_a_gpu(self, zero: int, ranks: int) -> float:
        """Bytes of state on each of `ranks` GPUs that ZeRO of that stage shards it over, without tp and pp."""
        return zero_bytes(self.state, self.parameters, zero, ranks)

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {
            "state_bytes_a_parameter": self.state.total,
            "state_bytes": self.state_bytes,
            "state_gpus": self.state_gpus,
            "flops": self.flops,
            "gpu_hours": self.gpu_hours,
            "gpu_years": self.gpu_years,
            "basis": {"tokens": self.tokens.basis, "peak": "catalogued", "efficiency": "assumed"},
        }

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        total, tokens = count(self.parameters), count(self.tokens.tokens)
        rate = f"({self.peak:.4g} FLOP/s x {percent(self.efficiency)})"
        return [
            formula(
                "state",
                "bytes a parameter x parameters",
                f"{say_state(self.state)} x {total}",
                size(self.state_bytes),
            ),
            formula(
                f"{self.gpu} that the state fills",
                "state / memory of a GPU",
                f"{size(self.state_bytes)} / {size(self.gpu_memory)}",
                count(self.state_gpus),
            ),
            f"tokens = {tokens}: {self.tokens.why}",
            f"FLOPs a token = {self.flops_words} = {self.flops_a_token:.4g}",
            formula("FLOPs", "FLOPs a token x tokens", f"{self.flops_a_token:.4g} x {tokens}", f"{self.flops:.4g}"),
            formula(
                f"{self.gpu}-years",
                "FLOPs / (peak x efficiency) / seconds of a year",
                f"{self.flops:.4g} / {rate} / {YEAR_HOURS * HOUR:,.0f}",
                f"{self.gpu_years:,.0f}",
            ),
        ]


def budget(
    parameters: float,
    tokens: TokenCount,
    accelerator: Accelerator,
    *,
    active: float | None = None,
    efficiency: float = 0.5,
    number_format: str = "bf16",
    state: StateBytes = MIXED,
) -> Budget:
    """The budget of a model of which only the size is known: 6 FLOPs a parameter and token, attention left out.

    `efficiency` is the share of the peak in `number_format` that is assumed to be reached. Raises UserError for
    a size or share that cannot be, and for a format that the accelerator lacks.
    """
    positive("the number of parameters", parameters, "parameters")
    met = parameters if active is None else active
    _check_active(parameters, met)
    what = "parameters" if active is None else "active parameters"
    words = f"6 x {what} = {count(FLOPS_A_PARAMETER)} x {count(met)}"
    flops = FLOPS_A_PARAMETER * met
    return _budget(parameters, met, tokens, state, flops, words, accelerator, number_format, efficiency)


def budget_of(run: Run, accelerator: Accelerator, *, efficiency: float = 0.5, optimal: bool = False) -> Budget:
    """The budget of a run: its tokens (or, if `optimal`, the compute-optimal number), its precision, and attention.

    FLOPs are by the convention of `model/spec.py`. Raises UserError while model.vocab is auto, and as `budget`.
    """
    counts = model_parameters(run.model)
    a_step = run.batch.global_size * run.data.seq_len
    tokens = optimal_tokens(counts.total, counts.active) if optimal else given_tokens(run.total_steps * a_step)
    words = f"6 x weights that multiply + attention over {run.data.seq_len:,} tokens, causal"
    flops = train_flops_per_token(run.model, run.data.seq_len)
    compute = {"fp64": "fp32"}.get(run.precision.compute, run.precision.compute)
    product = {"auto": compute, "fp4": "fp4"}.get(run.precision.linear, "fp8")
    return _budget(
        counts.total, counts.active, tokens, state_of(run.precision), flops, words, accelerator, product, efficiency
    )


def _budget(
    parameters: float,
    active: float,
    tokens: TokenCount,
    state: StateBytes,
    flops: float,
    words: str,
    accelerator: Accelerator,
    number_format: str,
    efficiency: float,
) -> Budget:
    fraction("the efficiency", efficiency)
    memory, peak = accelerator.nominal_memory, accelerator.peak_of(number_format)
    return Budget(parameters, active, tokens, state, flops, words, accelerator.name, memory, peak, efficiency)


def zero_bytes(state: StateBytes, parameters: float, zero: int, ranks: int) -> float:
    """Bytes of state a GPU with ZeRO of that stage over `ranks` GPUs (Rajbhandari et al. 2020, figure 1).

    Stage 1 shards master weights and moments, 2 gradients too, 3 weights too; what a stack holds beside is whole.
    """
    whole("the number of ranks that shard the state", ranks)
    if zero not in (0, 1, 2, 3):
        raise UserError(f"zero is {zero}; give 0, 1, 2 or 3")
    shards = [ranks if zero >= stage else 1 for stage in (1, 2, 3)]
    parts = (state.optimizer, state.gradients, state.weights)
    return parameters * (state.extra + sum(part / shard for part, shard in zip(parts, shards, strict=True)))


@dataclass(frozen=True)
class MicrobatchNeed:
    """Microbatches a step that keep the bubble of 1f1b at or below a share; F and B alike on all ranks.

    Source: Narayanan et al. 2021, section 2.2: with P ranks, M microbatches and V chunks a rank the idle time is
    (P - 1) / (V M) of the work, and (P - 1) / (V M + P - 1) of the step.
    """

    pp: int
    bubble: float
    chunks: int
    of_work: int
    """If the bubble is counted against the work."""
    of_step: int
    """If it is counted against the whole step, as `fivefold schedule` does."""

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        idle, chunks, bubble = self.pp - 1, self.chunks, f"{self.bubble:g}"
        return [
            formula(
                "microbatches for idle / work",
                "(pp - 1) / (chunks x bubble)",
                f"{idle} / ({chunks} x {bubble})",
                f"{self.of_work:,}",
            ),
            formula(
                "microbatches for idle / step",
                "(pp - 1) (1 - bubble) / (chunks x bubble)",
                f"{idle} x {1 - self.bubble:g} / ({chunks} x {bubble})",
                f"{self.of_step:,}",
            ),
        ]


def microbatches_for(pp: int, bubble: float, chunks: int = 1) -> MicrobatchNeed:
    """How many microbatches a bubble of at most `bubble` needs. Raises UserError for a share of 0 or above 1."""
    whole("parallel.pp", pp)
    whole("parallel.chunks", chunks)
    fraction("the bubble", bubble)
    of_work = (pp - 1) / (chunks * bubble)
    # A product that should be whole may miss it by a rounding error.
    rounded = [max(1, ceil(need * (1 - 1e-12))) for need in (of_work, of_work * (1 - bubble))]
    return MicrobatchNeed(pp, bubble, chunks, *rounded)


def _check_active(parameters: float, active: float) -> None:
    positive("the number of active parameters", active, "parameters")
    if active > parameters:
        raise UserError(
            f"{count(active)} active parameters contradict {count(parameters)} in all: a token meets at most all of "
            "them; exchange the two or correct one"
        )
