"""Rules on the layout: how the ranks are divided among the axes, and batch and layers among the ranks.

The world, when it is known, is `cluster.gpus`: `with_world` puts it there and works out dp, so that a rule has only to
read the run.
"""

from __future__ import annotations

from fivefold.config.rule import Rule, choices, divisors_of, multiples_around
from fivefold.config.run import Run
from fivefold.config.split_rules import cuts_sequences, splits_layers


def with_world(run: Run, world: int | str) -> Run:
    """The run on `world` ranks: `cluster.gpus` says so, and an auto `parallel.dp` becomes its number if it has one.

    With "auto", or with degrees or ranks of the file that are none, the run stays as it is.
    """
    unit, written = ranks_a_replica(run), run.cluster.gpus
    if not isinstance(world, int) or world < 1 or unit < 1 or (written != "auto" and written < 1):
        return run
    fits = run.parallel.dp == "auto" and world % unit == 0
    parallel = run.parallel.model_copy(update={"dp": world // unit}) if fits else run.parallel
    return run.model_copy(update={"cluster": run.cluster.model_copy(update={"gpus": world}), "parallel": parallel})


def ranks_a_replica(run: Run) -> int:
    """pp x cp x tp: the ranks that together hold one copy of the model and work on the same sequences."""
    return run.parallel.pp * run.parallel.cp * run.parallel.tp


def _replicas(run: Run) -> int:
    """dp as far as it is known: 1 while it is auto, which every dp is a multiple of."""
    return run.parallel.dp if isinstance(run.parallel.dp, int) else 1


def microbatches(run: Run) -> int | None:
    """Microbatches a step of each rank, with dp 1 while it is auto; None if they do not make up the batch."""
    count, rest = divmod(run.batch.global_size, run.batch.micro_size * _replicas(run))
    return None if rest else count


def _world_misfit(run: Run) -> bool:
    dp, unit, world = run.parallel.dp, ranks_a_replica(run), run.cluster.gpus
    return isinstance(world, int) and (world % unit != 0 if dp == "auto" else dp * unit != world)


def _say_world(run: Run) -> str:
    parallel, world, unit = run.parallel, run.cluster.gpus, ranks_a_replica(run)
    assert isinstance(world, int), "broken only when the world is known"
    degrees = f"pp {parallel.pp} x cp {parallel.cp} x tp {parallel.tp}"
    if parallel.dp == "auto":
        return f"{degrees} = {unit} does not divide the {world} ranks there are; use {_fitting(run, world)}"
    product = f"parallel.dp {parallel.dp} x {degrees} = {parallel.dp * unit}, but there are {world} ranks"
    if world % unit or not _shares_batch(run, world // unit):
        return f"{product}; use {_fitting(run, world)}, with parallel.dp auto"
    return f"{product}; use parallel.dp {world // unit}, or auto"


def _fitting(run: Run, world: int) -> str:
    """Which values of one degree alone would make pp x cp x tp divide the world, and which worlds it divides.

    Only those with which dp shares out the batch as well.
    """
    unit = ranks_a_replica(run)
    options = []
    for name, fits in (("tp", splits_layers), ("pp", _fills_stages), ("cp", cuts_sequences)):
        others = unit // getattr(run.parallel, name)
        degrees = [
            degree
            for degree in (divisors_of(world // others) if world % others == 0 else [])
            if fits(run, degree) and _shares_batch(run, world // others // degree)
        ]
        if degrees and others < unit:
            options.append(f"parallel.{name} {choices(degrees)}")
    return ", or ".join([*options, f"{choices(_worlds_around(run, world))} ranks"])


def _worlds_around(run: Run, world: int) -> list[int]:
    """The numbers of ranks next below and above `world` that the layout fills, with a dp that shares out the batch."""
    unit = ranks_a_replica(run)
    whole, rest = divmod(run.batch.global_size, run.batch.micro_size)
    if rest:
        return multiples_around(world, unit)
    fewer = [dp for dp in divisors_of(whole) if dp * unit <= world]
    more = [dp for dp in divisors_of(whole) if dp * unit > world]
    return [dp * unit for dp in (*fewer[-1:], *more[:1])]


def _shares_batch(run: Run, dp: int) -> bool:
    """Whether `dp` shares of a step are whole microbatches; True of a batch of which no dp makes any."""
    size, micro = run.batch.global_size, run.batch.micro_size
    return size % micro != 0 or size % (micro * dp) == 0


def _fills_stages(run: Run, pp: int) -> bool:
    """Whether `pp` pipeline ranks have a layer for each of their stages."""
    stages = run.parallel.layers_per_stage
    wanted = pp * run.parallel.chunks
    return wanted == len(stages) if isinstance(stages, list) else wanted <= run.model.layers


def _say_stages(run: Run) -> str:
    parallel, layers = run.parallel, run.model.layers
    stages = parallel.pp * parallel.chunks
    most = layers // parallel.chunks
    fewer = f"parallel.pp {most}{' or less' if most > 1 else ''}, or " if most else ""
    return (
        f"parallel.pp {parallel.pp} x parallel.chunks {parallel.chunks} = {stages} stages, but model.layers = "
        f"{layers}; use {fewer}model.layers {stages} or more"
    )


def _say_batch(run: Run) -> str:
    size, micro, dp = run.batch.global_size, run.batch.micro_size, _replicas(run)
    product = f"{micro}" if run.parallel.dp == "auto" else f"{micro} x dp {dp} = {micro * dp}"
    smaller = [] if size % dp else [m for m in divisors_of(size // dp) if m < micro]
    other_micro = f", or batch.micro_size {choices(smaller)}" if smaller else ""
    return (
        f"batch.global_size = {size} is no multiple of batch.micro_size {product}; "
        f"use batch.global_size {choices(multiples_around(size, micro * dp))}{other_micro}"
    )


LAYOUT: tuple[Rule, ...] = (
    Rule(
        "the layout fills the ranks",
        about=("cluster.gpus", "parallel.pp", "parallel.cp", "parallel.tp", "parallel.dp"),
        broken=_world_misfit,
        says=_say_world,
    ),
    Rule(
        "replicate divides dp",
        about=("parallel.replicate", "parallel.dp"),
        broken=lambda run: isinstance(run.parallel.dp, int) and run.parallel.dp % run.parallel.replicate,
        says=lambda run: (
            f"parallel.replicate = {run.parallel.replicate} does not divide dp = {run.parallel.dp}; "
            f"use parallel.replicate {choices(divisors_of(_replicas(run)))}"
        ),
    ),
    Rule(
        "ZeRO 0 replicates everything",
        about=("parallel.replicate", "parallel.dp", "parallel.zero"),
        broken=lambda run: (
            run.parallel.zero == 0 and run.parallel.dp != "auto" and run.parallel.replicate not in (1, run.parallel.dp)
        ),
        says=lambda run: (
            f"parallel.zero = 0 shards nothing over dp = {run.parallel.dp}, so parallel.replicate = "
            f"{run.parallel.replicate} has no meaning; use parallel.replicate {choices(sorted({1, _replicas(run)}))}, "
            "or parallel.zero 1, 2 or 3"
        ),
    ),
    Rule(
        "microbatches make up the batch",
        about=("batch.global_size", "batch.micro_size", "parallel.dp"),
        broken=lambda run: microbatches(run) is None,
        says=_say_batch,
    ),
    Rule(
        "there is a layer for each stage",
        about=("model.layers", "parallel.layers_per_stage", "parallel.pp", "parallel.chunks"),
        broken=lambda run: (
            not isinstance(run.parallel.layers_per_stage, list) and not _fills_stages(run, run.parallel.pp)
        ),
        says=_say_stages,
    ),
    Rule(
        "stages hold all layers",
        about=("model.layers", "parallel.layers_per_stage", "parallel.pp", "parallel.chunks"),
        broken=lambda run: (
            isinstance(stages := run.parallel.layers_per_stage, list)
            and (len(stages) != run.parallel.pp * run.parallel.chunks or sum(stages) != run.model.layers)
        ),
        says=lambda run: (
            f"parallel.layers_per_stage = {run.parallel.layers_per_stage} must be pp x chunks = "
            f"{run.parallel.pp * run.parallel.chunks} numbers whose sum is model.layers = {run.model.layers}; "
            "use parallel.layers_per_stage auto"
        ),
    ),
)
"""What holds between the ranks, the batch and the layers."""
