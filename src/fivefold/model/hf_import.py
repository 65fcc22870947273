"""Weights of a Hugging Face directory into our parameters and buffers, each rank copying only what it holds.

Names, shapes, types and the tie of head and embedding are checked from the files' headers before the first weight is
copied: nothing is skipped, and nothing stays random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold._torch import local_offsets
from fivefold.config.huggingface import weights_directory
from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_entry import AnyEntry, Box, Shape
from fivefold.model.hf_files import WeightFiles

OnEvent = Callable[[str, dict[str, Any]], None]


def ignore(kind: str, fields: dict[str, Any]) -> None:
    """For callers that report no events."""


@dataclass(frozen=True)
class Weights:
    """A checked import: every parameter of the model has its tensors in the files, in the right shape."""

    files: WeightFiles
    entries: Mapping[str, AnyEntry]
    """By our names, in the model's order; buffers that the files hold are among them."""
    stored: Mapping[str, str]
    """The file's own name of each of the family's names."""

    def parameter(self, ours: str) -> Tensor:
        """One whole parameter or buffer, in the file's type."""
        return self.box(ours, tuple((0, size) for size in self.entries[ours].shape))

    def box(self, ours: str, box: Box) -> Tensor:
        """A box of a parameter, in the file's type (fp32 for fp8); little more is read.

        Raises UserError if the file's copies of it are not equal to it.
        """
        entry = self.entries[ours]
        read = entry.read(box, self._read)
        for copy in entry.copies:
            if copy in self.stored and not torch.equal(self._read(copy, box), read):
                original = self.stored[next(iter(entry.theirs))]
                raise UserError(
                    f"{self.files.directory}: {self.stored[copy]} differs from {original}, with which it is one here, "
                    "so that it would be thrown away"
                )
        return read

    def _read(self, name: str, box: Box) -> Tensor:
        return self.files.box(self.stored[name], box)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Our name and the whole tensor of each parameter, one at a time."""
        for ours in self.entries:
            yield ours, self.parameter(ours)


def open_weights(directory: Path, model: Model, adaptor: HFAdaptor, on_event: OnEvent = ignore) -> Weights:
    """Check that `directory` holds exactly the weights of `model`; iterating the result gives (our name, whole tensor).

    Reported as event `weights_note`: a head that is stored beside its tied embedding, an untied head that equals the
    embedding, tensors that are no weights, and those of parts that the model does without. Raises UserError that lists
    names which are missing or unexpected, shapes that differ and types that cannot be read, or that says how the file
    and `tied` contradict each other.
    """
    files = WeightFiles(directory)
    no_weights = sorted(name for name in files.names if re.fullmatch(adaptor.ignored, name))
    if no_weights:
        on_event("weights_note", {"message": "left out, as they are no weights", "names": no_weights})
    stored = _with_body(files.names - set(no_weights), adaptor)
    left_out = adaptor.left_out(model, stored)
    if left_out:
        names = sorted(stored.pop(name) for name in left_out)
        on_event("weights_note", {"message": "left out, as the model has no such part", "names": names})
    entries = _form(adaptor, model, stored)
    checked = {name: file for name, file in stored.items() if not (model.tied and name == adaptor.head)}
    _check(files, entries, checked, model, adaptor)
    if adaptor.head in stored:
        note = _reconcile_tie(files, model, adaptor, stored)
        if note:
            on_event("weights_note", {"message": note, "names": [stored[adaptor.head]]})
    return Weights(files, {entry.ours: entry for entry in entries}, stored)


def _form(adaptor: HFAdaptor, model: Model, stored: Mapping[str, str]) -> Sequence[AnyEntry]:
    """The entries of that form of the files of which the fewest names are missing."""
    forms = [form(model) for form in (adaptor.entries, *adaptor.other_forms)]
    return min(forms, key=lambda entries: sum(name not in stored for entry in entries for name in entry.theirs))


def _with_body(names: set[str], adaptor: HFAdaptor) -> dict[str, str]:
    """The stored name of each of the family's: files saved from the body alone lack its prefix."""
    if any(name.startswith(adaptor.body) for name in names):
        return {name: name for name in names}
    return {name if name == adaptor.head else adaptor.body + name: name for name in names}


def _missing(name: str, shape: Shape, ours: str, model: Model, adaptor: HFAdaptor) -> str:
    advice = ""
    if name == adaptor.head:
        advice = " (model.tied is false; if head and embedding are one, set it to true)"
    elif ours.startswith("mtp."):
        advice = f" (model.mtp is {model.mtp}; if the files hold no multi-token prediction, set it to 0)"
    return f"missing: {name} {shape}{advice}"


def _check(
    files: WeightFiles, entries: Sequence[AnyEntry], stored: Mapping[str, str], model: Model, adaptor: HFAdaptor
) -> None:
    wanted = {name: (shape, entry.ours) for entry in entries for name, shape in entry.theirs.items()}
    shapes = {name: shape for name, (shape, _) in wanted.items()}
    shapes |= {name: entry.shape for entry in entries for name in entry.copies}
    problems = [
        _missing(name, shape, ours, model, adaptor) for name, (shape, ours) in wanted.items() if name not in stored
    ]
    for name, file in sorted(stored.items()):
        shape = files.shape(file)
        if name not in shapes and 0 not in shape:
            problems.append(f"unexpected: {file} {shape}")
        elif name not in shapes:
            continue  # it holds nothing: transformers writes no shared expert as one that is 0 wide
        elif shape != shapes[name]:
            problems.append(f"wrong shape: {file} is {shape}, the model wants {shapes[name]}")
        elif unreadable := files.type_problem(file):
            problems.append(f"wrong type: {unreadable}")
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


def load_into(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy the weights into parameters and buffers, by name, whole or DTensor; each rank reads and writes its shard.

    They may be those of a part of the model (a pipeline stage). A buffer that no file holds, such as an expert's
    measured load, stays as it is. Types are converted to theirs. No communication.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in weights.entries and not isinstance(tensor, nn.Parameter):
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            offsets = local_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.ndim
            if local.numel():
                ends = (first + size for first, size in zip(offsets, local.shape, strict=True))
                local.copy_(weights.box(name, tuple(zip(offsets, ends, strict=True))))


def load_huggingface(
    tensors: Mapping[str, Tensor], model: Model, adaptor: HFAdaptor | None, on_event: OnEvent = ignore
) -> None:
    """Give parameters and buffers the weights of `model.from`, a directory or a hub id; `adaptor` is its family's.

    Raises as `open_weights`, and UserError if there is no source or the family has no adaptor: a run that asks for
    weights never starts from random ones.
    """
    if adaptor is None:
        raise UserError(f"model.weights is load, but family {model.family!r} cannot read Hugging Face's files")
    if model.from_ is None:
        raise UserError("model.weights is load, but model.from names no Hugging Face directory or hub id")
    load_into(tensors, open_weights(weights_directory(model.from_), model, adaptor, on_event))
