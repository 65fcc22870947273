"""What a start of a run is told beside the run file. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.errors import UserError


@dataclass(frozen=True)
class TrainOptions:
    """How to start. All of it concerns this start only; what is computed stands in the run file."""

    stop_after: int | None = None
    """Stop, and save, after this many optimizer steps of this start; the learning rate stays that of the whole run."""
    nproc: int | None = None
    """Local workers; None is one a GPU, or one."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto goes on from the newest checkpoint if there is one, never refuses to, must refuses to start from nothing."""
    restart: bool = False
    """Move the folder of an earlier run of this name aside and start from nothing."""
    fork: str | None = None
    """Start a new run of this name from the newest checkpoint of the run that the file names."""
    launcher: Literal["auto", "local", "env", "slurm"] = "auto"
    """Whether to start workers here or to be one."""

    def __post_init__(self) -> None:
        if self.restart and self.fork is not None:
            raise UserError(
                "--restart and --fork exclude each other: one puts the old run aside, the other goes on from it"
            )
        if self.restart and self.resume == "must":
            raise UserError("--restart and --resume must exclude each other: after one there is nothing to go on from")
