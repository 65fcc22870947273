"""Where each tensor lies in a checkpoint's files: DCP's metadata as JSON.

A tensor is a dtype, a shape and chunks, boxes that cover it once; a chunk is a range of bytes in one file with a
checksum for each block of 16 MiB, so a rank that needs a slice reads and proves the blocks of that slice only. JSON
and not DCP's pickle: it can be read by eye and by any language, and reading it runs no code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

TENSORS = "tensors.json"


@dataclass(frozen=True)
class Place:
    """Bytes [start, start + bytes) of a file, row-major elements; one checksum for each block."""

    file: str
    start: int
    bytes: int
    xxh3: tuple[str, ...]


def encode(metadata: Metadata) -> bytes:
    """The file's bytes. `metadata.storage_data` maps a chunk's index to its `Place`."""
    stored = {name: stored_tensor(metadata, name) for name in sorted(metadata.state_dict_metadata)}
    tensors = {
        name: {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": [_encode_chunk(name, chunk, metadata) for chunk in tensor.chunks],
        }
        for name, tensor in stored.items()
    }
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
    return f"{{\n{lines}\n}}\n".encode()


def decode(raw: bytes) -> Metadata:
    """DCP's metadata from the file's bytes, which must have been proven by the manifest."""
    tensors: dict[str, STORAGE_TYPES] = {}
    places = {}
    for name, tensor in json.loads(raw).items():
        chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
        properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        for chunk in tensor["chunks"]:
            place = Place(chunk["file"], chunk["start"], chunk["bytes"], tuple(chunk["xxh3"]))
            places[MetadataIndex(name, chunk["offsets"])] = place
    return Metadata(tensors, storage_data=places)


def stored_tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """Dtype, shape and chunks of one tensor."""
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata), f"{name}: only tensors are stored"
    return tensor


def _encode_chunk(name: str, chunk: ChunkStorageMetadata, metadata: Metadata) -> dict[str, Any]:
    place: Place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": place.file,
        "start": place.start,
        "bytes": place.bytes,
        "xxh3": list(place.xxh3),
    }
