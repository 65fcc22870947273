"""How many tokens a run's vocabulary has, as far as it is known before training: from the run file, or from the data.

`model.vocab: auto` is the vocabulary of the data's tokenizer, whatever that of a preset is; what differs from the
preset's, and what the data cannot have, is told. Imports no torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from fivefold.config.models import huggingface_fields, preset_fields
from fivefold.config.rule import Rule
from fivefold.config.run import Model, Run
from fivefold.errors import UserError

USED = 0.9
"""Share of a vocabulary's rows that its own tokenizer has at least: the others pad it to a round number."""


def known_vocabulary(run: Run) -> int | None:
    """The vocabulary, from the run file or from beside its data; None if neither says."""
    if isinstance(run.model.vocab, int):
        return run.model.vocab
    found = _of_data(run)
    return None if found is None else found[1]


def with_known_vocabulary(run: Run) -> Run:
    """The run with its vocabulary as a number, if its file or its data says it; else as it is."""
    vocabulary = known_vocabulary(run)
    if vocabulary is None or vocabulary == run.model.vocab:
        return run
    return run.model_copy(update={"model": run.model.model_copy(update={"vocab": vocabulary})})


def with_vocabulary(run: Run) -> Run:
    """As `with_known_vocabulary`. Raises UserError, with what the preset has, if nothing says the vocabulary."""
    run = with_known_vocabulary(run)
    if run.model.vocab == "auto":
        raise UserError(_which_vocabulary(run))
    return run


def _which_vocabulary(run: Run) -> str:
    published = published_vocabulary(run.model)
    number = "N" if published is None else f"{published}, that of {_name(run.model)}"
    return (
        "how large the model is is not known: model.vocab is auto and its data is not there yet; give "
        f"--model.vocab {number}"
    )


VOCABULARY_SAID = Rule(
    "the vocabulary is said",
    about=("model.vocab", "data.train"),
    broken=lambda run: known_vocabulary(run) is None,
    says=_which_vocabulary,
)
"""The run file or its data says the vocabulary; a plan of time and memory asks that."""


def published_vocabulary(model: Model) -> int | None:
    """The vocabulary of the preset, or of the Hugging Face directory on this machine, that the model is made from."""
    try:
        if model.preset is not None:
            fields = preset_fields(model.preset).value
        elif model.from_ is not None and Path(model.from_).is_dir():
            fields = huggingface_fields(model.from_).value
        else:
            return None
    except UserError:  # a file that is gone since the run file was written out, and no longer needed
        return None
    vocabulary = fields.get("vocab")
    return vocabulary if isinstance(vocabulary, int) else None


def vocabulary_notes(run: Run) -> tuple[str, ...]:
    """What should be known of the run's vocabulary: that it is not the preset's, or not the data's."""
    vocabulary, published, data = known_vocabulary(run), published_vocabulary(run.model), _of_data(run)
    notes = []
    if vocabulary is not None and published not in (None, vocabulary):
        notes.append(
            f"the vocabulary is {vocabulary:,}, {_origin(run)}, and not the {published:,} of {_name(run.model)}"
        )
    if vocabulary is None and published is not None:
        notes.append(
            f"model.vocab = auto will be the vocabulary of the data, which is not there yet; {_name(run.model)} has "
            f"{published:,}"
        )
    if vocabulary is not None and data is not None and not USED * vocabulary <= data[1] <= vocabulary:
        path, size = data
        fate = "training refuses a token that has no row" if size > vocabulary else "the other rows are never used"
        notes.append(f"the tokenizer of {path} has {size:,} tokens, and model.vocab = {vocabulary:,} rows: {fate}")
    return tuple(notes)


def _origin(run: Run) -> str:
    """Where the vocabulary comes from."""
    data = _of_data(run)
    return "as model.vocab says" if run.model.vocab != "auto" or data is None else f"that of {data[0]}"


def _name(model: Model) -> str:
    return str(model.preset or model.from_)


def _of_data(run: Run) -> tuple[Path, int] | None:
    """The tokenizer that the run names, or the first token set that says its vocabulary; and how many tokens it has."""
    if run.data.tokenizer != "auto":
        path = Path(run.data.tokenizer)
        size = _of_tokenizer(path)
        return None if size is None else (path, size)
    for path in (*(source.path for source in run.data.train), *(each.path for each in run.data.validation)):
        try:
            found = json.loads((path / "dataset.json").read_text(encoding="utf-8"))["vocab"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(found, int) and found > 0:
            return path, found
    return None


@cache
def _of_tokenizer(path: Path) -> int | None:
    """Tokens of a tokenizer on this machine; one that is not here is not downloaded for a plan."""
    from fivefold.data.tokenizer import Tokenizer

    try:
        return Tokenizer.load(path).vocab_size if path.exists() else None
    except UserError:  # training says what is wrong with it
        return None
