"""Running a schedule: this rank's stages compute its list of actions, and exchange with other ranks what these need.

Sends are asynchronous and wait for nobody. A receive is posted one action ahead and waited for just before it is
needed, so transfers run beside computation. Each ordered pair of ranks has a channel of its own, and both sides go
through its messages in the sender's order: nothing can be mixed up, and what the checker found free of circles cannot
stop. Shapes follow from the microbatches, which every rank of the pipeline reads itself, so their lengths may differ.

On a GPU an open transfer is a kernel that spins until the other side is there, and CUDA loads a kernel that is used for
the first time only when nothing runs: the two together can stop all ranks for good. So the first time that microbatches
of a kind come, they travel through CPU memory, and what they use of the GPU is loaded meanwhile.

One stage on one rank is the same with nothing to exchange: forwards and backwards in turn accumulate gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.config.run import Model
from fivefold.errors import RunError
from fivefold.kernels.linear import WaitingGradient
from fivefold.model.ledger import Ledger
from fivefold.model.moe import MoE
from fivefold.parallel.accumulation import Accumulation
from fivefold.parallel.axis import Pending
from fivefold.parallel.links import Links, Sent
from fivefold.parallel.tied import TiedEmbedding
from fivefold.parallel.zero import release_gathered
from fivefold.pipeline.arrivals import Message, receives
from fivefold.pipeline.clock import Clock
from fivefold.pipeline.flow import gives, needs, receiver
from fivefold.pipeline.schedule import Action, Schedule, forward_only

T = TypeVar("T")


class Inputs(Protocol):
    """A microbatch, as `data.loader` has it; the same on every rank of the pipeline."""

    @property
    def tokens(self) -> Tensor:
        """(b, s)."""

    @property
    def labels(self) -> Tensor:
        """(b, s)."""

    @property
    def documents(self) -> Tensor | None:
        """(b, s); None without document masks."""

    @property
    def packed(self) -> bool:
        """Whether some row holds more than one document."""

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""


@dataclass(frozen=True)
class Boundary:
    """What travels between stages: an activation (t, width), and its gradient."""

    width: int
    ranks: int
    """Ranks of tp and cp, which hold equal parts of a microbatch's tokens."""
    dtype: torch.dtype
    device: torch.device

    def shape(self, inputs: Inputs) -> tuple[int, int]:
        """Of this rank's part."""
        return inputs.tokens.numel() // self.ranks, self.width


@dataclass(frozen=True)
class RankSchedule:
    """One rank's part of a schedule."""

    schedule: Schedule
    actions: tuple[Action, ...]
    receives: list[tuple[Message, ...]]
    """What is posted before each action."""

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankSchedule:
        """That of `rank`."""
        return cls(schedule, schedule.actions[rank], receives(schedule, rank))


class Pipeline:
    """This rank's stages of the model, and how they work on the microbatches of a step together with other ranks'."""

    def __init__(
        self,
        model: Model,
        stages: Mapping[int, nn.Module],
        accumulations: Mapping[int, Accumulation],
        schedule: Schedule,
        links: Links,
        boundary: Boundary,
        tied: TiedEmbedding | None = None,
    ) -> None:
        self.model, self.stages, self.accumulations = model, stages, accumulations
        self.schedule, self.links, self.boundary = schedule, links, boundary
        self.tied = tied
        self.routers = {
            module.number: module.router
            for stage in stages.values()
            for module in stage.modules()
            if isinstance(module, MoE)
        }
        """By the number of their layer; their state changes once a step."""
        self._evaluated: dict[int, RankSchedule] = {}
        self._known: set[tuple[bool, torch.Size, bool]] = set()
        self.clock = Clock(boundary.device, self.describe)

    @property
    def reports(self) -> bool:
        """Whether the model has something to report beside the loss, to the ledger that its forward then takes."""
        return self.model.moe is not None or self.model.mtp > 0

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage, and so sees the losses."""
        return self.schedule.placement[-1] == self.links.rank

    def describe(self, action: Action) -> str:
        """An action of this rank and what it waits for, for who wants to know where a pipeline stands still."""
        maker = needs(action, self.schedule.stages)
        source = None if maker is None else self.schedule.placement[maker.stage]
        here = f"pipeline rank {self.links.rank} in {action}"
        return here if source in (None, self.links.rank) else f"{here}, which needs {maker} of pipeline rank {source}"

    @cached_property
    def last_gradients(self) -> frozenset[Action]:
        """Of each stage of this rank, the action that completes its gradients."""
        last = {action.stage: action for action in self.schedule.actions[self.links.rank] if action.kind in "BW"}
        return frozenset(last.values())

    def train(self, microbatches: Sequence[Inputs], ledger: Ledger) -> Tensor:
        """Compute the gradients of the mean loss over all labels; this rank's share of the loss, a scalar in fp64.

        The ledger knows how many labels there are, and takes what the stages have to report. Raises RunError if another
        rank does not deliver.
        """
        for accumulation in self.accumulations.values():
            accumulation.deferral.loss_scale = 1 / ledger.divisor
        loss = _Passage(self, self._own, microbatches, ledger).run()
        if self.tied is not None:
            self.tied.add_gradients()
        return loss

    def renew_copies(self) -> None:
        """Give what stages hold as a copy the value that its owner has now: after each update, and at the start."""
        if self.tied is not None:
            self.tied.share()

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Inputs]) -> Tensor:
        """This rank's share of the sum of the losses, a scalar in fp64, forward only.

        All ranks of the pipeline bring the same microbatches. Raises RunError if another rank does not deliver.
        """
        for model in self.stages.values():
            model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.boundary.device)
        for some in _groups(microbatches, 2 * self.links.size):
            total += _Passage(self, self._forward_only(len(some)), some, None).run()
        for model in self.stages.values():
            release_gathered(model)
            model.train()
        return total

    def all_known(self, microbatches: Iterable[Inputs]) -> bool:
        """Whether all these have come before in their kind (shape, packed or not), in training or in evaluation."""
        kinds = {(torch.is_grad_enabled(), inputs.tokens.shape, inputs.packed) for inputs in microbatches}
        new = kinds - self._known
        self._known |= new
        return not new

    def connect(self) -> None:
        """Use each channel once; a collective call, before the first step."""
        self.links.warm_up(self._channels, self.boundary.device)

    def transfer_seconds(self, inputs: Inputs) -> float:
        """What one microbatch's activation takes from each rank to the next, all at once; a collective call."""
        return min(max(self.links.gather(self._seconds_of_transfers(inputs))) for _ in range(3))

    def _seconds_of_transfers(self, inputs: Inputs) -> float:
        here, boundary = self.links.rank, self.boundary
        shape = boundary.shape(inputs)
        downward = [channel for channel in self._channels if channel[0] < channel[1]]
        start = self.clock.now()
        output = torch.zeros(shape, dtype=boundary.dtype, device=boundary.device)
        transfers: list[Pending | Sent] = [
            self.links.send(output, target)
            if source == here
            else self.links.receive(shape, boundary.dtype, boundary.device, source)
            for source, target in downward
            if here in (source, target)
        ]
        for each in transfers:
            each.wait()
        return self.clock.now() - start

    @cached_property
    def _own(self) -> RankSchedule:
        return RankSchedule.of(self.schedule, self.links.rank)

    def _forward_only(self, microbatches: int) -> RankSchedule:
        if microbatches not in self._evaluated:
            self._evaluated[microbatches] = RankSchedule.of(
                forward_only(self.schedule.placement, microbatches), self.links.rank
            )
        return self._evaluated[microbatches]

    @cached_property
    def _channels(self) -> list[tuple[int, int]]:
        """The ordered pairs of ranks that exchange something, forward or backward."""
        placement = self.schedule.placement
        forward = {(a, b) for a, b in pairwise(placement) if a != b}
        return sorted(forward | {(b, a) for a, b in forward})


class _Passage:
    """One run through a schedule."""

    def __init__(
        self, pipeline: Pipeline, part: RankSchedule, microbatches: Sequence[Inputs], ledger: Ledger | None
    ) -> None:
        """`ledger` is that of a step in training; None to sum up the losses, forward only."""
        self.pipeline, self.part, self.ledger = pipeline, part, ledger
        self.schedule = part.schedule
        self.rank, self.clock = pipeline.links.rank, pipeline.clock
        device = pipeline.boundary.device
        assert len(microbatches) == self.schedule.microbatches, "the schedule is made for the microbatches of a step"
        self.microbatches = [inputs.to(device) for inputs in microbatches]
        self.route = device if pipeline.all_known(microbatches) else torch.device("cpu")
        """Where what travels leaves and arrives."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.given: dict[Action, Tensor | Pending] = {}
        """By maker, what other actions made for this rank's, there or on its way."""
        self.sent: deque[tuple[Sent, Action, int]] = deque()
        """What is on its way, with its maker and the rank that gets it."""
        self.kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        """Of each stage and microbatch between F and I: its input, and where its backward begins. Its output is not
        kept: no gradient needs it, unless autograd says so."""
        self.begun: set[int] = set()
        """Stages that had a backward."""
        self.waiting: dict[tuple[int, int], list[WaitingGradient]] = {}
        """Of each stage and microbatch between I and W."""

    def run(self) -> Tensor:
        """All actions of this rank in order; the sum of its losses, in training over the step's labels."""
        compute = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        for action, messages in zip(self.part.actions, self.part.receives, strict=True):
            for message in messages:
                self._post(message, action)
            compute[action.kind](action)
            while self.sent and self.sent[0][0].done():
                self.sent.popleft()
        for sent, action, target in self.sent:
            self._await(sent, f"pipeline rank {self.rank} sending {action} to pipeline rank {target}")
        if unused := self._unused():
            raise RunError(
                f"the schedule {self.schedule.name} has ended on pipeline rank {self.rank}, and nothing has used what "
                f"{', '.join(unused)} made"
            )
        return self.loss

    def _unused(self) -> list[str]:
        """The actions whose output waits: for another stage, for its backward, for its W."""
        forward = (Action("F", *place) for place in self.kept)
        backward = (Action("I", *place) for place in self.waiting)
        return [str(action) for action in (*self.given, *forward, *backward)]

    def _forward(self, action: Action) -> None:
        _, stage, number = action
        x_td = self._take(action)
        if x_td is not None and torch.is_grad_enabled():
            x_td.requires_grad_()
        inputs = self.microbatches[number]
        arguments: dict[str, Any] = {} if x_td is None else {"x_td": x_td}
        if self.pipeline.reports:
            arguments["ledger"] = self.ledger
        with self.clock.during(action):
            model = self.pipeline.stages[stage]
            out = model(inputs.tokens, inputs.labels, inputs.documents, inputs.packed, **arguments)
            if stage == self.schedule.stages - 1:
                out = out if self.ledger is None else out / self.ledger.divisor
                self.loss += out.detach()
            if torch.is_grad_enabled():
                self.kept[stage, number] = x_td, get_gradient_edge(out)
        self._give(action, out.detach())

    def _backward(self, action: Action) -> None:
        self._go_back(action, ends_step=action in self.pipeline.last_gradients)

    def _input_gradient(self, action: Action) -> None:
        with self.pipeline.accumulations[action.stage].deferral.collect() as collected:
            self._go_back(action, ends_step=False)
        self.waiting[action.stage, action.microbatch] = collected

    def _go_back(self, action: Action, ends_step: bool) -> None:
        _, stage, number = action
        gradient_td = self._take(action) if stage < self.schedule.stages - 1 else None
        x_td, edge = self.kept.pop((stage, number))
        accumulation = self.pipeline.accumulations[stage]
        only = ends_step and stage not in self.begun and accumulation.formats_differ
        self.begun.add(stage)
        accumulation.expect(last=ends_step and not only)
        with self.clock.during(action):
            torch.autograd.backward((edge,), (gradient_td,))
            if only:
                accumulation.compute_and_reduce(())
        if x_td is not None:
            assert x_td.grad is not None, "every stage's output depends on its input"
            self._give(action, x_td.grad)

    def _weight_gradient(self, action: Action) -> None:
        accumulation = self.pipeline.accumulations[action.stage]
        gradients = self.waiting.pop((action.stage, action.microbatch))
        with self.clock.during(action):
            if action in self.pipeline.last_gradients:
                accumulation.compute_and_reduce(gradients)
            else:
                accumulation.compute(gradients)

    def _post(self, message: Message, before: Action) -> None:
        boundary = self.pipeline.boundary
        shape = boundary.shape(self.microbatches[message.action.microbatch])
        try:
            pending = self.pipeline.links.receive(shape, boundary.dtype, self.route, message.source)
        except RuntimeError as error:  # gloo's, if it knows already that the other rank is gone
            asking = f"asking for {message.action} of pipeline rank {message.source}"
            raise _stopped(f"pipeline rank {self.rank} before {before}, {asking}", error) from error
        self.given[gives(message.action)] = pending

    def _give(self, action: Action, output: Tensor) -> None:
        """Hand what an action made to the stage that takes it in, wherever that is."""
        stage = receiver(action, self.schedule.stages)
        if stage is None:
            return
        target = self.schedule.placement[stage]
        if target == self.rank:
            self.given[gives(action)] = output
            return
        try:
            sent = self.pipeline.links.send(output.to(self.route), target)
        except RuntimeError as error:
            raise _stopped(f"pipeline rank {self.rank} sending {action} to pipeline rank {target}", error) from error
        self.sent.append((sent, action, target))

    def _take(self, action: Action) -> Tensor | None:
        """What an action needs of another, waited for; None for the first stage's forward."""
        maker = needs(action, self.schedule.stages)
        if maker is None:
            return None
        given = self.given.pop(maker)
        if isinstance(given, Tensor):
            return given
        arrived = self._await(given, self.pipeline.describe(action))
        return arrived.to(self.pipeline.boundary.device)

    @staticmethod
    def _await(transfer: Pending | Sent, where: str) -> Any:
        try:
            return transfer.wait()
        except RuntimeError as error:
            raise _stopped(where, error) from error


def _stopped(where: str, error: Exception) -> RunError:
    return RunError(f"the pipeline stopped: {where}: {error}")


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(items)
    while group := list(islice(source, size)):
        yield group
