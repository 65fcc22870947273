"""Weights of a Hugging Face directory into our parameters, each rank copying only what it holds.

Names, shapes, types and the tie of head and embedding are checked from the files' headers before the first weight is
copied: nothing is skipped, and nothing stays random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold._torch import local_offsets
from fivefold.config.huggingface import read_json, weights_directory
from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.hf import Entry, HFAdaptor, Shape

OnEvent = Callable[[str, dict[str, Any]], None]


def ignore(kind: str, fields: dict[str, Any]) -> None:
    """For callers that report no events."""


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "BF16", "F16")


class WeightFiles:
    """The tensors of a directory's safetensors files, by name, read when they are asked for."""

    def __init__(self, directory: Path) -> None:
        """Open one file or the shards that an index lists.

        Raises UserError if there are none or both, or a shard is missing, damaged, or differs from the index.
        """
        self.directory = directory
        single, index = (directory / SINGLE).exists(), (directory / INDEX).exists()
        if single and index:
            raise UserError(f"{directory} holds {SINGLE} and {INDEX}: delete the one that is stale")
        if not single and not index:
            raise UserError(f"{directory} has no {SINGLE} and no {INDEX}; only safetensors are read{_other(directory)}")
        listed = _listed(directory) if index else None
        files = [SINGLE] if listed is None else sorted(set(listed.values()))
        self._opened = {file: self._open(file) for file in files}
        self._file_of = {name: file for file, opened in self._opened.items() for name in opened.keys()}  # noqa: SIM118
        if listed is not None and listed != self._file_of:
            differing = sorted(set(listed.items()) ^ set(self._file_of.items()))[:3]
            examples = ", ".join(f"{name} in {file}" for name, file in differing)
            raise UserError(f"{directory / INDEX} and the shards differ, for example: {examples}")

    def _open(self, file: str) -> Any:
        path = self.directory / file
        if not path.exists():
            raise UserError(f"{path} is missing, which {INDEX} lists")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or no safetensors file: {error}") from None

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> Shape:
        """A tensor's shape, from the header."""
        return tuple(self._opened[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's type as safetensors writes it, such as BF16, from the header."""
        return self._opened[self._file_of[name]].get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        return self._opened[self._file_of[name]].get_tensor(name)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor, on the CPU; no more is read."""
        return self._opened[self._file_of[name]].get_slice(name)[first:last]


def _listed(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{directory / INDEX} has no weight_map")
    return weight_map


def _other(directory: Path) -> str:
    others = sorted(path.name for path in directory.glob("*.bin"))
    return f"; convert {others[0]} with transformers' save_pretrained(safe_serialization=True)" if others else ""


@dataclass(frozen=True)
class Weights:
    """A checked import: every parameter of the model has its tensors in the files, in the right shape."""

    files: WeightFiles
    entries: Mapping[str, Entry]
    """By our names, in the model's order."""
    stored: Mapping[str, str]
    """The file's own name of each of the family's names."""

    def parameter(self, ours: str) -> Tensor:
        """One whole parameter, in the file's type."""
        return self.rows(ours, 0, self.entries[ours].rows)

    def rows(self, ours: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, in the file's type; little more is read."""
        return self.entries[ours].fuse_rows(start, stop, lambda name, a, b: self.files.rows(self.stored[name], a, b))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Our name and the whole tensor of each parameter, one at a time."""
        for ours in self.entries:
            yield ours, self.parameter(ours)


def open_weights(directory: Path, model: Model, adaptor: HFAdaptor, on_event: OnEvent = ignore) -> Weights:
    """Check that `directory` holds exactly the weights of `model`; iterating the result gives (our name, whole tensor).

    Reported as event `weights_note`: a head that is stored beside its tied embedding, an untied head that equals the
    embedding, tensors that are no weights. Raises UserError that lists names which are missing or unexpected, shapes
    that differ and types that are not floating point, or that says how the file and `tied` contradict each other.
    """
    files = WeightFiles(directory)
    entries = adaptor.entries(model)
    no_weights = sorted(name for name in files.names if re.fullmatch(adaptor.ignored, name))
    if no_weights:
        on_event("weights_note", {"message": "left out, as they are no weights", "names": no_weights})
    stored = _with_body(files.names - set(no_weights), adaptor)
    checked = {name: file for name, file in stored.items() if not (model.tied and name == adaptor.head)}
    _check(files, entries, checked, adaptor.head)
    if adaptor.head in stored:
        note = _reconcile_tie(files, model, adaptor, stored)
        if note:
            on_event("weights_note", {"message": note, "names": [stored[adaptor.head]]})
    return Weights(files, {entry.ours: entry for entry in entries}, stored)


def _with_body(names: set[str], adaptor: HFAdaptor) -> dict[str, str]:
    """The stored name of each of the family's: files saved from the body alone lack its prefix."""
    if any(name.startswith(adaptor.body) for name in names):
        return {name: name for name in names}
    return {name if name == adaptor.head else adaptor.body + name: name for name in names}


def _missing(name: str, shape: Shape, head: str) -> str:
    advice = " (model.tied is false; if head and embedding are one, set it to true)" if name == head else ""
    return f"missing: {name} {shape}{advice}"


def _check(files: WeightFiles, entries: list[Entry], stored: Mapping[str, str], head: str) -> None:
    wanted = {name: shape for entry in entries for name, shape in entry.theirs.items()}
    problems = [_missing(name, shape, head) for name, shape in wanted.items() if name not in stored]
    for name, file in sorted(stored.items()):
        shape, dtype = files.shape(file), files.dtype(file)
        if name not in wanted:
            problems.append(f"unexpected: {file} {shape}")
        elif shape != wanted[name]:
            problems.append(f"wrong shape: {file} is {shape}, the model wants {wanted[name]}")
        elif dtype not in FLOATING:
            problems.append(f"wrong type: {file} is {dtype}, not one of {', '.join(FLOATING)}")
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise UserError(f"the weights in {files.directory} are not those of this model:{shown}{more}")


def _reconcile_tie(files: WeightFiles, model: Model, adaptor: HFAdaptor, stored: Mapping[str, str]) -> str | None:
    """What to say of a stored head, if anything. Raises UserError if loading it would lose a head of its own."""
    head, embedding = files.tensor(stored[adaptor.head]), files.tensor(stored[adaptor.embedding])
    equal = head.shape == embedding.shape and torch.equal(head, embedding)
    if model.tied and not equal:
        raise UserError(
            f"{files.directory} holds an output head ({adaptor.head}) that differs from the embedding, but model.tied "
            "is true, so that the head would be thrown away. Set model.tied to false to keep it"
        )
    if not equal:
        return None
    if model.tied:
        return "the stored output head equals the embedding that it is tied to"
    return "the output head equals the embedding, but model.tied is false: they will be trained apart"


def load_into(parameters: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy the weights into the parameters, by name, whole or DTensor; each rank reads and writes its own shard.

    The parameters may be those of a part of the model (a pipeline stage). Types are converted to theirs. No
    communication.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            offsets = local_offsets(parameter) if isinstance(parameter, DTensor) else (0,) * parameter.ndim
            if local.numel():
                rows = weights.rows(name, offsets[0], offsets[0] + local.shape[0])
                for dimension in range(1, local.ndim):
                    rows = rows.narrow(dimension, offsets[dimension], local.shape[dimension])
                local.copy_(rows)


def load_huggingface(
    parameters: Mapping[str, Tensor], model: Model, adaptor: HFAdaptor | None, on_event: OnEvent = ignore
) -> None:
    """Give the parameters the weights of `model.from`, a directory or a hub id; `adaptor` is its family's.

    Raises as `open_weights`, and UserError if there is no source or the family has no adaptor: a run that asks for
    weights never starts from random ones.
    """
    if adaptor is None:
        raise UserError(f"model.weights is load, but family {model.family!r} cannot read Hugging Face's files")
    if model.from_ is None:
        raise UserError("model.weights is load, but model.from names no Hugging Face directory or hub id")
    load_into(parameters, open_weights(weights_directory(model.from_), model, adaptor, on_event))
