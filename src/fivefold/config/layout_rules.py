"""Rules on the layout: how ranks, batch, heads, layers and sequences are divided among each other.

The world, when it is known, is `cluster.gpus`: `with_world` puts it there and works out dp, so that a rule has only to
read the run.
"""

from __future__ import annotations

from math import gcd

from fivefold.config.rule import Rule, choices, divisors_of, multiples_around
from fivefold.config.run import Run


def with_world(run: Run, world: int | str) -> Run:
    """The run on `world` ranks: `cluster.gpus` says so, and an auto `parallel.dp` becomes its number if it has one.

    With "auto", or with degrees that are no degrees, the run stays as it is.
    """
    unit = ranks_a_replica(run)
    if not isinstance(world, int) or world < 1 or unit < 1:
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
    if world % unit:
        return f"{product}; use {_fitting(run, world)}, with parallel.dp auto"
    return f"{product}; use parallel.dp {world // unit}, or auto"


def _fitting(run: Run, world: int) -> str:
    """Which values of one degree alone would make pp x cp x tp divide the world, and which worlds it divides."""
    unit = ranks_a_replica(run)
    degrees = {name: getattr(run.parallel, name) for name in ("tp", "pp", "cp")}
    options = [
        f"parallel.{name} {choices(divisors_of(world // (unit // degree)))}"
        for name, degree in degrees.items()
        if degree > 1 and world % (unit // degree) == 0
    ]
    return ", or ".join([*options, f"{choices(multiples_around(world, unit))} ranks"])


def _say_batch(run: Run) -> str:
    size, micro, dp = run.batch.global_size, run.batch.micro_size, _replicas(run)
    product = f"{micro}" if run.parallel.dp == "auto" else f"{micro} x dp {dp} = {micro * dp}"
    smaller = [] if size % dp else [m for m in divisors_of(size // dp) if m < micro]
    other_micro = f", or batch.micro_size {choices(smaller)}" if smaller else ""
    return (
        f"batch.global_size = {size} is no multiple of batch.micro_size {product}; "
        f"use batch.global_size {choices(multiples_around(size, micro * dp))}{other_micro}"
    )


def _head_degrees(run: Run) -> str:
    return choices(divisors_of(gcd(run.model.heads, run.model.key_value_heads)))


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
        "microbatches make up the batch",
        about=("batch.global_size", "batch.micro_size", "parallel.dp"),
        broken=lambda run: run.batch.global_size % (run.batch.micro_size * _replicas(run)),
        says=_say_batch,
    ),
    Rule(
        "tp divides the heads",
        about=("model.heads", "model.kv_heads", "parallel.tp"),
        broken=lambda run: run.model.heads % run.parallel.tp,
        says=lambda run: (
            f"model.heads = {run.model.heads} cannot be split over parallel.tp = {run.parallel.tp}; "
            f"use parallel.tp {_head_degrees(run)}"
        ),
    ),
    Rule(
        "tp divides the key/value heads",
        about=("model.heads", "model.kv_heads", "parallel.tp"),
        broken=lambda run: run.model.key_value_heads % run.parallel.tp,
        says=lambda run: (
            f"{run.model.key_value_heads} key/value heads (model.kv_heads = {run.model.kv_heads}) cannot be split over "
            f"parallel.tp = {run.parallel.tp}; use parallel.tp {_head_degrees(run)}"
        ),
    ),
    Rule(
        "tp divides the feed-forward width",
        about=("model.ffn", "parallel.tp"),
        broken=lambda run: run.model.ffn % run.parallel.tp,
        says=lambda run: (
            f"model.ffn = {run.model.ffn} cannot be split over parallel.tp = {run.parallel.tp}; use model.ffn "
            f"{choices(multiples_around(run.model.ffn, run.parallel.tp))}"
        ),
    ),
    Rule(
        "cp cuts a sequence into 2 x cp equal parts",
        about=("data.seq_len", "parallel.cp"),
        broken=lambda run: run.parallel.cp > 1 and run.data.seq_len % (2 * run.parallel.cp),
        says=lambda run: (
            f"data.seq_len = {run.data.seq_len} is no multiple of 2 x parallel.cp = {2 * run.parallel.cp}; "
            f"use data.seq_len {choices(multiples_around(run.data.seq_len, 2 * run.parallel.cp))}"
        ),
    ),
    Rule(
        "stages hold all layers",
        about=("model.layers", "parallel.layers_per_stage", "parallel.pp", "parallel.chunks"),
        broken=lambda run: (
            (stages := run.parallel.layers_per_stage) != "auto"
            and (len(stages) != run.parallel.pp * run.parallel.chunks or sum(stages) != run.model.layers)
        ),
        says=lambda run: (
            f"parallel.layers_per_stage = {run.parallel.layers_per_stage} must be pp x chunks = "
            f"{run.parallel.pp * run.parallel.chunks} numbers whose sum is model.layers = {run.model.layers}; or auto"
        ),
    ),
)
"""What holds between a layout, the model and the batch."""
