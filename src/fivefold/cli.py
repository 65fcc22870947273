"""The command line: each command is a few lines that call a room below, which is imported when the command runs.

`--json` owns standard output; whatever else is said then goes to standard error. Exit codes: 0, 1 for work that failed,
2 for a bad run file or input, 3 for what is legal and does not fit, 130 for Ctrl-C.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

import fivefold
from fivefold.errors import RunError, UserError
from fivefold.outputs import check_file

if TYPE_CHECKING:
    from fivefold.config.run import Run
    from fivefold.plan.execution import Execution


class Failure(click.ClickException):
    """An error of ours as click prints it: the message on standard error, and the exit code of its class."""

    def __init__(self, error: UserError | RunError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click's attribute of the class


class Commands(click.Group):
    """The commands in the order in which they are used, with one way out for errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (UserError, RunError) as error:
            raise Failure(error) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


class RunFileCommand(click.Command):
    """A command that takes a run file and every key of it as a flag, in any order; --help lists the keys."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, context_settings={"ignore_unknown_options": True}, **kwargs)
        self.params.insert(
            0, click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="RUN.YAML [--KEY VALUE]...")
        )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from fivefold.config.keys import dotted_keys, section_in, type_at

        leaves = [key for key in dotted_keys() if not section_in(type_at(tuple(key.split("."))))]
        with formatter.section("Every key of the run file is a flag, its value read as YAML"):
            formatter.write_text(", ".join(f"--{key}" for key in leaves))
            formatter.write_text("--gpu and --gpus are short for --cluster.gpu and --cluster.gpus.")


def run_file(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The one run file among the words of a command line, and the flags over it."""
    from fivefold.config.overrides import split_arguments

    files, overrides = split_arguments(words)
    if len(files) != 1:
        found = f"{len(files)} were given: {', '.join(files)}" if files else "none was given"
        raise click.UsageError(f"one run file is needed, and {found}; a flag's value follows it: --optim.lr 1e-3")
    return Path(files[0]), overrides


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2))


@click.group(cls=Commands)
@click.version_option(fivefold.__version__, package_name="fivefold", prog_name="fivefold")
def commands() -> None:
    """Pretraining of large language models, from a laptop CPU to tens of thousands of GPUs.

    Start with `fivefold init > run.yaml`.
    """


@commands.command()
def init() -> None:
    """Write a run file with comments to standard output."""
    from fivefold.config.template import template

    click.echo(template(), nl=False)


@commands.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def presets(name: str | None, as_json: bool) -> None:
    """List the models that ship with Fivefold, or print the YAML of one."""
    if name is not None:
        from fivefold.config.models import preset_fields, preset_file

        if as_json:
            print_json(preset_fields(name).value)
        else:
            click.echo(preset_file(name).read_text(encoding="utf-8"), nl=False)
        return
    from fivefold.plan.overview import PRESET_HEAD, preset_rows
    from fivefold.plan.table import table_lines

    rows = preset_rows()
    if as_json:
        print_json([row.json() for row in rows])
    else:
        click.echo("\n".join(table_lines([PRESET_HEAD, *(row.cells() for row in rows)])))
        click.echo("V: the vocabulary, which is the data's own. Heads: query/key-value heads.")


@commands.command(cls=RunFileCommand)
@click.option("--json", "as_json", is_flag=True, help="Print what the run comes to as JSON.")
def check(words: tuple[str, ...], as_json: bool) -> None:
    """Tell what is wrong with a run file, or what it comes to."""
    from fivefold.config.files import load_run
    from fivefold.config.rules import RULES
    from fivefold.hardware.rule import ACCELERATOR
    from fivefold.plan.overview import overview

    file, overrides = run_file(words)
    found = overview(load_run(file, overrides, (*RULES, ACCELERATOR)))
    if as_json:
        print_json(found.json())
    else:
        click.echo("\n".join([f"{file} is legal: run {found.name}", *found.lines()]))


@commands.command(cls=RunFileCommand)
@click.option("--ranks", "list_ranks", is_flag=True, help="Print what each rank is, and which layers each stage has.")
@click.option("--build-rank", "rank", type=int, metavar="N", help="Build what rank N holds, and print its parameters.")
@click.option("--explain", is_flag=True, help="Print each figure's formula with its numbers.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as one page.")
@click.option("--search", "find", is_flag=True, help="Find the fastest layouts that fit, and tell why they are.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="With --search: write the best run.")
@click.option("--software", metavar="NAME", help="Plan as of another stack, such as megatron-2025; default: this one.")
@click.option(
    "--hot-experts", "hot", metavar="FACTOR|RUN", help="Rows of ep's busiest rank over the mean, or a run that counted."
)
@click.option("--calibrate", metavar="RUN", help="Correct the plan by what a finished run on such GPUs measured.")
@click.option("--forward", "forward_only", is_flag=True, help="Plan the forward alone: prefill, or validation.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    words: tuple[str, ...],
    list_ranks: bool,
    rank: int | None,
    explain: bool,
    html: Path | None,
    find: bool,
    write: Path | None,
    software: str | None,
    hot: str | None,
    calibrate: str | None,
    forward_only: bool,
    as_json: bool,
) -> None:
    """Tell a run's time, memory and cost on any cluster (--gpu, --gpus), on any machine.

    Or what its ranks are (--ranks), or what one of them holds (--build-rank N). Exits with 3 if the run does not fit.
    With --search, which layouts are fastest and fit; the run's own may then be illegal. With --calibrate, what a
    finished run measured beside what is predicted of it, and this plan corrected by the factors that follow.
    """
    from fivefold.config.files import load_run
    from fivefold.config.rules import FORWARD, LEGALITY
    from fivefold.hardware.rule import ACCELERATOR, ACCELERATOR_SAID
    from fivefold.plan.execution import execution_of
    from fivefold.plan.forecast import with_known_machine
    from fivefold.plan.planned import FORECAST, RANKS_SAID, SEARCH
    from fivefold.plan.planned import plan as plan_of

    if list_ranks and rank is not None:
        raise click.UsageError("give --ranks (what each rank is) or --build-rank N (what rank N holds), one of them")
    if (list_ranks or rank is not None) and (explain or html is not None or software is not None or hot is not None):
        raise click.UsageError(
            "--explain, --html, --software and --hot-experts are of time, memory and cost; give them without --ranks "
            "and --build-rank"
        )
    if calibrate is not None and (list_ranks or rank is not None or find or forward_only):
        raise click.UsageError(
            "--calibrate corrects the time and memory of one layout; give it without --ranks, --build-rank, --search "
            "and --forward"
        )
    if write is not None and not find:
        raise click.UsageError("--write writes the best layout of --search; give both")
    file, overrides = run_file(words)
    for output in (html, write):
        check_file(output)
    if find:
        if list_ranks or rank is not None or explain or html is not None or forward_only:
            raise click.UsageError("--search is a plan of its own; give it without the other kinds")
        run = with_known_machine(load_run(file, overrides, (ACCELERATOR, *SEARCH)))
        ctx.exit(_search(run, execution_of(run, software, hot), write, as_json))
    if forward_only:
        if list_ranks or rank is not None or html is not None:
            raise click.UsageError(
                "--forward is told as a table, as --json or by --explain; give it without the other kinds"
            )
        run = load_run(file, overrides, (*FORWARD, ACCELERATOR, *FORECAST))
        ctx.exit(_forward(run, software, hot, explain, as_json))
    told = (RANKS_SAID,) if list_ranks or rank is not None else FORECAST
    # A finished run says which accelerator it ran on.
    rules = [rule for rule in told if calibrate is None or rule is not ACCELERATOR_SAID]
    planned = plan_of(load_run(file, overrides, (*LEGALITY, ACCELERATOR, *rules)))
    if list_ranks or rank is not None:
        found = planned.ranks() if rank is None else planned.build_rank(rank)
        if as_json:
            print_json(found.json())
        else:
            click.echo("\n".join(found.lines()))
        return
    forecast = planned.forecast(execution=execution_of(planned.run, software, hot, calibrate))
    if html is not None:
        from fivefold.plan.page.document import write_page

        click.echo(f"{write_page(forecast, html)} is the plan of {file}", err=True)
    if as_json:
        print_json(forecast.json())
    else:
        click.echo("\n".join(forecast.explain() if explain else forecast.lines()))
    if (too_much := forecast.too_much()) is not None:
        click.echo(too_much, err=True)
        ctx.exit(3)


def _forward(run: Run, software: str | None, hot: str | None, explain: bool, as_json: bool) -> int:
    """Tells a run's forward pass; the exit code is 3 if it does not fit."""
    from fivefold.plan.execution import execution_of
    from fivefold.plan.forward.forecast import forward

    found = forward(run, execution_of(run, software, hot))
    if as_json:
        print_json(found.json())
    else:
        click.echo("\n".join(found.explain() if explain else found.lines()))
    if (too_much := found.too_much()) is not None:
        click.echo(too_much, err=True)
        return 3
    return 0


def _search(run: Run, execution: Execution, write: Path | None, as_json: bool) -> int:
    """Searches a run's layouts; the exit code is 3 if none fits."""
    from fivefold.plan.cluster import cluster_of
    from fivefold.plan.search.best import search

    found = search(run, cluster_of(run), execution, say=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(found.json())
    else:
        click.echo("\n".join(found.lines()))
    if write is not None and found.best:
        found.write(write)
        click.echo(f"{write} is the run with the recommended layout", err=True)
    return 0 if found.best else 3


@commands.command("validate-plan")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[RUNS.json]")
@click.option("--leave-one-out", is_flag=True, help="Fit again without each source, and predict it with that.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it, with each prediction, as JSON.")
def validate_plan(file: Path | None, leave_one_out: bool, as_json: bool) -> None:
    """Tell how far the planner is off on published runs; by default those that ship with it."""
    from fivefold.plan.published.validate import validate

    found = validate(file, leave_one_out, say=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(found.json())
    else:
        click.echo("\n".join(found.lines()))


@commands.command()
@click.argument("name", metavar="NAME|FILE.csv")
@click.option("--pp", type=click.IntRange(1), metavar="P", help="Pipeline ranks.")
@click.option("--microbatches", type=click.IntRange(1), metavar="M", help="Microbatches a step.")
@click.option(
    "--chunks", type=click.IntRange(1), metavar="V", help="Stages a rank; default: the schedule's own, else 1."
)
@click.option(
    "--times",
    default="1,1,1,0",
    show_default=True,
    metavar="F,I,W,C|RUN",
    help="What a rank's F, I and W of one microbatch and a transfer take; or a run whose pipeline was measured.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, min_open=True),
    metavar="LIMIT",
    help="Activations that a rank may hold, in those of one microbatch on one whole rank.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page; FILE.svg gets the picture alone."
)
@click.option("--csv", type=click.Path(path_type=Path), metavar="FILE", help="Write the schedule as torch's CSV.")
@click.pass_context
def schedule(ctx: click.Context, as_json: bool, html: Path | None, csv: Path | None, **asked: Any) -> None:
    """Make a pipeline schedule, or read one, and tell how it would run: timeline, bubble and memory."""
    from fivefold.plan.schedule import Asked, answer

    for output in (html, csv):
        check_file(output)
    found = answer(Asked(**asked))
    if csv is not None:
        found.write_csv(csv)
    if html is not None:
        found.write_drawing(html)
    click.echo(found.json() if as_json else "\n".join(found.lines(shutil.get_terminal_size((100, 24)).columns)))
    if found.too_much is not None:
        click.echo(found.too_much, err=True)
        ctx.exit(3)


@commands.command()
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.yaml", help="Write what cluster.gpu can name.")
@click.option("--nproc", type=click.IntRange(1), metavar="N", help="Local workers; default: one a GPU, else one.")
@click.option("--json", "as_json", is_flag=True, help="Print the entry as JSON.")
def bench(out: Path | None, nproc: int | None, as_json: bool) -> None:
    """Measure this machine's accelerators in about a minute: products, attention, copies, and what they exchange."""
    from fivefold.launch.bench import start_bench

    sys.exit(start_bench(out, nproc, as_json))


@commands.group()
def data() -> None:
    """Prepare what a model reads."""


@data.command()
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write; OUT-val gets what is held out."
)
@click.option("--train-tokenizer", type=int, metavar="SIZE", help="Train a byte-level BPE tokenizer of SIZE tokens.")
@click.option("--tokenizer", metavar="FILE|DIR|HUB_ID", help="Use this tokenizer instead.")
@click.option("--end-token", metavar="TEXT", help="The end-of-document token, where the tokenizer names none.")
@click.option("--val-fraction", type=float, default=0.01, show_default=True, help="Share of the documents to hold out.")
@click.option(
    "--text-key", default="text", show_default=True, help="Key (JSONL) or column (Parquet, Arrow) of the text."
)
@click.option(
    "--dedup", type=click.Choice(["none", "exact"]), default="none", show_default=True, help="Drop equal texts."
)
@click.option("--include", multiple=True, metavar="PATTERN", help="In folders, take only such files; may be repeated.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="In folders, leave out such files; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the hash that chooses what is held out.")
@click.option("--workers", type=int, metavar="N", help="Processes; default: one a core. The result is the same.")
@click.option("--overwrite", is_flag=True, help="Replace an output that was built from something else.")
@click.option("--progress/--no-progress", default=True, help="Show a progress bar on a terminal.")
def build(inputs: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Tokenize text files, JSONL, Parquet and saved datasets into token files for training."""
    from fivefold.data.build import build as build_tokens
    from fivefold.data.recipe import BuildOptions

    click.echo(build_tokens(inputs, out, BuildOptions(**options)).summary())


@commands.command(cls=RunFileCommand)
@click.option("--stop-after", type=click.IntRange(1), metavar="N", help="Stop after N more steps, with a checkpoint.")
@click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Local workers to start; default: one a GPU, else one."
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "never", "must"]),
    default="auto",
    show_default=True,
    help="Go on from the newest good checkpoint: if there is one, never (refuse if there is), or only if there is.",
)
@click.option("--restart", is_flag=True, help="Put the old run of this name aside and start from step 0.")
@click.option("--fork", metavar="NAME", help="Start a new run NAME from the newest checkpoint of this one.")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "local", "env", "slurm"]),
    default="auto",
    show_default=True,
    help="Who started the workers: this command (local), torchrun's environment (env), srun (slurm).",
)
def train(words: tuple[str, ...], **options: Any) -> None:
    """Train, or go on training: the same name and run file resume from the newest checkpoint."""
    from fivefold.train.options import TrainOptions
    from fivefold.train.start import start_training

    file, overrides = run_file(words)
    sys.exit(start_training(file, overrides, TrainOptions(**options)))


@commands.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Where to write; default: RUN/report.html."
)
def report(run_folder: Path, html: Path | None) -> None:
    """Write a run's curves, the loads of its experts and its events as one HTML page."""
    from fivefold.observe.report import write_report

    click.echo(f"{write_report(run_folder, html)} is the report of {run_folder}")


@commands.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), required=True, help="Directory to write; it must not exist yet.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Format of the weights.",
)
@click.option("--step", type=click.IntRange(0), metavar="N", help="Checkpoint to export; default: the newest good one.")
def export(run_folder: Path, to: Path, dtype: Literal["fp32", "bf16", "fp16"], step: int | None) -> None:
    """Write a run's model as a Hugging Face directory."""
    from fivefold.train.use import export_run

    export_run(run_folder, to, dtype=dtype, step=step)
    click.echo(f"{to} holds the model, its config and its tokenizer", err=True)


@commands.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens to add at most.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.8, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-k", type=click.IntRange(1), help="Draw among the k likeliest tokens only.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Draw among the likeliest tokens of this total."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Checkpoint to use; default: the newest good one.")
def generate(run_folder: Path, prompt: str, **options: Any) -> None:
    """Continue a prompt with a run's model."""
    from fivefold.train.use import generate_text

    click.echo(generate_text(run_folder, prompt, **options))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `fivefold`."""
    commands.main(args=None if arguments is None else list(arguments), prog_name="fivefold")


if __name__ == "__main__":
    main(sys.argv[1:])
