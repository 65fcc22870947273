"""Hugging Face's config.json to and from the model fields of the run file; and the files of a directory or hub id.

Reading is strict: whatever would change what the model computes and has no field of ours is refused, all of it in one
message, because a setting left unread gives a model that looks right and drifts. No torch and no transformers;
`huggingface_hub` is imported when a hub id has to be fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold import plugins
from fivefold.config.huggingface_checks import Config
from fivefold.config.huggingface_types import READERS, WRITERS
from fivefold.config.run import Model
from fivefold.errors import UserError


@dataclass(frozen=True)
class TokenIds:
    """Ids of the special tokens, as config.json, generation_config.json and the tokenizer must agree on them."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Any of these ends a generation; the first is the end-of-document token."""
    pad: int | None = None


def model_fields(config: Config) -> dict[str, Any]:
    """The fields of `config.run.Model` that a transformers config.json describes.

    Built in are the model types llama, mistral and mixtral (without sliding window), qwen3, qwen3_moe, deepseek_v3 and
    bloom; others register a function like this one, by model type, under the entry point `fivefold.huggingface`. Raises
    UserError that lists everything Fivefold cannot represent.
    """
    return plugins.find("huggingface", model_type(config), READERS)(config)


def model_type(config: Config) -> str:
    """The `model_type` of a config.json. Raises UserError if there is none."""
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"config.json names no model_type (it has {', '.join(sorted(config)[:8]) or 'no keys'})")
    return config["model_type"]


def hf_config(model: Model, ids: TokenIds, dtype: str) -> Config:
    """The config.json of a built-in family; `dtype` is that of the stored weights, such as "float32".

    Rope settings are written in both styles, with equal values: `rope_theta` and `rope_scaling` for transformers 4 and
    most serving engines, `rope_parameters` for transformers 5. Raises UserError that lists what the format cannot say.
    """
    if model.family not in WRITERS:
        raise UserError(f"family {model.family!r} has no built-in config.json; known are {', '.join(WRITERS)}")
    return WRITERS[model.family](model) | {
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "vocab_size": model.vocab,
        "use_cache": True,
        "torch_dtype": dtype,
        **hf_token_ids(ids),
    }


def hf_token_ids(ids: TokenIds) -> dict[str, int | list[int] | None]:
    """The three entries that config.json and generation_config.json share; one end id is a number, several a list."""
    eos = None if not ids.eos else ids.eos[0] if len(ids.eos) == 1 else list(ids.eos)
    return {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}


def token_ids(config: Config, generation_config: Config | None = None) -> TokenIds:
    """Special ids of a Hugging Face directory.

    An id that generation_config.json gives wins, as in transformers' generate; one that it leaves out, or an empty
    file, never hides the one in config.json.
    """

    def pick(key: str) -> Any:
        chosen = (generation_config or {}).get(key)
        return config.get(key) if chosen is None else chosen

    eos = pick("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TokenIds(bos=pick("bos_token_id"), eos=eos, pad=pick("pad_token_id"))


def read_json(file: Path) -> Config:
    """A JSON object from a file. Raises UserError with the file, and the line where it breaks."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def read_config(source: str) -> Config:
    """config.json of a directory or a hub id. Raises UserError if there is none."""
    return read_json(_file(source, "config.json"))


def weights_directory(source: str) -> Path:
    """The directory that holds config, weights and tokenizer; a hub id is fetched into the hub's cache first."""
    if Path(source).is_dir():
        return Path(source)
    hub = _hub(source)
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    return Path(_fetched(source, lambda: hub.snapshot_download(source, allow_patterns=patterns)))


def read_token_ids(directory: Path) -> TokenIds:
    """Special ids of a Hugging Face directory; a generation_config.json that is absent or empty hides nothing."""
    generation = directory / "generation_config.json"
    return token_ids(read_json(directory / "config.json"), read_json(generation) if generation.exists() else None)


def _file(source: str, name: str) -> Path:
    if Path(source).is_dir():
        return Path(source) / name
    hub = _hub(source)
    return Path(_fetched(source, lambda: hub.hf_hub_download(source, name)))


def _hub(source: str) -> Any:
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{source} is neither a directory nor a hub id such as owner/name")
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"{source} is no directory here; to fetch it from the Hugging Face hub: pip install 'fivefold[hf]'"
        ) from None
    return huggingface_hub


def _fetched(source: str, fetch: Callable[[], str]) -> str:
    try:
        return fetch()
    except Exception as error:  # the hub's client raises its own, requests' and the file system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{source} is no directory here, and the Hugging Face hub did not give it: {reason}") from None
