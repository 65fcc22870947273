"""A model written as a Hugging Face directory that transformers loads: config, generation config, tokenizer, weights.

Tensors are asked for one at a time and written shard by shard, so that memory holds about two shards and not a model.
The directory is made under a temporary name, flushed to disk and renamed: it is there whole, or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.config.huggingface import TokenIds, hf_token_ids
from fivefold.config.run import Model
from fivefold.durable import sync, sync_tree
from fivefold.errors import RunError, UserError
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_entry import AnyEntry
from fivefold.model.hf_tokenizer import write_tokenizer
from fivefold.model.spec import vocabulary
from fivefold.outputs import check_folder

Format = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shard:
    """One file and the tensors that go into it, in the model's order."""

    file: str
    names: tuple[str, ...]


def export(
    target: Path,
    model: Model,
    adaptor: HFAdaptor,
    parameter: Callable[[str], Tensor],
    ids: TokenIds,
    tokenizer: Path | None,
    dtype: Format = "fp32",
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `target`, a directory that must be absent or empty.

    `parameter` gives the whole tensor of a name of ours, a parameter or a buffer that files hold, on any device, in any
    floating type; it is called once a name, in the order of the adaptor's entries. `tokenizer` is a tokenizer.json, or
    a directory that holds one; None leaves it out. A file holds `shard_bytes` at most, or one tensor that is larger.

    Raises UserError, before any weight is read, if the target is taken, the ids lie outside of the vocabulary or the
    format cannot express the model; RunError if a tensor has another shape than the model's, or the disk refuses it.
    """
    _refuse_taken(target)
    _refuse_ids(model, ids)
    config = adaptor.config(model, ids, str(DTYPES[dtype]).removeprefix("torch."))
    partial = target.parent / f".{target.name}.partial"  # a killed export's remains have the same name
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", hf_token_ids(ids))
        if tokenizer is not None:
            write_tokenizer(tokenizer, partial, ids, model)
        _write_weights(partial, model, adaptor, parameter, DTYPES[dtype], shard_bytes)
        sync_tree(partial)
        partial.replace(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{target} could not be written, and nothing of it is left: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[Shard]:
    """Names in order, cut into files of at most `shard_bytes`; `sizes` are the tensors' bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    files = (f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [Shard(file, tuple(names)) for file, names in zip(files, groups, strict=True)]


def _write_weights(
    folder: Path,
    model: Model,
    adaptor: HFAdaptor,
    parameter: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    entries = adaptor.entries(model)
    sizes = {name: size for entry in entries for name, size in _sizes(entry, dtype).items()}
    shards = plan_shards(sizes, shard_bytes)
    tensors = _tensors(entries, parameter, dtype)
    for shard in shards:
        save_file(dict(islice(tensors, len(shard.names))), folder / shard.file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _sizes(entry: AnyEntry, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tensor of an entry as it is written, its copies behind it."""
    each = _written(entry, dtype).itemsize
    sizes = {name: prod(shape) * each for name, shape in entry.theirs.items()}
    return sizes | {name: prod(entry.shape) * each for name in entry.copies}


def _written(entry: AnyEntry, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if entry.exact else dtype


def _tensors(
    entries: Sequence[AnyEntry], parameter: Callable[[str], Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Their name and tensor, each alone in its memory, one of our parameters at a time."""
    for entry in entries:
        parts = entry.split(parameter(entry.ours).detach().cpu())
        for (name, shape), part in zip(entry.theirs.items(), parts, strict=True):
            if tuple(part.shape) != shape:
                raise RunError(f"{entry.ours} gives {name} in shape {tuple(part.shape)}, the model wants {shape}")
            alone = _alone(part.to(_written(entry, dtype)))
            yield name, alone
            for copy in entry.copies:
                yield copy, alone.clone()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _refuse_taken(target: Path) -> None:
    check_folder(target)
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a directory that is empty or not there yet")
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty; name another directory, or remove it first")


def _refuse_ids(model: Model, ids: TokenIds) -> None:
    for role, number in [("bos", ids.bos), *(("eos", eos) for eos in ids.eos), ("pad", ids.pad)]:
        if number is not None and not 0 <= number < vocabulary(model):
            raise UserError(f"the {role} id {number} is outside of the model's vocabulary of {vocabulary(model)}")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
