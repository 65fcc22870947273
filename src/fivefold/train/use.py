"""Using what was trained, in one process: a run's newest checkpoint as a Hugging Face directory or as a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.checkpoint.find import Found, open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.config.files import load_run
from fivefold.config.huggingface import TokenIds
from fivefold.config.run import Run
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.model.family import family
from fivefold.model.hf_export import export
from fivefold.parallel.zero import DTYPES
from fivefold.train.build import empty_model
from fivefold.train.folder import RUN_FILE
from fivefold.train.generate import generate
from fivefold.train.sources import tokenizer_of


def export_run(
    run_folder: Path, to: Path, *, dtype: Literal["fp32", "bf16", "fp16"] = "fp32", step: int | None = None
) -> None:
    """Write the model of a checkpoint as a directory that transformers loads.

    Raises UserError if there is no run, no such checkpoint, or no format for the model's family.
    """
    run, found = open_run(run_folder, step)
    adaptor = family(run.model).huggingface
    if adaptor is None:
        raise UserError(f"the family {run.model.family} has no Hugging Face format; it brings one as `huggingface`")
    tokenizer = tokenizer_of(run_folder) if (run_folder / "tokenizer.json").is_file() else None
    ids = TokenIds() if tokenizer is None else TokenIds(bos=tokenizer.bos, eos=(tokenizer.eod,))
    weights = _weights(found, [entry.ours for entry in adaptor.entries(run.model)])

    def parameter(name: str) -> Tensor:
        stored, tensor = next(weights)
        assert stored == name, f"the export asks for {name} where {stored} comes next"
        return tensor

    export(to, run.model, adaptor, parameter, ids, run_folder if tokenizer else None, dtype)


def generate_text(
    run_folder: Path,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """`prompt` and what the model of a checkpoint adds to it; the same seed gives the same text.

    Raises UserError if there is no run or checkpoint, or if the settings make no sense.
    """
    run, found = open_run(run_folder, step)
    tokenizer = tokenizer_of(run_folder)
    tokens = tokenizer.encode(prompt) or [tokenizer.eod]
    continuation = generate(
        load_model(run, found),
        tokens,
        max_tokens,
        context=run.model.context,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eod=tokenizer.eod,
        generator=torch.Generator().manual_seed(seed),
    )
    return _text(tokenizer, tokens, continuation)


def open_run(run_folder: Path, step: int | None) -> tuple[Run, Found]:
    """The run in a folder and its checkpoint of `step`, or the newest whole one. Raises UserError."""
    if not (run_folder / RUN_FILE).is_file():
        raise UserError(f"{run_folder} holds no {RUN_FILE}: name the folder of a run, such as runs/tiny")
    return load_run(run_folder / RUN_FILE), open_checkpoint(run_folder, step)


def load_model(run: Run, found: Found) -> nn.Module:
    """The model of a checkpoint in one piece, in the run's compute format (fp32 on a CPU without better)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[run.precision.compute] if device.type == "cuda" or run.precision.compute == "fp64" else torch.float32
    model = empty_model(run.model, dtype, device)
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in _weights(found, list(parameters)):
            parameters[name].copy_(tensor)
    return model.eval()


def _weights(found: Found, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in read_full(found, [f"model.{name}" for name in names]):
        yield name.removeprefix("model."), tensor


def _text(tokenizer: Tokenizer, prompt: list[int], continuation: Iterator[int]) -> str:
    return tokenizer.decode([*prompt, *continuation])
