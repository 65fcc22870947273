"""Where a model's fields come from when the run file names them: a preset, or a Hugging Face config.json.

Presets are YAML files of `Model`'s fields; those that ship with Fivefold lie in `presets/`, and any other file of the
same kind can be named by its path. Reads architectures only: weights are another room's.
"""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from fivefold.config.yaml12 import Document, Place, read_file
from fivefold.errors import UserError
from fivefold.near import did_you_mean

FOLDER = Path(str(files("fivefold.config"))) / "presets"


def preset_names() -> list[str]:
    """The presets that ship with Fivefold, by name."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def preset_file(name: str) -> Path:
    """The file of a preset, given by name or as a file of the user's own. Raises UserError if there is none."""
    if name in preset_names():
        return FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name).expanduser()
    raise UserError(
        f"model.preset = {name}: there is no such preset; {did_you_mean(name, preset_names())}known are "
        f"{', '.join(preset_names())}, or a file of your own, as a path that ends in .yaml"
    )


def preset_fields(name: str) -> Document:
    """The `Model` fields that a preset gives, with their places."""
    document = read_file(preset_file(name))
    for key in ("preset", "from", "weights"):
        if key in document.value:
            raise UserError(
                f"{preset_file(name)}: `{key}` cannot stand in a preset, which describes an architecture only"
            )
    return document


def preset_source(name: str) -> str:
    """Where a preset's numbers come from: the comment at the head of its file, as one paragraph."""
    lines = preset_file(name).read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    return " ".join(comment).removeprefix("Source: ")


def huggingface_fields(source: str) -> Document:
    """The `Model` fields that a Hugging Face directory, or a repository on the hub, gives by its config.json."""
    from fivefold.config.huggingface import model_fields, read_config

    try:
        fields = model_fields(read_config(source))
    except UserError as error:
        raise UserError(f"model.from = {source}: {error}") from None
    return Document(fields, {(key,): Place(f"config.json of {source}") for key in fields})
