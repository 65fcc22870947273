"""How a run is taken to be executed: by which software, how evenly the experts' ranks are loaded, and what a finished
run corrects of it.

A plan takes these for granted and says so; a search asks for the first two for each layout. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fivefold.config.run import Model, Parallel, Run
from fivefold.errors import UserError
from fivefold.plan.cluster import Cluster
from fivefold.plan.memory.peak import Memory, memory
from fivefold.plan.software import Software, fivefold, stack
from fivefold.plan.time.step import StepTime, step_time

if TYPE_CHECKING:
    from fivefold.plan.calibration.residual import Residual

OWN = "fivefold"
"""This project, by its name among the stacks."""


@dataclass(frozen=True)
class Execution:
    """What a plan takes for granted, whatever the layout."""

    stack: str = OWN
    """A key of `software.STACKS`."""
    hot_experts: float = 1.0
    """Rows that the busiest rank of ep gets in a layer, over the mean of its ranks."""
    residual: Residual | None = None
    """A finished run beside its prediction, whose factors correct the plan."""

    def step_time(self, run: Run, cluster: Cluster) -> StepTime:
        """The step of a run, corrected by the finished one. Raises UserError as `time.step_time`."""
        found = step_time(run, cluster, self.software(run.parallel))
        return found if self.residual is None else self.residual.calibration.step(found, run, cluster)

    def memory(self, run: Run, cluster: Cluster) -> Memory:
        """The memory of a run, corrected by the finished one. Raises UserError as `memory.memory`."""
        found = memory(run, cluster, self.software(run.parallel))
        return found if self.residual is None else self.residual.calibration.held(found)

    @property
    def is_own(self) -> bool:
        """Whether this project executes the run."""
        return self.stack == OWN

    def software(self, parallel: Parallel) -> Software:
        """That of a layout. Raises UserError for a stack that does not exist."""
        return self.software_of(parallel.zero, parallel.pp, parallel.ep)

    def software_of(self, zero: int, pp: int, ep: int) -> Software:
        """The same by the degrees that matter. On so few ranks no load is above their number."""
        found = fivefold(zero, pp) if self.is_own else stack(self.stack)
        hot = min(self.hot_experts, ep)
        return found if hot == 1 else replace(found, hot_experts=hot)

    def lines(self) -> list[str]:
        """What of it is not as it would be left unsaid."""
        found = [] if self.is_own else [f"as of the software {self.stack}, not as this project would run it"]
        found += [] if self.residual is None else [self.residual.calibration.line()]
        return found if self.hot_experts == 1 else [*found, self.says_load()]

    def says_software(self) -> str:
        """The stack, its kernels and what it keeps."""
        found = stack(self.stack)
        state = f"{found.state.total:g} bytes of state a parameter"
        return f"software: {self.stack}, kernels of generation {found.generation}, {state}"

    def says_load(self) -> str:
        """How evenly experts are loaded."""
        if self.hot_experts == 1:
            return "experts get equal loads (--hot-experts takes others); the ranks wait for the one with most rows"
        return f"hot experts: in each layer the busiest rank of ep gets {self.hot_experts:g} x the mean of the rows"

    def json(self) -> dict[str, Any]:
        """As plain values."""
        generation = stack(self.stack).generation
        return {"software": {"name": self.stack, "generation": generation}, "hot_experts": self.hot_experts}


OURS = Execution()
"""By this project, experts loaded evenly."""


def execution_of(
    run: Run, software: str | None = None, hot_experts: str | None = None, calibrate: str | None = None
) -> Execution:
    """What the command line says of it: a stack by name, a load as a number or as a run that counted it, and a finished
    run to calibrate with, whose load counts where none is given.

    Raises UserError for what is not known, and as `calibrate.calibrated`.
    """
    name = software or OWN
    stack(name)
    hot, residual = 1.0, None
    if calibrate is not None:
        from fivefold.plan.calibration.calibrate import calibrated, counted_load

        if name != OWN:
            raise UserError(f"a run of this project says nothing of {name}; leave --software or --calibrate out")
        residual = calibrated(run, calibrate)
        hot = counted_load(residual.run, run)
    if hot_experts is not None:
        from fivefold.plan.hot_experts import read_hot_experts

        hot = read_hot_experts(hot_experts, run)
    return Execution(name, hot, residual)


def check_hot_experts(model: Model, ep: int, hot: float) -> None:
    """Raises UserError if the ranks of ep cannot be loaded so unevenly."""
    if hot == 1:
        return
    moe = model.moe
    if moe is None:
        raise UserError(f"hot experts of {hot:g}, but the model has no experts; leave --hot-experts out")
    if ep == 1:
        raise UserError(
            f"hot experts of {hot:g}, but with parallel.ep = 1 every rank has all experts, and none is hotter; leave "
            "--hot-experts out, or give parallel.ep"
        )
    most = ep * min(1.0, moe.experts / ep / moe.top_k)
    if not 1 <= hot <= most:
        raise UserError(
            f"hot experts of {hot:g}: the rows of the busiest rank of parallel.ep = {ep} over the mean are from 1 to "
            f"{most:g}; the most is there if each token sends it as many of its {moe.top_k} choices as it has experts"
        )
