"""The safetensors files of a Hugging Face directory: names, shapes and types from their headers, and boxes of tensors.

A tensor in fp8 with one scale a block, DeepSeek-V3's release format, is read as the fp32 numbers that it stands for.
No architecture is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.config.huggingface import read_json
from fivefold.config.huggingface_checks import fp8_blocks
from fivefold.errors import UserError
from fivefold.model.hf_entry import Box, Shape

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FLOATING = ("F64", "F32", "BF16", "F16")
FP8, SCALE = "F8_E4M3", "_scale_inv"


class WeightFiles:
    """The tensors of a directory's safetensors files, by name, read when they are asked for."""

    def __init__(self, directory: Path) -> None:
        """Open one file or the shards that an index lists.

        Raises UserError if there are none or both, or a shard is missing, damaged, or differs from the index.
        """
        self.directory = directory
        self._opened = _opened(directory)
        self._file_of = {name: file for file, opened in self._opened.items() for name in opened.keys()}  # noqa: SIM118
        _agree(directory, self._file_of)
        config = directory / CONFIG
        self._block = fp8_blocks(read_json(config)) if config.exists() else None
        self._scaled = {name for name in self._file_of if name + SCALE in self._file_of and self._type(name) == FP8}

    @property
    def names(self) -> set[str]:
        """Names of all tensors but the scales of others."""
        return set(self._file_of) - {name + SCALE for name in self._scaled}

    def shape(self, name: str) -> Shape:
        """A tensor's shape, from the header."""
        return tuple(self._slice(name).get_shape())

    def type_problem(self, name: str) -> str | None:
        """Why a tensor's numbers cannot be read, from the headers; None if they can."""
        kind = self._type(name)
        if kind in FLOATING:
            return None
        if kind != FP8:
            return f"{name} is {kind}, not one of {', '.join(FLOATING)}"
        if self._block is None:
            return f"{name} is {kind}, but config.json has no quantization_config of method fp8 with a block's size"
        if name not in self._scaled:
            return f"{name} is {kind} without {name}{SCALE}"
        wanted = tuple(-(-size // block) for size, block in zip(self.shape(name), self._block, strict=False))
        if len(self.shape(name)) != 2 or self.shape(name + SCALE) != wanted:
            sizes = f"{self.shape(name)} has scales {self.shape(name + SCALE)}"
            return f"{name} {sizes}, not one for each block of {self._block[0]} x {self._block[1]}"
        return None if self._type(name + SCALE) in FLOATING else f"{name}{SCALE} is {self._type(name + SCALE)}"

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        return self.box(name, tuple((0, size) for size in self.shape(name)))

    def box(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, on the CPU; no more is read, but of fp8 the scales of the blocks that it touches."""
        piece = self._slice(name)[tuple(slice(*bounds) for bounds in box)]
        if name not in self._scaled:
            return piece
        assert self._block is not None, "the types were checked"
        blocks = [(first // size, -(-last // size)) for (first, last), size in zip(box, self._block, strict=True)]
        scales = self._slice(name + SCALE)[tuple(slice(*bounds) for bounds in blocks)]
        return dequantized(piece, scales, box, self._block)

    def _slice(self, name: str) -> Any:
        return self._opened[self._file_of[name]].get_slice(name)

    def _type(self, name: str) -> str:
        return self._slice(name).get_dtype()


def dequantized(piece: Tensor, scales: Tensor, box: Box, block: tuple[int, int]) -> Tensor:
    """The fp32 numbers of a box of an fp8 matrix: each times the scale of its block.

    `scales` are those of the blocks that the box touches, whose first may begin before it and whose last may end
    behind the matrix. Source: `weight_dequant` in DeepSeek-V3's inference code.
    """
    of_rows, of_columns = (
        torch.arange(first, last) // size - first // size for (first, last), size in zip(box, block, strict=True)
    )
    return piece.float() * scales.float()[of_rows][:, of_columns]


def _opened(directory: Path) -> Mapping[str, Any]:
    """The files by name, opened."""
    single, index = (directory / SINGLE).exists(), (directory / INDEX).exists()
    if single and index:
        raise UserError(f"{directory} holds {SINGLE} and {INDEX}: delete the one that is stale")
    if not single and not index:
        raise UserError(f"{directory} has no {SINGLE} and no {INDEX}; only safetensors are read{_other(directory)}")
    files = sorted(set(_listed(directory).values())) if index else [SINGLE]
    return {file: _open(directory / file) for file in files}


def _open(file: Path) -> Any:
    if not file.exists():
        raise UserError(f"{file} is missing, which {INDEX} lists")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or no safetensors file: {error}") from None


def _agree(directory: Path, file_of: Mapping[str, str]) -> None:
    if (directory / INDEX).exists() and (listed := _listed(directory)) != file_of:
        differing = sorted(set(listed.items()) ^ set(file_of.items()))[:3]
        examples = ", ".join(f"{name} in {file}" for name, file in differing)
        raise UserError(f"{directory / INDEX} and the shards differ, for example: {examples}")


def _listed(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{directory / INDEX} has no weight_map")
    return weight_map


def _other(directory: Path) -> str:
    others = sorted(path.name for path in directory.glob("*.bin"))
    return f"; convert {others[0]} with transformers' save_pretrained(safe_serialization=True)" if others else ""
