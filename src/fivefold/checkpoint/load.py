"""Filling tensors from a checkpoint, whatever layout it was saved in and whatever layout asks.

`load` serves all ranks of a run, in place; `read_full` gives one process whole tensors one by one, for export. Every
byte that is used was compared with its checksum in the moment it was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fivefold.checkpoint.chunks import ChunkReader
from fivefold.checkpoint.find import Found
from fivefold.checkpoint.manifest import DamageError
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.storage import Reader
from fivefold.checkpoint.tensors import stored_tensor
from fivefold.errors import RunError, UserError


def load_tensors(found: Found, tensors: Mapping[str, Tensor], ranks: Ranks, allow_unused: bool) -> list[str]:
    """Fill this rank's part of the tensors in place; a collective call. Returns the names whose dtype was converted.

    Each rank may ask for its own names. Raises UserError, on every rank, if names are missing in the checkpoint, if
    shapes differ or, unless `allow_unused`, if it holds tensors that no rank asks for.
    """
    reader = Reader(found.folder, found.manifest)
    metadata = ranks.together(lambda: _metadata(reader, found))
    asked = set().union(*ranks.gather(set(tensors)))
    _check_names(found, asked, metadata, allow_unused)
    ranks.together(lambda: _check_shapes(found, tensors, metadata))
    ranks.together(lambda: _fill(reader, metadata, tensors, found))
    return [name for name, tensor in tensors.items() if tensor.dtype != stored_tensor(metadata, name).properties.dtype]


def read_full(found: Found, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) on the CPU in the stored dtype, in the order of `names` (default: all).

    One process, no torch.distributed; holds one tensor at a time. Raises UserError for unknown names, before the first.
    """
    reader = Reader(found.folder, found.manifest)
    metadata = _metadata(reader, found)
    wanted = list(metadata.state_dict_metadata if names is None else names)
    _check_names(found, set(wanted), metadata, allow_unused=True)
    chunks = ChunkReader(found.folder)
    return ((name, _read_whole(name, metadata, chunks, found)) for name in wanted)


def stored_names(found: Found) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Names of the tensors in a checkpoint, each with dtype and global shape."""
    metadata = _metadata(Reader(found.folder, found.manifest), found)
    stored = {name: stored_tensor(metadata, name) for name in metadata.state_dict_metadata}
    return {name: (tensor.properties.dtype, tensor.size) for name, tensor in stored.items()}


def _metadata(reader: Reader, found: Found) -> Metadata:
    try:
        metadata = reader.read_metadata()
    except DamageError as damage:
        raise _changed(found, damage) from damage
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    return metadata


def _fill(reader: Reader, metadata: Metadata, tensors: Mapping[str, Tensor], found: Found) -> None:
    """DCP plans which boxes of which chunks make up this rank's shards; no rank needs to know another's plan."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except DamageError as damage:
        raise _changed(found, damage) from damage


def _read_whole(name: str, metadata: Metadata, chunks: ChunkReader, found: Found) -> Tensor:
    stored = stored_tensor(metadata, name)
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    for chunk in stored.chunks if whole.numel() else []:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        target = whole
        for dimension, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dimension, offset, length)
        origin = torch.Size([0] * len(chunk.sizes))
        try:
            target.copy_(chunks.box(place, whole.dtype, chunk.sizes, origin, chunk.sizes))
        except DamageError as damage:
            raise _changed(found, damage) from damage
    return whole


def _check_names(found: Found, asked: set[str], metadata: Metadata, allow_unused: bool) -> None:
    stored = set(metadata.state_dict_metadata)
    if missing := sorted(asked - stored):
        raise UserError(
            f"checkpoint {found.folder} lacks {len(missing)} of the {len(asked)} tensors asked for: {_some(missing)}. "
            "It was saved by a run with another model or optimizer"
        )
    if not allow_unused and (unused := sorted(stored - asked)):
        raise UserError(
            f"checkpoint {found.folder} holds {len(unused)} tensors that this run does not have: {_some(unused)}. "
            "It was saved by a run with another model or optimizer"
        )


def _check_shapes(found: Found, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    differ = [
        f"{name} is {tuple(stored_tensor(metadata, name).size)} there and {tuple(tensor.shape)} here"
        for name, tensor in tensors.items()
        if stored_tensor(metadata, name).size != tensor.shape
    ]
    if differ:
        raise UserError(f"checkpoint {found.folder} has {len(differ)} tensors of another shape: {_some(differ)}")


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _changed(found: Found, damage: DamageError) -> RunError:
    return RunError(
        f"checkpoint {found.folder} changed on disk or is read wrongly since it was checked: {damage}. "
        "Start again: an older checkpoint is used if the damage stays"
    )
