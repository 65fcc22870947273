"""How a stack keeps weights, gradients and optimizer state on a rank, and what of them comes and goes during a step.

Two kinds. FSDP (ours, torchtitan, MosaicML) keeps pieces of the master weights, gathers each unit in the compute format
and reduces a unit's gradients where its backward ends. Buffers (Megatron, DeepSpeed) are there all the time: weights in
16 bits and gradients, as they are accumulated, with master weights and moments cut by ZeRO. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fivefold.config.run import Run
from fivefold.pipeline.layer_bytes import BYTES
from fivefold.pipeline.of_run import microbatches_of
from fivefold.pipeline.stage_bytes import master_bytes, reduce_bytes
from fivefold.plan.memory.shards import NOTHING, Held, Parts, Shards
from fivefold.plan.software import Software

Bytes = dict[str, float]
"""By category."""
COUNT = 4
"""Bytes in which the optimizer counts the steps of a parameter."""


@dataclass(frozen=True)
class Moment:
    """Where a rank is in its step, as far as state depends on it. Units are a stage's parts in forward order."""

    unit: int
    """Which unit of the stage is in its backward (behind the last one: the loss is computed)."""
    first: bool
    """Whether no backward of the stage came before in this step."""
    last: bool
    """Whether none comes after it."""


class State(Protocol):
    """What a stage's parameters take."""

    def always(self, parts: Parts) -> Bytes:
        """All the time."""

    def between(self, parts: Parts, begun: bool, over: bool) -> Bytes:
        """Beside that, while another stage works: before or after the stage's first and last backward."""

    def during(self, parts: Parts, moment: Moment) -> Bytes:
        """Beside that, while one of its units is in its backward."""

    def head_gradient(self, parts: Parts, first: bool) -> float:
        """Of the head's weight, while the loss is computed, if no earlier microbatch has left a sum of them."""


def state_of(run: Run, software: Software) -> State:
    """The kind of a stack: FSDP if it gathers what it computes with."""
    if software.state.weights == 0:
        return Fsdp(run, software, own=software.name == "fivefold")
    return Buffers(run, software)


class Fsdp:
    """Fully sharded data parallelism, also with fewer stages of ZeRO or on one rank (parallel/zero.py)."""

    def __init__(self, run: Run, software: Software, own: bool) -> None:
        parallel, precision = run.parallel, run.precision
        shards = Shards(run)
        self._zero, self._offload = parallel.zero, run.offload
        self._compute, self._reduce = BYTES[precision.compute], reduce_bytes(precision)
        self._master = master_bytes(precision)
        self._moments = 2 * (self._master if precision.moments == "auto" else BYTES[precision.moments])
        pipelined = parallel.pp * parallel.chunks > 1
        accumulates = microbatches_of(run) > 1
        assert parallel.dp != "auto", "the ranks are known"
        replicas = parallel.dp * parallel.cp
        expert_replicas = max(1, replicas * parallel.tp // parallel.ep)
        in_place = own and self._reduce == self._master and "parameters" not in run.offload
        self._alone = (in_place and replicas == 1, in_place and expert_replicas == 1)
        """Whether gradients are added up where the optimizer takes them: dense, experts."""
        self._through_step = pipelined or (parallel.zero < 2 and accumulates)
        """Whether gradients that are not reduced yet live through the step."""
        self._buffer = replicas > 1 and shards.dense > 1
        """Whether units are gathered into a buffer that is copied out."""

    def always(self, parts: Parts) -> Bytes:
        """The rank's pieces."""
        held = parts.all
        here = 0 if "parameters" in self._offload else held.piece
        moments = (held.piece - held.copies) * self._moments + held.tensors * COUNT
        elsewhere = bool({"parameters", "optimizer"} & set(self._offload))
        return {"weights": here * self._master, "optimizer": 0.0 if elsewhere else moments}

    def between(self, parts: Parts, begun: bool, over: bool) -> Bytes:
        """Gathered weights until the last backward, and the sum of the gradients."""
        gathered = 0.0 if self._zero == 3 or over else parts.all.whole * self._compute
        if not begun:
            return {"gathered_weights": gathered}
        elsewhere = over or not self._through_step
        return {
            "gathered_weights": gathered,
            "gradients": self._summed(parts.all) + (self._reduced(parts.all) if elsewhere else 0.0),
            "unreduced_gradients": self._unreduced(parts.all) if self._through_step and not over else 0.0,
        }

    def during(self, parts: Parts, moment: Moment) -> Bytes:
        """What is gathered, what is summed, and the gradients of the unit and of the one that is being reduced."""
        unit = moment.unit
        behind, early = parts.since(unit + 1), parts.begun_before(unit)
        begun = parts.since(unit) + early if moment.first else parts.all
        sending = self._unreduced(parts.one(unit + 1))
        if self._through_step:
            reduced = behind if moment.last else NOTHING
            waits = self._unreduced(begun) - self._unreduced(reduced) + sending * moment.last
        else:
            reduced = behind if moment.first else parts.all
            waits = max(sending, self._ending(parts.one(unit))) + self._compute * self._elsewhere(early)
        return {
            "gathered_weights": self._gathered(parts, moment) * self._compute,
            "gradients": self._summed(begun) + self._reduced(reduced),
            "unreduced_gradients": waits,
            "communication": parts.units[-1].dense * self._compute * (self._buffer and self._zero < 3),
        }

    def head_gradient(self, parts: Parts, first: bool) -> float:
        """It is made with the loss, in at least fp32 unless it goes to a sum."""
        head = parts.units[-1].dense + parts.tied.dense
        if self._alone[0] or self._through_step:
            return head * self._reduce * first
        return head * max(4, self._reduce)

    def _gathered(self, parts: Parts, moment: Moment) -> float:
        """Elements: with ZeRO 3 the unit, the next one and a table that the head needs too, else all, in a step's last
        backward those that it has yet to come to."""
        here = min(moment.unit, len(parts.units) - 1)
        if self._zero == 3:
            throughout = parts.tied.whole if here > 1 else 0.0
            return (parts.before(here + 1) - parts.before(max(0, here - 1))).whole + throughout
        return (parts.before(here + 1) if moment.last else parts.all).whole

    def _summed(self, held: Held) -> float:
        """Gradients that are added up where the optimizer takes them."""
        return self._master * sum(piece for alone, piece in self._pieces(held) if alone)

    def _reduced(self, held: Held) -> float:
        """The pieces of other gradients, once they are reduced; in CPU memory if the parameters are."""
        return (
            self._master * sum(p for alone, p in self._pieces(held) if not alone) * ("parameters" not in self._offload)
        )

    def _pieces(self, held: Held) -> Iterator[tuple[bool, float]]:
        return zip(self._alone, (held.dense_piece, held.experts_piece), strict=True)

    def _unreduced(self, held: Held) -> float:
        """Whole gradients of what is not added up in place, as they are reduced."""
        return self._reduce * self._elsewhere(held)

    def _ending(self, held: Held) -> float:
        """At the end of a unit's backward: its gradients in the compute format, and the copy that is reduced."""
        return (self._compute + self._reduce) * self._elsewhere(held)

    def _elsewhere(self, held: Held) -> float:
        return sum(w for alone, w in zip(self._alone, (held.dense, held.experts), strict=True) if not alone)


class Buffers:
    """16-bit weights and a gradient buffer that are there all the time; ZeRO cuts the optimizer's part, then those."""

    def __init__(self, run: Run, software: Software) -> None:
        self._state, self._zero = software.state, run.parallel.zero
        self._compute = BYTES[run.precision.compute]

    def always(self, parts: Parts) -> Bytes:
        """All of it."""
        held, state = parts.all, self._state
        gradients = held.piece if self._zero >= 2 else held.whole
        weights = held.piece if self._zero >= 3 else held.whole
        return {
            "weights": weights * state.weights,
            "gradients": gradients * state.gradients,
            "optimizer": (held.piece - held.copies) * state.optimizer,
            "unaccounted_state": held.whole * state.extra,
        }

    def between(self, parts: Parts, begun: bool, over: bool) -> Bytes:
        """Nothing comes or goes."""
        return {}

    def during(self, parts: Parts, moment: Moment) -> Bytes:
        """With ZeRO 3 two units at a time, with ZeRO 2 and 3 the gradients of one."""
        if self._zero < 2:
            return {}
        here = min(moment.unit, len(parts.units) - 1)
        near = (parts.before(here + 1) - parts.before(max(0, here - 1))).whole if self._zero == 3 else 0.0
        own = parts.one(here).whole * self._state.gradients
        return {"gathered_weights": near * self._compute, "unreduced_gradients": own}

    def head_gradient(self, parts: Parts, first: bool) -> float:
        """Its buffer is there."""
        return 0.0
