"""What each rank of a layout is: where it stands on each axis, whom it works with, which layers its stages have.

Pure arithmetic, so that 16,384 ranks are listed in a blink. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.parallel.grid import AXES, Grid
from fivefold.pipeline.heavy import offloaded_layers
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.pipeline import Outlook
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
    further: int
    """Tokens after the next that are predicted too, on the last stage."""
    ep: int | None
    """Ranks that share out a layer's experts; None if the model has none."""
    offloaded: list[frozenset[int]]
    """Numbers of each stage's layers whose activations wait in CPU memory."""
    pipeline: Outlook | None
    """None with a single stage."""
    groups: list[Group]
    """Those of rank 0, as an example; groups of one rank are left out."""
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """All of it as plain values, every rank included."""
        return {
            "name": self.name,
            "world": self.grid.world,
            "degrees": {"dp": self.grid.dp}
            | dict(zip(AXES, self.grid.sizes, strict=True))
            | ({} if self.ep is None else {"ep": self.ep}),
            "ranks_a_node": self.ranks_a_node,
            "stages": [
                {
                    "stage": stage,
                    "pp": self._holder(stage),
                    "first_layer": layers.start,
                    "layers": len(layers),
                    "offloaded_layers": sorted(self.offloaded[stage]),
                }
                for stage, layers in enumerate(self.stages)
            ],
            "schedule": None if self.pipeline is None else self.pipeline.json(),
            "groups_of_rank_0": {group.axes: group.ranks for group in self.groups},
            "ranks": [self._row(rank) for rank in range(self.grid.world)],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """All of it for a terminal, long tables shortened."""
        return [
            f"run {self.name}: {say_degrees(self.grid)}",
            f"a step has {_count(self.grid.dp, 'share')}, {self.share}",
            *([] if self.ep is None else [say_experts(self.grid, self.ep)]),
            "",
            *long_table_lines(self._stage_head(), self._stage_cells, len(self.stages), "stages"),
            "",
            *([] if self.pipeline is None else self._pipeline_lines(self.pipeline)),
            *(self._group_lines() if self.groups else ["rank 0 works alone"]),
            "",
            *long_table_lines(list(self._row(0)), self._rank_cells, self.grid.world, "ranks"),
            *(f"note: {note}" for note in self.notes),
        ]

    def _row(self, rank: int) -> dict[str, int]:
        node = {} if self.ranks_a_node is None else {"node": rank // self.ranks_a_node}
        experts = {} if self.ep is None else {"ep": rank % self.ep}
        return {"rank": rank} | node | self.grid.role(rank)._asdict() | experts | {"share": self.grid.dp_rank(rank)}

    def _rank_cells(self, rank: int) -> list[str]:
        return [str(value) for value in self._row(rank).values()]

    def _stage_head(self) -> list[str]:
        offloaded = ["offloaded"] if any(self.offloaded) else []
        return ["stage", *(["pp"] if self.pipeline else []), "layers", "numbers", *offloaded, "and"]

    def _stage_cells(self, stage: int) -> list[str]:
        layers, last = self.stages[stage], len(self.stages) - 1
        holder = [str(self._holder(stage))] if self.pipeline else []
        offloaded = [say_numbers(sorted(self.offloaded[stage]))] if any(self.offloaded) else []
        beside = [*(["embedding"] if stage == 0 else []), *(self._last_things() if stage == last else [])]
        return [str(stage), *holder, str(len(layers)), say_numbers(layers), *offloaded, ", ".join(beside)]

    def _last_things(self) -> list[str]:
        """What the last stage has beside its layers."""
        return ["last norm", "head", *([_count(self.further, "further prediction")] if self.further else [])]

    def _holder(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        return 0 if self.pipeline is None else self.pipeline.placement[stage]

    def _pipeline_lines(self, pipeline: Outlook) -> list[str]:
        def cells(rank: int) -> list[str]:
            stages = pipeline.stages_of(rank)
            layers = sum(len(self.stages[stage]) for stage in stages)
            return [str(rank), say_numbers(stages), str(layers), f"{pipeline.peak_activations[rank]:.3g}"]

        head = ("pp", "stages", "layers", "microbatches kept at most")
        return [
            f"schedule {pipeline.line()}",
            "",
            *long_table_lines(head, cells, pipeline.ranks, "pipeline ranks"),
            "",
        ]

    def _group_lines(self) -> list[str]:
        rows = [(group.axes, str(len(group.ranks)), say_numbers(group.ranks), group.does) for group in self.groups]
        return table_lines([("along", "ranks", "that of rank 0", "which together"), *rows])


def ranks(run: Run, grid: Grid, schedule: Schedule | None, notes: tuple[str, ...]) -> Ranks:
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
        stages=stage_layers(run),
        further=run.model.mtp,
        ep=None if run.model.moe is None else run.parallel.ep,
        offloaded=offloaded_layers(run),
        pipeline=None if schedule is None else Outlook.of(schedule),
        groups=[group for group in _groups(run, grid) if len(group.ranks) > 1],
        notes=notes,
    )


def say_degrees(grid: Grid) -> str:
    """The ranks as the product of the degrees."""
    split = f" (replicate {grid.replicate:,} x shard {grid.shard:,})" if grid.replicate > 1 else ""
    degrees = f"pp {grid.pp:,} x dp {grid.dp:,}{split} x cp {grid.cp:,} x tp {grid.tp:,}"
    return f"{_count(grid.world, 'rank')} = {degrees}"


def say_experts(grid: Grid, ep: int) -> str:
    """How the experts lie on the ranks of a stage."""
    replicas = grid.world // grid.pp // ep
    return f"experts over ep {ep:,}, so {_count(replicas, 'replica')} of each"


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
    stage = grid.world // grid.pp
    same = "hold the same experts and sum their gradients" if run.parallel.zero == 0 else "hold a shard each of experts"
    experts = [
        Group("ep", "share out each layer's experts", list(range(run.parallel.ep))),
        Group("expert replica", same, list(range(0, stage, run.parallel.ep))),
    ]
    return [
        group("split each layer's matrices", "tp"),
        group(f"share each sequence ({run.parallel.cp_method})", "cp"),
        *data,
        *(experts if run.model.moe else []),
        group("hold all stages", "pp"),
    ]


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"
