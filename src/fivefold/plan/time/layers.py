"""How long a layer's forward and backward take on one rank, by part: computation, what is done again, communication.

A communication that runs beside computation hides the fitted share of the shorter of the two; one that does not is
paid whole. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fivefold.config.run import Run
from fivefold.model.reach import goes_by_node, tokens_arriving
from fivefold.parallel.grid import Grid
from fivefold.plan.cluster import Cluster
from fivefold.plan.constants import Constants
from fivefold.plan.software import Software
from fivefold.plan.time.network import Group, Groups, Kind, NetworkConstants, Once, collective_seconds, constants_of
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.work import Communication, Operation, Sizes, Work

HALF = "half"
"""The name among selectively recomputed parts that means every second matrix product of the linear layers."""

FORWARD_AND_BACKWARD = 3
"""Of attention, in forwards: beside a third of both runs the exchange of keys and values in forward."""


@dataclass
class PassTime:
    """Seconds of one microbatch on one rank."""

    forward: float = 0.0
    input: float = 0.0
    """The gradient of the input, with what is computed again for it."""
    weight: float = 0.0
    """The gradients of the weights."""
    parts: dict[str, float] = field(default_factory=dict)
    """By what it is spent on; they sum to the whole."""
    hidden: float = 0.0
    """Seconds of communication that computation hides."""

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input + self.weight

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.input + self.weight

    def add(self, other: PassTime, times: float = 1.0) -> None:
        """Another pass, so often, after this one."""
        self.forward += other.forward * times
        self.input += other.input * times
        self.weight += other.weight * times
        self.hidden += other.hidden * times
        for name, seconds in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds * times


@dataclass
class _Beside:
    """Seconds of a layer's forward beside which an exchange can run."""

    attention: float = 0.0
    """As a third of its forward and backward."""
    shared: float = 0.0
    """Of shared experts."""

    def count(self, operation: Operation, forward: float, third: float) -> None:
        """An operation that takes so long in forward, and so long as a third of all."""
        self.attention += third * (operation.kind == "attention")
        self.shared += forward * operation.name.startswith("shared.")


class LayerTimes:
    """Times the layers of one run on one cluster under one stack."""

    def __init__(self, run: Run, cluster: Cluster, software: Software, constants: Constants) -> None:
        parallel = run.parallel
        assert parallel.dp != "auto", "the ranks are known"
        self.sizes = Sizes.of(run, software)
        self.rates = Rates(run, cluster.accelerator, software, constants)
        shard = parallel.dp // parallel.replicate
        self.groups = Groups.of(Grid(parallel.pp, parallel.replicate, shard, parallel.cp, parallel.tp), parallel.ep)
        self._run, self._cluster, self.software = run, cluster, software
        self._overlap = self.rates.generation.overlap
        self._known: dict[tuple[int, str], PassTime] = {}
        family = self.rates.family
        self._network = constants_of(
            cluster.accelerator, NetworkConstants(link_efficiency=family.link, nic_efficiency=family.nic)
        )

    def seconds(self, kind: Kind, bytes: float, group: Group) -> float:
        """Of a collective."""
        return collective_seconds(kind, bytes, group, self._cluster, self._network)

    def exposed(self, communication: float, computation: float, beside: bool = True) -> float:
        """What is left of a communication's seconds, if they run `beside` so much computation."""
        return communication - self._overlap * min(communication, computation) if beside else communication

    def of(self, work: Work, recompute: str = "none") -> PassTime:
        """A layer's pass, if `recompute` is its mode. Found once for each work, which has to be kept alive."""
        known = self._known.get((id(work), recompute))
        if known is None:
            known = self._known[id(work), recompute] = self._of(work, recompute)
        return known

    def forward(self, work: Work) -> PassTime:
        """A layer's forward, which no backward follows. With ZeRO 3 its weights are gathered before."""
        time, beside = PassTime(), _Beside()
        for operation in work.operations:
            seconds = self.rates.alone(operation)
            time.forward += seconds
            _book(time, _part(operation), seconds)
            beside.count(operation, seconds, seconds)
        computed = time.forward
        for each in work.communications:
            time.forward += self._left(time, each, self._once(each), beside, True)
        if self._run.parallel.zero == 3:
            time.forward += self._hide(time, self._parameters(work, "all-gather", self.sizes.width), computed)
        return time

    def _of(self, work: Work, recompute: str) -> PassTime:
        rates, time = self.rates, PassTime()
        again = 0.0
        beside = _Beside()
        for number, operation in enumerate(work.operations):
            forward = rates.forward(operation)
            input, weight = rates.backward(operation)
            again += forward * self._repeated(operation, number, recompute)
            time.forward += forward
            time.input += input
            time.weight += weight
            _book(time, _part(operation), forward + input + weight)
            beside.count(operation, forward, (forward + input) / FORWARD_AND_BACKWARD)
        accumulated = 2 * (work.parameters + work.experts) * self.software.state.gradients
        if self.software.fused_accumulation:
            added = max(0.0, accumulated / rates.bandwidth - time.weight)
        else:
            added = rates.moving(accumulated)
        time.weight += added
        _book(time, "gradients", added)
        time.input += again
        _book(time, "recompute", again)
        computed = time.forward, time.input + time.weight
        self._communicate(time, work.communications, recompute, beside)
        self._gather(time, work, *computed)
        return time

    def _repeated(self, operation: Operation, number: int, recompute: str) -> float:
        """The share of an operation that backward does again."""
        if recompute == "none":
            return 0.0
        if recompute == "full":
            return 1.0
        selective = self.software.selective
        if operation.part in selective:
            return 1.0
        return 0.5 if HALF in selective and operation.kind == "product" and operation.linear else 0.0

    def _communicate(
        self, time: PassTime, communications: Iterable[Communication], recompute: str, beside: _Beside
    ) -> None:
        for each in communications:
            once, again = self._once(each), float(recompute == "full")
            back = self._once(each._replace(bytes=each.bytes * each.backward)) if each.backward != 1 else once
            time.forward += self._left(time, each, once, beside, True)
            time.input += self._left(time, each, back + again * once, beside, False)

    def _once(self, communication: Communication) -> float:
        group = {"tp": self.groups.tp, "cp": self.groups.cp, "ep": self.groups.ep}[communication.axis]
        once = self._rows_once(communication)
        return collective_seconds(communication.kind, communication.bytes, group, self._cluster, self._network, once)

    def _left(
        self, time: PassTime, communication: Communication, seconds: float, beside: _Beside, forward: bool
    ) -> float:
        """What computation does not hide of a communication in forward or backward; it is booked."""
        left = sum(
            self.exposed(share * seconds, against * (1 if forward else 2), runs_beside)
            for share, runs_beside, against in self._beside(communication, time, beside, forward)
        )
        time.hidden += seconds - left
        _book(time, communication.axis, left)
        return left

    def _beside(
        self, communication: Communication, time: PassTime, beside: _Beside, forward: bool
    ) -> list[tuple[float, bool, float]]:
        """Shares of a communication, whether each runs beside computation, and beside how many seconds of forward's."""
        if communication.axis == "cp":
            return [(1.0, communication.kind != "all-to-all", beside.attention)]
        overlap = self.software.tp_overlap
        if communication.axis == "ep" and communication.name == "dispatch" and self.software.shared_meanwhile:
            return [(1.0, True, beside.shared)]
        if communication.axis == "ep":
            return [(1.0, self.software.ep_overlap, time.forward / 4)]
        if overlap == "backward" and communication.axis == "tp" and not forward:
            return [(0.5, True, time.forward / 4), (0.5, False, 0.0)]
        return [(1.0, overlap == "all", time.forward / 4)]

    def _rows_once(self, communication: Communication) -> Once | None:
        """What is left of the rows for experts, where of several for experts of one node or rank only one travels."""
        moe, ep = self._run.model.moe, self._run.parallel.ep
        if communication.axis != "ep" or moe is None or self.software.ep_once == "choice":
            return None
        nodes, hot = ep / self._cluster.nearby, self.software.hot_experts
        rows = moe.top_k * hot
        of_node = 1 + (hot - 1) / self._cluster.nearby  # if the busiest rank's neighbours are not
        to_node = tokens_arriving(moe, nodes, of_node) / rows if nodes > 1 else 1.0
        if self.software.ep_once == "node":
            return Once(to_node) if nodes > 1 else None
        to_rank = tokens_arriving(moe, ep, hot) / rows
        legs = goes_by_node(moe, ep, self._cluster.nearby)
        return Once(to_node if legs else to_rank, to_rank, in_turns=legs)

    def _gather(self, time: PassTime, work: Work, forward: float, backward: float) -> None:
        """With ZeRO 3 a layer's parameters are gathered before each use; with 2 and 3 its gradients are sent away."""
        zero, reduced, gathered = self._run.parallel.zero, 0.0, 0.0
        if self._run.parallel.pp == 1 and zero >= 2 and self.software.reduces_each_microbatch:
            reduced = self._parameters(work, "reduce-scatter", self.software.state.gradients)
        if zero == 3:
            gathered = self._parameters(work, "all-gather", self.sizes.width)
        time.forward += self._hide(time, gathered, forward)
        left = self._hide(time, gathered + reduced, backward)  # on the same links, beside the same computation
        share = gathered / (gathered + reduced) if left else 0.0
        time.input += left * share
        time.weight += left * (1 - share)

    def _hide(self, time: PassTime, moved: float, computation: float) -> float:
        """What is left of the exchange of parameters and gradients; it is booked."""
        left = self.exposed(moved, computation, self.software.overlaps_gradients)
        time.hidden += moved - left
        _book(time, "zero", left)
        return left

    def _parameters(self, work: Work, kind: Kind, width: float) -> float:
        return self.seconds(kind, work.parameters * width, self.groups.shard) + self.seconds(
            kind, work.experts * width, self.groups.expert_shard
        )


def _book(time: PassTime, part: str, seconds: float) -> None:
    if seconds:
        time.parts[part] = time.parts.get(part, 0.0) + seconds


def _part(operation: Operation) -> str:
    if operation.part == "attention":
        return "attention"
    return {"product": "products", "attention": "attention"}.get(operation.kind, "pointwise")
