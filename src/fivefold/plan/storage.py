"""What a run needs of its storage: bytes of checkpoints and of token files, and how fast each must be written and read.

Sizes are in bytes, rates in bytes a second, times in seconds. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fivefold.config.duration import parse_duration
from fivefold.config.run import Run
from fivefold.data.token_bytes import token_bytes
from fivefold.errors import UserError
from fivefold.model.spec import parameters as model_parameters
from fivefold.model.spec import vocabulary
from fivefold.parallel.grid import Grid
from fivefold.pipeline.stage_bytes import master_bytes
from fivefold.plan.cluster import Cluster
from fivefold.plan.goodput.formulas import THREE_TIERS, Tier
from fivefold.plan.quantities import count, formula, not_negative, positive, rate, size, time, whole

STALL_A_GIB = 0.02
"""Seconds that training waits for a GiB of a GPU's part of a checkpoint to be copied to the host; one H200."""
LOAD_A_GIB = 0.6
"""Seconds to load a GiB of a GPU's part, each block proven; one H200, files in memory."""


Saved = Literal["never", "at the end", "on the way"]
"""When checkpoints are written."""


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one checkpoint. It holds global tensors, so no layout changes them."""

    parameters: float
    master: float
    """Bytes a parameter of the weights that the optimizer updates."""
    moments: float
    """Bytes a parameter of what the optimizer keeps beside them."""
    weights: float = 0.0
    """Bytes a parameter of a copy of the weights in the compute format, which some stacks save too."""
    keep: int = 1
    """Checkpoints that stay."""
    saved: Saved = "on the way"

    @property
    def a_parameter(self) -> float:
        """Bytes a parameter."""
        return self.master + self.moments + self.weights

    @property
    def bytes(self) -> float:
        """Of one checkpoint."""
        return self.parameters * self.a_parameter

    @property
    def bytes_kept(self) -> float:
        """On disk while the next one is written: a checkpoint goes only after the new one is whole."""
        return self.bytes * {"never": 0, "at the end": 1, "on the way": self.keep + 1}[self.saved]

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"a_parameter": self.a_parameter, "bytes": self.bytes, "bytes_kept": self.bytes_kept}

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        copy = f" + weights {self.weights:g}" if self.weights else ""
        parts = f"(master {self.master:g} + moments {self.moments:g}{copy}) bytes"
        words, times = {
            "never": ("none is saved", "0"),
            "at the end": ("one at the end", "1"),
            "on the way": ("(kept + the one that is written) x checkpoint", f"({self.keep} + 1)"),
        }[self.saved]
        return [
            formula(
                "checkpoint", "bytes a parameter x parameters", f"{parts} x {count(self.parameters)}", size(self.bytes)
            ),
            formula("checkpoints on disk", words, f"{times} x {size(self.bytes)}", size(self.bytes_kept)),
        ]


def checkpoint_size(
    parameters: float, *, master: float = 4.0, moments: float = 8.0, weights: float = 0.0, keep: int = 1
) -> CheckpointSize:
    """A checkpoint of so many parameters: fp32 master weights and two fp32 moments, unless said otherwise.

    Llama 3 405B then has 4.9 TB, and 5.7 TB with its bf16 weights beside. The 6.5 TB that are often quoted are 16 bytes
    a parameter, with gradients, which nobody saves. Raises UserError for sizes that cannot be.
    """
    positive("the number of parameters", parameters, "parameters")
    for name, value in (("master", master), ("moments", moments), ("weights", weights)):
        not_negative(f"the checkpoint's bytes a parameter of {name}", value, "bytes")
    positive("the checkpoint's bytes a parameter", master + moments + weights, "bytes")
    whole("the number of checkpoints that are kept", keep)
    return CheckpointSize(parameters, master, moments, weights, keep)


@dataclass(frozen=True)
class TokenFiles:
    """Bytes of the token ids on disk, without their index."""

    tokens: float
    bytes_a_token: int

    @property
    def bytes(self) -> float:
        """Of all token files."""
        return self.tokens * self.bytes_a_token

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"bytes": self.bytes}

    def explain(self) -> list[str]:
        """The formula with its numbers."""
        numbers = f"{count(self.tokens)} x {self.bytes_a_token} bytes"
        return [formula("token files", "tokens x bytes a token", numbers, size(self.bytes))]


def token_files(tokens: float, vocabulary_size: int) -> TokenFiles:
    """The files of so many tokens, 2 bytes each if the vocabulary is below 65,500, else 4. Raises UserError for none.

    As `fivefold data build` writes them, and Megatron-LM.
    """
    positive("the number of tokens", tokens, "tokens")
    whole("the vocabulary", vocabulary_size)
    return TokenFiles(tokens, token_bytes(vocabulary_size))


@dataclass(frozen=True)
class TierNeed:
    """What one checkpoint tier asks of the hardware."""

    tier: Tier
    bytes: float
    """Of one checkpoint."""
    gpus: int
    nodes: int

    @property
    def stall_a_gpu(self) -> float:
        """bytes/s at which each GPU's part must leave it while training waits."""
        return self.bytes / self.gpus / self.tier.stall

    @property
    def write_a_node(self) -> float:
        """bytes/s at which each node must store its part, if that may take the whole interval."""
        return self.bytes / self.nodes / self.tier.interval

    @property
    def write(self) -> float:
        """bytes/s of all nodes together: what storage that they share must take."""
        return self.bytes / self.tier.interval

    @property
    def read(self) -> float:
        """bytes/s of all nodes together, to load one in the time that the tier has for it."""
        return self.bytes / self.tier.load if self.tier.load else 0.0

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        names = ("stall_a_gpu", "write_a_node", "write", "read")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        name, tier, whole_one = self.tier.name, self.tier, size(self.bytes)
        lines = [
            formula(
                f"{name}: out of each GPU",
                "checkpoint / GPUs / stall",
                f"{whole_one} / {self.gpus:,} / {time(tier.stall)}",
                rate(self.stall_a_gpu),
            ),
            formula(
                f"{name}: written by each node",
                "checkpoint / nodes / interval",
                f"{whole_one} / {self.nodes:,} / {time(tier.interval)}",
                f"{rate(self.write_a_node)}, {rate(self.write)} in all",
            ),
        ]
        if tier.load:
            numbers = f"{whole_one} / {time(tier.load)}"
            lines.append(formula(f"{name}: read by all", "checkpoint / load", numbers, rate(self.read)))
        return lines


@dataclass(frozen=True)
class LoaderNeed:
    """What the loaders ask of the storage of the token files."""

    tokens_per_s: float
    """That the run trains on."""
    bytes_a_token: int
    readers: int
    """Nodes that read the same token: each has ranks of its own that need it, and one page cache for them."""
    nodes: int

    @property
    def read(self) -> float:
        """bytes/s of all nodes together."""
        return self.tokens_per_s * self.bytes_a_token * self.readers

    @property
    def read_a_node(self) -> float:
        """bytes/s of each node."""
        return self.read / self.nodes

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"read": self.read, "read_a_node": self.read_a_node}

    def explain(self) -> list[str]:
        """The formula with its numbers."""
        numbers = f"{count(self.tokens_per_s)} x {self.bytes_a_token} x {self.readers}"
        value = f"{rate(self.read)}, {rate(self.read_a_node)} a node"
        return [formula("loaders", "tokens/s x bytes a token x nodes that read it", numbers, value)]


@dataclass(frozen=True)
class Storage:
    """All that a run needs of its storage."""

    checkpoint: CheckpointSize
    tokens: TokenFiles
    tiers: tuple[TierNeed, ...]
    loaders: LoaderNeed

    def json(self) -> dict[str, Any]:
        """All of it as plain values; bytes, and bytes/s."""
        return {
            "checkpoint": self.checkpoint.json(),
            "tokens": self.tokens.json(),
            "tiers": [need.json() for need in self.tiers],
            "loaders": self.loaders.json(),
            "basis": {"checkpoint": "exact", "tokens": "exact", "tiers": "assumed", "loaders": "from the step time"},
        }

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        tiers = [line for need in self.tiers for line in need.explain()]
        return [*self.checkpoint.explain(), *self.tokens.explain(), *tiers, *self.loaders.explain()]


def tier_need(tier: Tier, checkpoint: float, gpus: int, nodes: int) -> TierNeed:
    """What a tier of checkpoints of so many bytes needs. Raises UserError for a tier that no hardware could serve."""
    positive("the size of a checkpoint", checkpoint, "bytes")
    whole("the number of GPUs", gpus)
    whole("the number of nodes", nodes)
    if nodes > gpus:
        raise UserError(f"{nodes:,} nodes contradict {gpus:,} GPUs: a node has at least one")
    positive(f"the interval of tier {tier.name}", tier.interval, "seconds")
    positive(f"the stall of tier {tier.name}", tier.stall, "seconds")
    not_negative(f"the load time of tier {tier.name}", tier.load, "seconds")
    return TierNeed(tier, checkpoint, gpus, nodes)


def tier_of(run: Run, cluster: Cluster, step_seconds: float) -> Tier:
    """The run's own checkpoints as the one tier that serves all failures, with steps of so many seconds.

    Stall and load are what this project's checkpoints were measured to take of each GPU's part on one machine
    (docs/checkpoints.md), where storage was not what limited them. Raises UserError for a run that saves at its end
    only.
    """
    positive("the time of a step", step_seconds, "seconds")
    every = run.checkpoint.every
    if every is None or every == "never":
        raise UserError(
            f"checkpoint.every is {every or 'null'}, so nothing is saved before the end and a failure costs the whole "
            "run; give steps or a time, such as 30min"
        )
    interval = parse_duration(every) if isinstance(every, str) else every * step_seconds
    part = _checkpoint_of(run).bytes / cluster.gpus / 2**30
    return Tier("checkpoint", interval, STALL_A_GIB * part, LOAD_A_GIB * part, 1.0)


def storage_of(run: Run, cluster: Cluster, step_seconds: float, tiers: Sequence[Tier] = THREE_TIERS) -> Storage:
    """What a run on a cluster needs, with steps of so many seconds.

    The checkpoint is what this project saves: master weights and two moments, each in the master format. The token
    files are those of one pass over the run's tokens. Raises UserError while model.vocab is auto, and for a step time
    or tiers that cannot be.
    """
    positive("the time of a step", step_seconds, "seconds")
    checkpoint = _checkpoint_of(run)
    a_step = run.batch.global_size * run.data.seq_len
    files = token_files(run.total_steps * a_step, vocabulary(run.model))
    readers = nodes_that_read_a_token(Grid.of(run.parallel, cluster.gpus), cluster.per_node)
    return Storage(
        checkpoint,
        files,
        tuple(tier_need(tier, checkpoint.bytes, cluster.gpus, cluster.nodes) for tier in tiers),
        LoaderNeed(a_step / step_seconds, files.bytes_a_token, readers, cluster.nodes),
    )


def _checkpoint_of(run: Run) -> CheckpointSize:
    """As this project saves it: master weights and two moments, each in the master format."""
    kept = float(master_bytes(run.precision))
    total = model_parameters(run.model).total
    size = checkpoint_size(total, master=kept, moments=2 * kept, keep=run.checkpoint.keep)
    return replace(size, saved=saved(run))


def saved(run: Run) -> Saved:
    """When a run saves its state."""
    every = run.checkpoint.every
    return "at the end" if every is None else "never" if every == "never" else "on the way"


def nodes_that_read_a_token(grid: Grid, per_node: int) -> int:
    """Nodes that have ranks of one share of the batch, which all read its tokens; of the share with the most of them.

    Ranks of a share differ along cp and tp, which are next to each other, and along pp.
    """
    inner = grid.cp * grid.tp

    def nodes_of(share: int) -> int:
        firsts = [(stage * grid.dp + share) * inner for stage in range(grid.pp)]
        return len({node for first in firsts for node in range(first // per_node, (first + inner - 1) // per_node + 1)})

    # Shares behind so many begin at the same places of a node again.
    return max(nodes_of(share) for share in range(min(grid.dp, per_node)))
