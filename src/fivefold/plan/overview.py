"""What a run file amounts to, in a few numbers: the lines of `fivefold check` and the table of `fivefold presets`.

The counts come from `model/spec.py`; here they are put beside the length of the run and what lies on disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fivefold.config.huggingface import TokenIds, hf_config
from fivefold.config.models import preset_fields, preset_names, preset_source
from fivefold.config.notable import notes_on
from fivefold.config.rules import with_world
from fivefold.config.run import Model, Run
from fivefold.config.schedules import is_file
from fivefold.errors import UserError
from fivefold.model.spec import parameters, train_flops_per_token
from fivefold.pipeline.of_run import schedule_of_file
from fivefold.plan.pipeline import Outlook, pipeline_schedule
from fivefold.plan.vocabulary import known_vocabulary, vocabulary_notes


@dataclass(frozen=True)
class PresetRow:
    """One preset in numbers. With `vocab` auto the parameters are those beside the vocabulary's."""

    name: str
    parameters: int
    """All of them; without those of embedding and head while the vocabulary is auto."""
    parameters_a_token: int
    """What each token of the vocabulary adds; 0 if the vocabulary is a number and its rows are counted."""
    active: int
    """Of `parameters`, those that one token meets: all but the experts that it is not sent to."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    context: int
    source: str

    def json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        """The row as texts, below `PRESET_HEAD`."""
        more = f" + {self.parameters_a_token} V" if self.parameters_a_token else ""
        count, active = (f"{short(number)}{more}" for number in (self.parameters, self.active))
        heads = f"{self.heads}/{self.kv_heads}"
        source = self.source if len(self.source) <= 60 else self.source[:59].rstrip() + "…"
        return self.name, count, active, str(self.layers), str(self.hidden), heads, str(self.context), source


PRESET_HEAD = ("name", "parameters", "active", "layers", "hidden", "heads/kv", "context", "source")


def preset_rows() -> list[PresetRow]:
    """Every preset that ships with Fivefold, smallest first."""
    return sorted((_preset_row(name) for name in preset_names()), key=lambda row: row.parameters)


def _preset_row(name: str) -> PresetRow:
    model = Model.model_validate(preset_fields(name).value)
    fixed = model if model.vocab != "auto" else model.model_copy(update={"vocab": 0})
    counts = parameters(fixed)
    return PresetRow(
        name,
        parameters=counts.total,
        active=counts.active,
        parameters_a_token=0 if fixed is model else _a_token(model),
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        context=model.context,
        source=preset_source(name),
    )


def _a_token(model: Model) -> int:
    one, none = (parameters(model.model_copy(update={"vocab": vocab})).total for vocab in (1, 0))
    return one - none


def short(number: float) -> str:
    """A number to three digits with k, M, B, T: 8.03B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


@dataclass(frozen=True)
class Overview:
    """What a legal run comes to. None where the vocabulary is not known yet."""

    name: str
    folder: str
    model: str
    vocabulary: int | None
    parameters: int | None
    active: int | None
    """Of the parameters, those that one token meets."""
    steps: int
    tokens: int
    global_size: int
    seq_len: int
    tokens_a_step: int
    flops: float | None
    """Of the whole training, by the convention of model/spec.py."""
    schedule: str | None
    """What the pipeline's schedule comes to; None without a pipeline."""
    notes: tuple[str, ...]
    """What is legal, and should be known."""

    def json(self) -> dict[str, Any]:
        """The overview as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The overview for a terminal."""
        size = "vocabulary not known yet" if self.parameters is None else f"{self.parameters:,} parameters"
        if self.active != self.parameters:
            size += f" ({self.active:,} active)"
        work = "" if self.flops is None else f", {self.flops:.3g} FLOPs"
        return [
            f"  model    {self.model}: {size}" + (f", vocabulary {self.vocabulary:,}" if self.vocabulary else ""),
            f"  length   {self.steps:,} steps = {self.tokens:,} tokens{work}",
            f"  batch    {self.global_size:,} sequences x {self.seq_len:,} = {self.tokens_a_step:,} tokens a step",
            *([] if self.schedule is None else [f"  schedule {self.schedule}"]),
            f"  output   {self.folder}",
            *(f"  note: {note}" for note in self.notes),
        ]


def overview(run: Run) -> Overview:
    """The numbers of `run`, which breaks no rule, and notes on what it still lacks.

    Raises UserError if the pipeline's schedule cannot run.
    """
    vocabulary = known_vocabulary(run)
    model = run.model.model_copy(update={"vocab": vocabulary}) if vocabulary else None
    counts = parameters(model) if model else None
    step = run.batch.global_size * run.data.seq_len
    tokens = run.total_steps * step
    return Overview(
        name=run.name,
        folder=str(run.folder),
        model=run.model.preset or run.model.from_ or run.model.family,
        vocabulary=vocabulary,
        parameters=counts.total if counts else None,
        active=counts.active if counts else None,
        steps=run.total_steps,
        tokens=tokens,
        global_size=run.batch.global_size,
        seq_len=run.data.seq_len,
        tokens_a_step=step,
        schedule=_schedule(with_world(run, run.cluster.gpus)),
        flops=float(train_flops_per_token(model, run.data.seq_len)) * tokens if model else None,
        notes=(*_missing_data(run), *_no_export(run), *vocabulary_notes(run), *notes_on(run)),
    )


def _schedule(run: Run) -> str | None:
    """The pipeline's schedule in one line, as far as it is known without the number of ranks."""
    parallel = run.parallel
    stages = parallel.pp * parallel.chunks
    if parallel.dp != "auto":
        schedule = pipeline_schedule(run)
    elif is_file(parallel.schedule):
        schedule = schedule_of_file(run, microbatches=None)
    elif parallel.pp > 1:
        return f"{parallel.schedule}: {stages} stages on {parallel.pp} ranks; --gpus N tells its bubble"
    else:
        return None
    return None if schedule is None else Outlook.of(schedule).line()


def _missing_data(run: Run) -> list[str]:
    """A note for each token set that is not there (a name such as `mine:books` is a source of the user's own)."""
    paths = dict.fromkeys([*(source.path for source in run.data.train), *(each.path for each in run.data.validation)])
    return [
        f"{path} does not exist yet; `fivefold data build` makes it"
        for path in paths
        if not path.exists() and not Path(f"{path}.idx").exists() and ":" not in str(path)
    ]


def _no_export(run: Run) -> list[str]:
    """A note if no Hugging Face format can say this architecture."""
    try:
        hf_config(run.model, TokenIds(), "float32")
    except UserError as error:
        return [f"the trained model cannot be exported: {error}"]
    return []
