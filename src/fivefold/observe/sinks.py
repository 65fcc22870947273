"""Where a run's numbers go beside metrics.jsonl: TensorBoard and Weights & Biases, under the same scalar names.

Both are imported only when a run asks for them. A sink may raise whatever its library raises: the `Observer` then turns
it off, because no chart is worth a training step.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fivefold.config.run import Run
from fivefold.errors import UserError


class Sink(Protocol):
    """Takes the scalars of a step."""

    name: str

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record `scalars` at `step`."""

    def close(self) -> None:
        """Send or write what is still buffered."""


def scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line by the name that charts use: train/NAME, and val_loss/NAME as it is.

    The step is the charts' axis and null values have no point, so both are left out.
    """
    numbers = {key: value for key, value in fields.items() if key != "step" and isinstance(value, int | float)}
    return {key if "/" in key else f"train/{key}": float(value) for key, value in numbers.items()}


def require_sinks(run: Run) -> None:
    """Raise UserError if `run` asks for Weights & Biases and its package is not installed."""
    if run.log.wandb != "off" and find_spec("wandb") is None:
        raise UserError(
            f"log.wandb is {run.log.wandb!r} but the package wandb is not installed: "
            f"pip install 'fivefold[wandb]', or set log.wandb to off"
        )


class TensorBoard:
    """TensorBoard event files in `folder`. A resume hides the points of earlier attempts after `resume_step`."""

    name = "tensorboard"

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One point a name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run whose files lie in `folder`; its id is kept there, so a resume continues the same run.

    WANDB_PROJECT, WANDB_ENTITY and the like are respected; the project is `fivefold` unless that says otherwise.
    """

    name = "wandb"

    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fivefold"),
            name=run.name,
            id=wandb_id(folder),
            resume="allow",
            mode="online" if run.log.wandb == "online" else "offline",
            dir=str(folder),
            config=run.model_dump(mode="json", by_alias=True),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    @property
    def url(self) -> str | None:
        """Where the run is shown; None offline."""
        return self._run.url

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The scalars at `step`; W&B drops a step that it has already, and joins calls of the same step."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Mark the run as finished and wait for its upload."""
        self._run.finish()


def wandb_id(folder: Path) -> str:
    """The id in `folder`, made at the first start. A run that starts anew has a new folder, so another id."""
    file = folder / "id.txt"
    if not file.exists():
        temporary = folder / "id.txt.tmp"
        temporary.write_text(uuid.uuid4().hex[:12])
        temporary.replace(file)
    return file.read_text().strip()
