"""The tokenizer's files of an exported model: tokenizer.json, and what names its special tokens.

The ids in config.json and generation_config.json and the tokens named here must be the same; they are checked against
the tokenizer.json before anything is written. A prompt must begin there as the documents did in training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from fivefold.config.huggingface import TokenIds, read_json
from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.spec import vocabulary

COPIED = ("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
"""Files that some tokenizers have beside tokenizer.json, copied as they are."""


def write_tokenizer(source: Path, target: Path, ids: TokenIds, model: Model) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into the directory `target`.

    `source` is a tokenizer.json or a directory that holds one; settings of a tokenizer_config.json beside it are kept,
    except for the special tokens. Raises UserError if there is none, it holds more tokens than the model, or an id has
    no token.
    """
    file = source / "tokenizer.json" if source.is_dir() else source
    tokenizer = _opened(file, model)
    tokens = _special_tokens(tokenizer, file, ids)
    settings = file.parent / "tokenizer_config.json"
    kept = {"tokenizer_class": "PreTrainedTokenizerFast"} | (read_json(settings) if settings.exists() else {})
    named = {"bos_token": tokens["bos"], "eos_token": tokens["eos"], "pad_token": tokens["pad"]}
    config = {"clean_up_tokenization_spaces": False, "model_max_length": model.context} | kept | named
    if _adds_what_it_says(tokenizer, kept, ids):
        shutil.copyfile(file, target / "tokenizer.json")
    else:
        _add_only_bos(tokenizer, tokens["bos"] if kept["add_bos_token"] else None)
        tokenizer.save(str(target / "tokenizer.json"))
    for name in COPIED:
        if (file.parent / name).exists():
            shutil.copyfile(file.parent / name, target / name)
    _write(target / "tokenizer_config.json", config)
    _write(target / "special_tokens_map.json", {role: token for role, token in named.items() if token is not None})


def _opened(file: Path, model: Model) -> Tokenizer:
    if not file.exists():
        raise UserError(f"{file} does not exist: the tokenizer cannot be exported")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} is no tokenizer.json: {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocabulary(model):
        raise UserError(f"{file} has token id {largest}, but the model's vocabulary is {vocabulary(model)}")
    return tokenizer


def _special_tokens(tokenizer: Tokenizer, file: Path, ids: TokenIds) -> dict[str, str | None]:
    def token(role: str, number: int | None) -> str | None:
        text = None if number is None else tokenizer.id_to_token(number)
        if number is not None and text is None:
            raise UserError(f"the {role} id {number} is no token of {file}")
        return text

    for number in ids.eos[1:]:
        token("eos", number)
    return {
        "bos": token("bos", ids.bos),
        "eos": token("eos", ids.eos[0] if ids.eos else None),
        "pad": token("pad", ids.pad),
    }


def _adds_what_it_says(tokenizer: Tokenizer, settings: dict[str, Any], ids: TokenIds) -> bool:
    """Whether tokenizer.json itself adds bos and eos to a text as the settings say, where they say it.

    A training run's settings say it (bos by policy, no eos after a prompt). transformers 5 follows them; transformers 4
    and other readers follow tokenizer.json alone.
    """
    if not {"add_bos_token", "add_eos_token"} <= settings.keys() or settings["add_eos_token"]:
        return True
    said = [ids.bos] if settings["add_bos_token"] else []
    return tokenizer.encode("", add_special_tokens=True).ids == said


def _add_only_bos(tokenizer: Tokenizer, bos: str | None) -> None:
    """Make tokenizer.json add `bos` to a text's beginning, or nothing."""
    begin = [] if bos is None else [(bos, tokenizer.token_to_id(bos))]
    single = "$A" if bos is None else f"{bos} $A"
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=begin)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
