"""What each rank of a layout is: where it stands on each axis, whom it works with, which layers its stage has.

Pure arithmetic, so that 16,384 ranks are listed in a blink. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.parallel.grid import AXES, Grid
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.table import long_table_lines, table_lines


@dataclass(frozen=True)
class Group:
    """Ranks that work together."""

    axes: str
    """The axes along which they differ."""
    does: str
    """What they have in common."""
    ranks: list[int]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run."""

    name: str
    grid: Grid
    ranks_a_node: int | None
    """None if the run file does not say."""
    share: str
    """What one share of a step is."""
    stages: list[range]
    """Numbers of each stage's layers."""
    groups: list[Group]
    """Those of rank 0, as an example; groups of one rank are left out."""
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """All of it as plain values, every rank included."""
        return {
            "name": self.name,
            "world": self.grid.world,
            "degrees": {"dp": self.grid.dp} | dict(zip(AXES, self.grid.sizes, strict=True)),
            "ranks_a_node": self.ranks_a_node,
            "stages": [
                {"stage": stage, "first_layer": layers.start, "layers": len(layers)}
                for stage, layers in enumerate(self.stages)
            ],
            "groups_of_rank_0": {group.axes: group.ranks for group in self.groups},
            "ranks": [self._row(rank) for rank in range(self.grid.world)],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """All of it for a terminal, long tables shortened."""
        return [
            f"run {self.name}: {say_degrees(self.grid)}",
            f"a step has {_count(self.grid.dp, 'share')}, {self.share}",
            "",
            *long_table_lines(("stage", "layers", "numbers", "and"), self._stage_cells, len(self.stages), "stages"),
            "",
            *(self._group_lines() if self.groups else ["rank 0 works alone"]),
            "",
            *long_table_lines(list(self._row(0)), self._rank_cells, self.grid.world, "ranks"),
            *(f"note: {note}" for note in self.notes),
        ]

    def _row(self, rank: int) -> dict[str, int]:
        node = {} if self.ranks_a_node is None else {"node": rank // self.ranks_a_node}
        return {"rank": rank} | node | self.grid.role(rank)._asdict() | {"share": self.grid.dp_rank(rank)}

    def _rank_cells(self, rank: int) -> list[str]:
        return [str(value) for value in self._row(rank).values()]

    def _stage_cells(self, stage: int) -> list[str]:
        layers, last = self.stages[stage], len(self.stages) - 1
        beside = [*(["embedding"] if stage == 0 else []), *(["last norm", "head"] if stage == last else [])]
        return [str(stage), str(len(layers)), say_numbers(layers), ", ".join(beside)]

    def _group_lines(self) -> list[str]:
        rows = [(group.axes, str(len(group.ranks)), say_numbers(group.ranks), group.does) for group in self.groups]
        return table_lines([("along", "ranks", "that of rank 0", "which together"), *rows])


def ranks(run: Run, grid: Grid, notes: tuple[str, ...]) -> Ranks:
    """The ranks of a legal run whose world is known.

    Raises UserError if stages are to be balanced while the vocabulary is unknown.
    """
    node, batch = run.cluster.gpus_per_node, run.batch
    sequences = batch.global_size // grid.dp
    micro = sequences // batch.micro_size
    return Ranks(
        name=run.name,
        grid=grid,
        ranks_a_node=None if node == "auto" else node,
        share=f"each {_count(micro, 'microbatch', 'es')} of {_count(batch.micro_size, 'sequence')}",
        stages=stage_layers(run.model, run.parallel),
        groups=[group for group in _groups(run, grid) if len(group.ranks) > 1],
        notes=notes,
    )


def say_degrees(grid: Grid) -> str:
    """The ranks as the product of the degrees."""
    split = f" (replicate {grid.replicate:,} x shard {grid.shard:,})" if grid.replicate > 1 else ""
    degrees = f"pp {grid.pp:,} x dp {grid.dp:,}{split} x cp {grid.cp:,} x tp {grid.tp:,}"
    return f"{_count(grid.world, 'rank')} = {degrees}"


def say_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers in few words: "0 to 7", "0, 8, 16, ..., 1016"."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 5 else [*shown[:3], "...", shown[-1]])


def _groups(run: Run, grid: Grid) -> list[Group]:
    """The groups of rank 0, innermost axis first; those of one rank too."""

    def group(does: str, *axes: str) -> Group:
        return Group(" x ".join(axes), does, grid.peers(0, *axes))

    data = (
        [group("hold the same parameters and sum their gradients", "replicate", "shard", "cp")]
        if run.parallel.zero == 0
        else [
            group("hold a shard each of parameters and optimizer state", "shard", "cp"),
            group("hold the same shard and sum its gradients", "replicate"),
        ]
    )
    return [
        group("split each layer's matrices", "tp"),
        group(f"share each sequence ({run.parallel.cp_method})", "cp"),
        *data,
        group("hold all stages", "pp"),
    ]


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"
