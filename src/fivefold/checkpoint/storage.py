"""Our storage layer under torch.distributed.checkpoint: one file a rank, every byte checksummed, all or nothing.

`Writer` and `Reader` are DCP's public StorageWriter and StorageReader, so whatever speaks DCP can read and write these
checkpoints too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fivefold.checkpoint import tensors as tensors_file
from fivefold.checkpoint.chunks import ChunkReader
from fivefold.checkpoint.files import FileRecord, NewFile, write_file
from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.checkpoint.manifest import MANIFEST, Manifest, check_content
from fivefold.checkpoint.tensors import TENSORS, Place, stored_tensor


@dataclass(frozen=True)
class Written:
    """What a rank reports of one chunk: where it lies, and the whole file around it."""

    place: Place
    file: FileRecord


class Writer(StorageWriter):
    """Writes one checkpoint. `manifest_of` makes the manifest from the list of files, on the first rank, at the end."""

    def __init__(
        self, folder: CheckpointFolder, step: int, rank: int, manifest_of: Callable[[list[FileRecord]], Manifest]
    ):
        self.folder = folder
        self.step = step
        self.file = f"rank-{rank:05d}.bin"
        self.manifest_of = manifest_of

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: roles are known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """First rank, before anyone writes: the folder to write into."""
        self.folder.begin(self.step)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, on disk on return. A rank without anything to write makes none."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        places = []
        with NewFile(self.folder.saving(self.step) / self.file) as file:
            for item in plan.items:
                file.align()
                start, data = file.size, bytes_of(planner.resolve_data(item))
                places.append((item.index, Place(self.file, start, len(data), tuple(file.write(data)))))
        return [WriteResult(index, place.bytes, Written(place, file.record)) for index, place in places]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """First rank, after everyone has written: metadata, manifest, and the rename that makes it a checkpoint."""
        saving = self.folder.saving(self.step)
        written = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_data = {index: chunk.place for index, chunk in written.items()}
        files = sorted({chunk.file for chunk in written.values()}, key=attrgetter("name"))
        files.append(write_file(saving / TENSORS, tensors_file.encode(metadata)))
        write_file(saving / MANIFEST, self.manifest_of(files).encode())
        self.folder.commit(self.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """False: this writer is never chosen by a path's looks."""
        return False


class Reader(StorageReader):
    """Reads the tensors of one checkpoint; `manifest` proves its files. Raises `DamageError`."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._chunks = ChunkReader(folder)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a reader has one folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata, proven before it is parsed."""
        check_content(self.folder, self.manifest.record(TENSORS))
        return tensors_file.decode((self.folder / TENSORS).read_bytes())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where the chunks lie."""
        self.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, file by file, front to back."""
        for item in sorted(plan.items, key=lambda item: (self._place(item).file, self._place(item).start)):
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> Tensor:
        """The box that `item` wants of one stored chunk."""
        tensor = stored_tensor(self.metadata, item.storage_index.fqn)
        index = item.storage_index.index
        assert index is not None, "DCP's load plan says which chunk of the tensor it means"
        sizes, dtype = tensor.chunks[index].sizes, tensor.properties.dtype
        return self._chunks.box(self._place(item), dtype, sizes, item.storage_offsets, item.lengths)

    def _place(self, item: ReadItem) -> Place:
        return self.metadata.storage_data[item.storage_index]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """False: this reader is never chosen by a path's looks."""
        return False


def bytes_of(tensor: Any) -> memoryview:
    """The elements of a contiguous CPU tensor of any dtype, row by row."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
