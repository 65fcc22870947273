"""The tokenizer's files of an exported model: the tokenizer.json as it is, and what names its special tokens.

The ids in config.json and generation_config.json and the tokens named here must be the same; they are checked against
the tokenizer.json before anything is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
    tokens = _special_tokens(file, ids, model)
    settings = file.parent / "tokenizer_config.json"
    kept = read_json(settings) if settings.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {"bos_token": tokens["bos"], "eos_token": tokens["eos"], "pad_token": tokens["pad"]}
    config = {"clean_up_tokenization_spaces": False, "model_max_length": model.context} | kept | named
    shutil.copyfile(file, target / "tokenizer.json")
    for name in COPIED:
        if (file.parent / name).exists():
            shutil.copyfile(file.parent / name, target / name)
    _write(target / "tokenizer_config.json", config)
    _write(target / "special_tokens_map.json", {role: token for role, token in named.items() if token is not None})


def _special_tokens(file: Path, ids: TokenIds, model: Model) -> dict[str, str | None]:
    from tokenizers import Tokenizer

    if not file.exists():
        raise UserError(f"{file} does not exist: the tokenizer cannot be exported")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{file} is no tokenizer.json: {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocabulary(model):
        raise UserError(f"{file} has token id {largest}, but the model's vocabulary is {vocabulary(model)}")

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


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
