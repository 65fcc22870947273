"""Ways to balance experts, side by side on real text: `python benchmarks/balance.py --data data/stdlib`.

The same model from the same weights over the same tokens, balanced by biases, by nothing, and by either balance loss,
one run after the other in one process, on a GPU if there is one. Prints a Markdown table, and with `--svg` draws the
curves of load and loss over the steps. The token set and the one beside it, NAME-val, are those of `fivefold data
build`, as in `scripts/quickstart`. A run that is there already, in `--out`, is not trained again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fivefold.durable import replace_file
from fivefold.observe import curves
from fivefold.observe.curves import HEIGHT, WIDTH, Curve, picture
from fivefold.observe.history import Choices, History, Points, read_history

RUN_FILE = Path(__file__).with_suffix(".yaml")
NO_BIAS = ("--model.moe.bias", "false")
VARIANTS = {
    "bias-1e-3": ("--routing.bias_rate", "1e-3"),
    "bias-3e-3": ("--routing.bias_rate", "3e-3"),
    "bias-1e-2": ("--routing.bias_rate", "1e-2"),
    "none": NO_BIAS,
    "sequence": (*NO_BIAS, "--loss.balance_sequence", "0.01"),
    "global": (*NO_BIAS, "--loss.balance_global", "0.01"),
}
"""The flags of each."""
LAST = 50
"""Steps at the end over which loads are averaged."""
SMOOTH = 10
"""Steps that a point of a curve of loads is the mean of."""
STYLE = (
    ":root{--ink:#222;--paper:#fff;--line:#ddd;--faint:#bbb}"
    "@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181b;--line:#3a3d42;--faint:#5c6066}}"
    ".paper{fill:var(--paper)}" + curves.STYLE
)
HEAD = """\
| balanced by | validation loss | largest load | layer by layer | of all these steps together | entropy |
|---|---|---|---|---|---|"""


def train(variant: str, seed: int, arguments: argparse.Namespace) -> History:
    """The run of a variant, trained to its end if it is not there."""
    name = f"{variant}-{seed}"
    validation = arguments.data.with_name(f"{arguments.data.name}-val")
    flags = {
        "name": name,
        "out": arguments.out,
        "seed": seed,
        "steps": arguments.steps,
        "batch.global_size": arguments.sequences,
        "batch.micro_size": arguments.sequences,
        "data.train.0.path": arguments.data,
        "data.validation.0.path": validation,
    }
    command = [sys.executable, "-m", "fivefold", "train", str(RUN_FILE), *VARIANTS[variant]]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_history(arguments.out / name)


def row(variant: str, histories: Sequence[History]) -> str:
    """A line of the table: a value a seed, in the order of seeds."""
    losses = [f"{validation_loss(each)[-1][1]:.3f}" for each in histories]
    largest = [f"{at_the_end(each.points('moe_load_max')):.2f}" for each in histories]
    layers = [", ".join(f"{load:.2f}" for load in loads_of_layers(each)) for each in histories]
    together = [f"{load_together(each):.2f}" for each in histories]
    entropy = [f"{at_the_end(each.points('moe_entropy')):.3f}" for each in histories]
    cells = [" / ".join(values) for values in (losses, largest, layers, together, entropy)]
    return f"| {variant} | {' | '.join(cells)} |"


def validation_loss(history: History) -> Points:
    """Of the run's one validation set."""
    return history.points(history.keys("val_loss/")[0])


def at_the_end(points: Points) -> float:
    """The mean over the last steps."""
    return fmean(value for _, value in points[-LAST:])


def loads_of_layers(history: History) -> list[float]:
    """Of each layer, its largest load, the mean over the last steps."""
    last = history.choices[-LAST:]
    return [fmean(each.worst_load(layer) for each in last) for layer in last[-1].by_layer]


def load_together(history: History) -> float:
    """The largest load in any layer if the last steps are counted as one, without the swing from text to text."""
    last = history.choices[-LAST:]
    layers = last[-1].by_layer
    summed = {
        layer: [sum(row) for row in zip(*(each.by_layer[layer] for each in last), strict=True)] for layer in layers
    }
    return max(Choices(0, summed).worst_load(layer) for layer in layers)


def smooth(points: Points) -> Points:
    """Means over so many steps in a row, each at the last of its steps."""
    groups = [points[start : start + SMOOTH] for start in range(0, len(points), SMOOTH)]
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


def drawing(histories: dict[str, History]) -> str:
    """An SVG file: loads above, validation losses below, in whole and at the end, light or dark as the browser is."""
    loads = [Curve(name, smooth(each.points("moe_load_max"))) for name, each in histories.items()]
    losses = [Curve(name, validation_loss(each)) for name, each in histories.items()]
    late = [Curve(each.name, each.points[len(each.points) // 2 :]) for each in losses]
    pictures = [
        picture(f"largest load of an expert in any layer, x even, mean of {SMOOTH} steps", loads),
        picture("validation loss (nats a token)", losses),
        picture("validation loss in the second half", late),
    ]
    height = HEIGHT * len(pictures)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f'<style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{height}"/>',
            *(f'<g transform="translate(0 {HEIGHT * place})">{each}</g>' for place, each in enumerate(pictures)),
            "</svg>\n",
        ]
    )


def main() -> None:
    """Train what is missing, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), help="a token set; NAME-val is beside it")
    parser.add_argument("--out", type=Path, default=Path("runs/balance"), help="where the runs lie")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=32, help="of a step, in one microbatch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the curves are those of the first")
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    first = {}
    print(HEAD, flush=True)
    for variant in arguments.only:
        histories = [train(variant, seed, arguments) for seed in arguments.seeds]
        first[variant] = histories[0]
        print(row(variant, histories), flush=True)
    if arguments.svg:
        replace_file(arguments.svg.resolve(), drawing(first))


if __name__ == "__main__":
    main()
