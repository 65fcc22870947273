"""The tokenizer, as training and generation both use it: one policy for beginnings, ends and special-token text.

A document becomes [bos] + tokens + [eod], a prompt [bos] + tokens. bos is there only if the tokenizer's own files ask
for it, and once. The name of a special token inside a text is text: it never becomes the special token. The policy is
written beside the data (tokenizer_config.json, which transformers reads too). Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from fivefold.data.words import SPLIT, WordEncoder, word_encoder
from fivefold.errors import UserError

END_OF_TEXT = "<|endoftext|>"
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]")
SMALLEST_VOCABULARY = 257  # every byte, and the end of a document
PIECE = 1 << 22  # characters of a long document that are encoded at once


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` and its policy, which is imposed on it: what others load from `save` begins alike."""

    inner: tokenizers.Tokenizer
    eod: int
    """Token that ends a document."""
    bos: int | None = None
    """Token that begins a document and a prompt; None for none."""

    def __post_init__(self) -> None:
        head = [] if self.bos is None else [self.bos]
        known = self.inner.get_added_tokens_decoder()
        plain = [number for number in (*head, self.eod) if number not in known or not known[number].special]
        self.inner.add_special_tokens([self.token(number) for number in plain])
        self.inner.encode_special_tokens = True
        if added_around(self.inner) != (head, []):
            names = [(self.token(number), number) for number in head]
            template = " ".join([*(name for name, _ in names), "$A"])
            self.inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the highest id + 1."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def token(self, number: int) -> str:
        """The text of a token. Raises UserError for an id that is not in the vocabulary."""
        text = self.inner.id_to_token(number)
        if text is None:
            raise UserError(f"the tokenizer has no token {number}: its vocabulary has {self.vocab_size}")
        return text

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as the model sees them at a document's beginning: with bos, if there is one, without eod."""
        return self.encode_batch([text])[0]

    @cached_property
    def _words(self) -> WordEncoder | None:
        return word_encoder(self.inner)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, for several texts. Long ones are encoded in pieces that end with a line."""
        head = [] if self.bos is None else [self.bos]
        if (words := self._words) is not None:
            return [head + words.encode(text) for text in texts]
        pieces = [list(cut_at_lines(text)) for text in texts]
        encoded = self.inner.encode_batch_fast([piece for some in pieces for piece in some], add_special_tokens=False)
        parts = iter(encoded)
        return [head + [number for _ in some for number in next(parts).ids] for some in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; special tokens have none."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        """The contents of tokenizer.json: the same for the same tokenizer."""
        return self.inner.to_str(pretty=True)

    def config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.token(self.eod),
            "bos_token": None if self.bos is None else self.token(self.bos),
            "add_bos_token": self.bos is not None,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "fivefold": {
                "document": "tokens, eod" if self.bos is None else "bos, tokens, eod",
                "prompt": "tokens" if self.bos is None else "bos, tokens",
                "special_token_text": "encoded as text",
            },
        }

    def files(self) -> dict[str, str]:
        """tokenizer.json and tokenizer_config.json: the text of each by its name."""
        config = json.dumps(self.config(), indent=1, ensure_ascii=False) + "\n"
        return {FILE: self.to_json(), CONFIG: config}

    def save(self, folder: str | Path) -> None:
        """Write `files` into `folder`, which nobody reads yet."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, source: str | Path, end_token: str | None = None) -> Tokenizer:
        """From a tokenizer.json, a folder that holds one (also a Hugging Face one), or an id on the Hugging Face hub.

        end_token: text of the end-of-document token, where the files name none. Raises UserError.
        """
        path = Path(source)
        if not path.exists():
            path = download(str(source))
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{path} holds no {FILE}; only tokenizers in that format can be read")
        try:
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception for a file that it cannot parse
            raise UserError(f"{file} is no tokenizer that can be read: {error}") from None
        config = read_json(file.parent / CONFIG) | {}
        names = read_json(file.parent / "special_tokens_map.json") | config
        eod = end_of_document(inner, file, end_token or text_of(names, "eos_token", file))
        return cls(inner, eod, begin_of_document(inner, file, names))


def cut_at_lines(text: str) -> Iterator[str]:
    """The text in pieces of at least PIECE characters, cut where a line begins with something other than white space.

    There the usual splitting rules cut too, so that the pieces give the tokens of the whole.
    """
    begin = 0
    while len(text) - begin > PIECE:
        end = text.find("\n", begin + PIECE) + 1
        while 0 < end < len(text) and text[end].isspace():
            end = text.find("\n", end) + 1
        if not 0 < end < len(text):
            break
        yield text[begin:end]
        begin = end
    yield text[begin:]


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` tokens, the end of a document among them (id 0)."""
    if vocab < SMALLEST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocab} is too small: the 256 bytes and the end of a document take {SMALLEST_VOCABULARY}"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, inner.get_vocab()[END_OF_TEXT])


def end_of_document(inner: tokenizers.Tokenizer, file: Path, name: str | None) -> int:
    """Id of the end-of-document token: the one named, else the only usual one among the special tokens."""
    special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
    if name is not None:
        number = inner.token_to_id(name)
        if number is None:
            raise UserError(
                f"{file}: the end-of-document token {name!r} is not in the vocabulary; special tokens are {special}"
            )
        return number
    usual = [each for each in special if each in USUAL_ENDS]
    if len(usual) != 1:
        raise UserError(
            f"{file}: no end-of-document token is named in {CONFIG} (eos_token), and the special tokens {special} "
            "do not show which one it is; name it with --end-token"
        )
    return inner.get_vocab()[usual[0]]


def begin_of_document(inner: tokenizers.Tokenizer, file: Path, names: dict[str, Any]) -> int | None:
    """Id of bos if the tokenizer's files say that a text begins with it, in words or by their post-processor."""
    bos = text_of(names, "bos_token", file)
    before, _ = added_around(inner)
    said = names.get("add_bos_token")
    if said is False or (said is None and not before):
        return None
    if bos is not None:
        number = inner.token_to_id(bos)
        if said and number is None:
            raise UserError(f"{file}: texts begin with {bos!r}, says {CONFIG}, but it is not in the vocabulary")
        return number if said or number in before else None
    return before[0] if before else None


def added_around(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before a text, and what behind it."""
    inner.no_truncation()
    inner.no_padding()
    for text in ("a", *inner.get_vocab(with_added_tokens=False)):
        encoding = inner.encode(text, add_special_tokens=True)
        inside = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
        if inside:
            return encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
    return [], []


def text_of(names: dict[str, Any], key: str, file: Path) -> str | None:
    """The text of the token that `key` names; Hugging Face files give it plainly or as an object with `content`."""
    token = names.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise UserError(f"{file}: {key} is {token!r} in {CONFIG} or beside it; it must be the text of a token")
    return text


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object, but {file.read_text(encoding='utf-8').strip()[:40]!r}")
    return content


def download(name: str) -> Path:
    """Folder of a tokenizer fetched from the Hugging Face hub."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"no tokenizer at {name}; to fetch it from the Hugging Face hub: pip install 'fivefold[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=[FILE, CONFIG, "special_tokens_map.json"]))
    except Exception as error:  # the hub's errors have no common base of use here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"no tokenizer at {name}: not a file or folder here, and the Hugging Face hub said: {reason}"
        ) from None
