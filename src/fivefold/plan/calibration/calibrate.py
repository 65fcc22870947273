"""From a finished run to the factors that it gives: the run is planned as it ran, and what is left over is booked.

A run knows the time of its steps, of the updates of its weights, of exchanges between experts, and of one step of a
pipeline; all else of a step is one unknown. It is booked on computation, whose factor then makes the parts sum to the
measured step. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.catalogue import by_driver_name, by_name, is_driven_as
from fivefold.hardware.local import local_accelerator
from fivefold.observe.events import CPU
from fivefold.observe.observer import EVENTS
from fivefold.plan.calibration.factors import COMPUTATION, ENDS, ESTIMATED, Calibration, Factor, identity, links_of
from fivefold.plan.calibration.measured import RunMeasured, read_run
from fivefold.plan.calibration.residual import Residual, parts_measured, terms_of
from fivefold.plan.cluster import cluster_of
from fivefold.plan.execution import Execution
from fivefold.plan.hot_experts import load_counted
from fivefold.plan.memory.peak import GIB, Memory, memory
from fivefold.plan.planned import plan
from fivefold.plan.quantities import percent, time
from fivefold.plan.time.step import StepTime, step_time

FAR = 2.0
"""A factor of computation beyond which the formulas do not describe the run."""


def calibrated(asked: Run, text: str) -> Residual:
    """The run that `text` names, a folder or a name in `runs`, beside its prediction on the accelerator of `asked`.

    Raises UserError if it is no run, has trained too little, ran on another accelerator, or cannot be planned.
    """
    found = read_run(text)
    named = _named(asked, found)
    target = by_name(named)
    _check_device(found, target)
    cluster_asked = found.run.cluster.model_copy(update={"gpu": named})
    run = plan(found.run.model_copy(update={"cluster": cluster_asked})).run
    cluster, hot = cluster_of(run), counted_load(found, run)
    software = Execution(hot_experts=hot).software(run.parallel)
    step, held = step_time(run, cluster, software), memory(run, cluster, software)
    parts, of_parts = part_factors(found, step)
    factor, of_memory = memory_factor(found, held)
    calibration = Calibration(found.name, parts, factor, links_of(run, cluster), identity(run), hot)
    terms = tuple(terms_of(run, found, step, held))
    asked = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"gpu": named})})
    notes = (*of_parts, *of_memory, *_left_out(calibration, asked))
    return Residual(found, target.name, terms, calibration, notes, named)


def _left_out(calibration: Calibration, asked: Run) -> Iterator[str]:
    """Of each factor that does not count for the plan itself, that it does not."""
    for part, ranks in (("ep", asked.parallel.ep), ("transfer", asked.parallel.pp)):
        if part in calibration.parts and ranks > 1 and not calibration.joined_alike(part, asked, cluster_of(asked)):
            yield (
                f"{part} stays as predicted in the plan: its ranks are joined otherwise than those of "
                f"{calibration.name}, whose factor was {calibration.parts[part].value:.3f}"
            )


def counted_load(found: RunMeasured, run: Run) -> float:
    """The load of the busiest rank of ep that the run counted, for a run with this layout; 1 if it counted none."""
    mine, theirs = run.model.moe, found.run.model.moe
    if mine is None or theirs is None or mine.experts != theirs.experts or run.parallel.ep == 1:
        return 1.0
    load = load_counted(found.folder, run)
    return 1.0 if load is None else load


def _named(asked: Run, found: RunMeasured) -> str:
    """The accelerator of a plan: the run file's, that of this machine, or the one that the measured run ran on."""
    if asked.cluster.gpu != "auto":
        return asked.cluster.gpu
    known = local_accelerator() or (by_driver_name(found.device) if found.device else None)
    if known is None and found.run.cluster.gpu == "auto":
        ran = f"{found.folder} ran on {found.device or 'none that it names'}"
        file = ", a file that `fivefold bench` wrote" if found.device == CPU else ""
        raise UserError(f"which GPU the plan is for is not known, and {ran}; give --gpu NAME (cluster.gpu){file}")
    return known.name if known else found.run.cluster.gpu


def _check_device(found: RunMeasured, target: Accelerator) -> None:
    """Raises UserError if the run did not run on `target`."""
    device, gpu = found.device, found.run.cluster.gpu
    if device is None and gpu == "auto":
        raise UserError(
            f"nothing in {found.folder} says what it ran on: the start in its {EVENTS} names no device, and its run "
            "file has cluster.gpu = auto; write the accelerator there, such as cluster: {gpu: h100}"
        )
    if device is None:
        same = by_name(gpu).name.removesuffix("-measured") == target.name.removesuffix("-measured")
    else:
        same = target.family == "CPU" if device == CPU else is_driven_as(target, device)
    if same:
        return
    if device == CPU:
        raise UserError(
            f"{found.folder} ran on a CPU, whose speed says nothing of {target.name}; calibrate with a run on "
            f"{target.name}, or plan for the CPU: `fivefold bench --out cpu.yaml`, and --gpu cpu.yaml"
        )
    raise UserError(
        f"{found.folder} ran on {device or gpu}, and the plan is for {target.name}: factors hold for one accelerator; "
        f"calibrate with a run on {target.name}, or plan for the other"
    )


def part_factors(found: RunMeasured, step: StepTime) -> tuple[dict[str, Factor], list[str]]:
    """Of the parts of a step, and what is to be said of them; none if they would leave computation no time."""
    parts = step.parts
    own = parts_measured(found, step)
    factors = {
        name: Factor(seconds / parts[name], f"{seconds:.4g} s / {parts[name]:.4g} s") for name, seconds in own.items()
    }
    sent = found.pipeline.transfer_s if found.pipeline is not None else 0.0
    if sent and step.hop:
        factors["transfer"] = Factor(sent / step.hop, f"{sent:.4g} s / {step.hop:.4g} s")
    measured = found.step_seconds
    value = _computation(parts, factors, measured)
    if value <= 0:
        return {}, [
            "the time of a step stays as predicted: what is not computation, or was measured by itself, comes to more "
            f"than the measured {time(measured)}, which leaves nothing for computation"
        ]
    notes = []
    if not 1 / FAR < value < FAR:
        notes.append(
            f"computation took {value:.3g} x what is predicted: small operations, a slow host, or something that the "
            "formulas do not know; for another size the factor may be another"
        )
    unknown = [
        name for name, seconds in parts.items() if seconds and name not in (*COMPUTATION, *factors) and name != "bubble"
    ]
    if unknown:
        seconds = sum(parts[name] for name in unknown)
        twice = max(0.0, _computation(parts, factors, measured, others=2.0))
        notes.append(
            f"{', '.join(unknown)} not measured apart: as predicted, {time(seconds)} or "
            f"{percent(seconds / step.seconds)} of the predicted step; if that took twice as long, the factor of "
            f"computation would be {twice:.3f}"
        )
    return {"computation": Factor(value, _how(parts, factors, measured))} | factors, notes


def _computation(
    parts: Mapping[str, float], factors: Mapping[str, Factor], measured: float, others: float = 1.0
) -> float:
    """The factor of computation with which the parts sum to the measured step, idle time in proportion to what ranks
    wait for; what is no computation and has no factor takes `others` times as long as predicted."""
    unknown = {name: seconds for name, seconds in parts.items() if name in COMPUTATION and name not in factors}
    known = {
        name: seconds * (factors[name].value if name in factors else others)
        for name, seconds in parts.items()
        if name not in unknown and name != "bubble"
    }
    within = sum(seconds for name, seconds in parts.items() if name not in (*ENDS, "bubble"))
    stretch = 1 + parts.get("bubble", 0.0) / within

    def whole(seconds: Mapping[str, float]) -> float:
        """With the idle time that it causes."""
        return sum(each * (1 if name in ENDS else stretch) for name, each in seconds.items())

    return (measured - whole(known)) / whole(unknown)


def _how(parts: Mapping[str, float], factors: Mapping[str, Factor], measured: float) -> str:
    """The formula of computation's factor with its numbers."""
    computed = sum(seconds for name, seconds in parts.items() if name in COMPUTATION and name not in factors)
    others = sum(
        seconds * (factors[name].value if name in factors else 1.0)
        for name, seconds in parts.items()
        if name != "bubble" and (name not in COMPUTATION or name in factors)
    )
    less = f" - other parts {others:.4g} s" if others else ""
    idle = ", both with their share of idle time" if parts.get("bubble") else ""
    return f"(measured step {measured:.4g} s{less}) / predicted {computed:.4g} s{idle}"


def memory_factor(found: RunMeasured, held: Memory) -> tuple[Factor | None, list[str]]:
    """Of what is estimated of the memory: with it the fullest rank has what was measured."""
    if found.memory is None:
        return None, []
    ranks = []
    for rank in held.ranks:
        estimated = sum(size for name, size in rank.parts.items() if name in ESTIMATED)
        counted = rank.allocated - estimated
        ranks.append(((found.memory - counted) / estimated, counted, estimated))
    value, counted, estimated = min(ranks)
    if value <= 0:
        return None, [
            f"memory stays as predicted: the {found.memory / GIB:.3f} GiB measured are less than the "
            f"{counted / GIB:.3f} GiB that weights, gradients and moments come to"
        ]
    how = f"({found.memory / GIB:.4g} GiB - counted {counted / GIB:.4g}) / estimated {estimated / GIB:.4g}"
    return Factor(value, how), []
