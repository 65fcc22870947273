"""The tokenizer's policy: one beginning, one end, special-token text as text; loading from every kind of place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from fivefold.data.tokenizer import END_OF_TEXT, PIECE, Tokenizer, cut_at_lines, train
from fivefold.data.words import SPLIT, SPLIT_DIGITS, WordEncoder, word_encoder
from fivefold.errors import UserError

TEXT = [
    "def main(argument):\n    return 'It''s here'  # comment 12345\n\n\nThe end.\r\n",
    "Grüße aus dem Süden, 东京 👍 it's",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train(TEXT * 50, 400)


def test_a_trained_tokenizer_gives_back_any_text(trained: Tokenizer) -> None:
    for text in (*TEXT, "\x00\x01 tab\t", "ÿ\u3000𝔘", ""):
        assert trained.decode(trained.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer(trained: Tokenizer) -> None:
    assert train(TEXT * 50, 400).to_json() == trained.to_json()


def test_the_vocabulary_has_at_most_the_size_asked_for() -> None:
    assert train(TEXT * 50, 270).vocab_size == 270
    assert 257 <= train(["abc"], 300).vocab_size <= 300
    with pytest.raises(UserError, match="a vocabulary of 256 is too small"):
        train(TEXT, 256)


@pytest.mark.parametrize(
    "text", [f"before {END_OF_TEXT} after", END_OF_TEXT, f"Grüße {END_OF_TEXT} 东京", f"é\n{END_OF_TEXT}"]
)
def test_the_name_of_a_special_token_inside_a_text_stays_text(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.eod not in ids
    assert trained.decode(ids) == text


def test_saving_and_loading_changes_nothing(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(place)
        assert (loaded.to_json(), loaded.eod, loaded.bos) == (trained.to_json(), trained.eod, None)
        assert loaded.encode(f"a{END_OF_TEXT}") == trained.encode(f"a{END_OF_TEXT}")


def test_the_policy_is_written_beside_the_tokenizer(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["fivefold"] == {
        "document": "tokens, eod",
        "prompt": "tokens",
        "special_token_text": "encoded as text",
    }
    assert (config["eos_token"], config["bos_token"], config["add_bos_token"]) == (END_OF_TEXT, None, False)


def adding(trained: Tokenizer, single: str, eos: str = "</s>", **config: object) -> tokenizers.Tokenizer:
    """The trained tokenizer with <s> and </s>, whose post-processor adds what `single` says."""
    inner = tokenizers.Tokenizer.from_str(trained.to_json())
    inner.add_special_tokens(["<s>", "</s>"])
    names = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    return inner


def save(inner: tokenizers.Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("single", ["<s> $A </s>", "<s> $A", "<s> <s> $A"])
def test_a_post_processor_that_adds_bos_and_eos_gives_one_bos(trained: Tokenizer, tmp_path: Path, single: str) -> None:
    # It was added by the template, the post-processor and the caller, up to three times (in other systems).
    folder = save(adding(trained, single), tmp_path / "in", bos_token="<s>", eos_token={"content": "</s>"})
    loaded = Tokenizer.load(folder)
    bos, eod = loaded.inner.token_to_id("<s>"), loaded.inner.token_to_id("</s>")
    assert (loaded.bos, loaded.eod) == (bos, eod)
    ids = loaded.encode("text with <s> and </s>")
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert eod not in ids
    loaded.save(tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").encode("a b") == loaded.encode("a b")


@pytest.mark.parametrize("names", [{}, {"eos_token": "</s>"}, {"eos_token": "</s>", "bos_token": "</s>"}])
def test_a_post_processor_that_adds_only_an_end_gives_no_beginning(
    trained: Tokenizer, tmp_path: Path, names: dict[str, str]
) -> None:
    # The end token was taken for the beginning, because it was all that an empty text was given.
    from transformers import AutoTokenizer

    loaded = Tokenizer.load(save(adding(trained, "$A </s>"), tmp_path / "in", **names), "</s>")
    assert (loaded.bos, loaded.token(loaded.eod)) == (None, "</s>")
    assert loaded.encode("a b") == trained.encode("a b")
    loaded.save(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a b").input_ids == trained.encode("a b")


@pytest.mark.parametrize("single", ["</s> $A", "</s> $A </s>", "$A </s>"])
def test_one_token_may_be_both_beginning_and_end(trained: Tokenizer, tmp_path: Path, single: str) -> None:
    names = {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    loaded = Tokenizer.load(save(adding(trained, single), tmp_path / "in", **names))
    assert loaded.bos == loaded.eod
    assert loaded.encode("a b") == [loaded.bos, *trained.encode("a b")]
    assert loaded.inner.encode("a b").ids == loaded.encode("a b")


def test_a_beginning_is_found_in_a_vocabulary_without_the_letter_a(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE({"x": 0}, []))
    inner.add_special_tokens(["<s>", "</s>"])
    names = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=names)
    loaded = Tokenizer.load(save(inner, tmp_path / "in", eos_token="</s>"))
    assert loaded.bos == inner.token_to_id("<s>")


def test_transformers_begins_a_text_as_we_do(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save(adding(trained, "<s> $A </s>"), tmp_path / "in", bos_token="<s>", eos_token="</s>")
    for number, ours in enumerate((trained, Tokenizer.load(folder))):
        ours.save(tmp_path / str(number))
        theirs = AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert theirs("It's a text").input_ids == ours.encode("It's a text")
        assert theirs.eos_token_id == ours.eod


def test_a_config_that_says_no_bos_is_believed(trained: Tokenizer, tmp_path: Path) -> None:
    said = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    assert Tokenizer.load(save(adding(trained, "<s> $A"), tmp_path / "a", **said)).bos is None
    said["add_bos_token"] = True
    assert Tokenizer.load(save(adding(trained, "$A"), tmp_path / "b", **said)).bos is not None


def test_an_end_token_that_is_not_marked_special_still_never_comes_from_text(
    trained: Tokenizer, tmp_path: Path
) -> None:
    inner = tokenizers.Tokenizer.from_str(trained.to_json())
    inner.add_tokens(["<end>"])
    loaded = Tokenizer.load(save(inner, tmp_path / "in", eos_token="<end>"))
    assert loaded.eod == inner.token_to_id("<end>")
    assert loaded.eod not in loaded.encode("a <end> b")


def test_truncation_and_padding_stored_in_the_file_are_switched_off(trained: Tokenizer, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(trained.to_json())
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    folder = save(inner, tmp_path / "in", eos_token=END_OF_TEXT)
    assert Tokenizer.load(folder).encode("Grüße, 12345 words") == trained.encode("Grüße, 12345 words")


def test_an_unclear_end_of_document_asks_for_its_name(trained: Tokenizer, tmp_path: Path) -> None:
    folder = save(adding(trained, "$A"), tmp_path / "in")
    with pytest.raises(UserError, match=r"no end-of-document token is named .*<s>.*--end-token"):
        Tokenizer.load(folder)
    assert Tokenizer.load(folder, "</s>").token(Tokenizer.load(folder, "</s>").eod) == "</s>"
    with pytest.raises(UserError, match="'<eot>' is not in the vocabulary"):
        Tokenizer.load(folder, "<eot>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="is no tokenizer that can be read"):
        Tokenizer.load(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"no tokenizer at nobody/no-such-model: not a file or folder here, and the .* hub said"
    ):
        Tokenizer.load("nobody/no-such-model")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "tokenizer_config.json is not valid JSON"),
        (b"\xff\xfe\x00", "tokenizer_config.json is not valid JSON"),
        (b"[1]", r"tokenizer_config.json holds no JSON object, but '\[1\]'"),
        (b'{"eos_token": 3}', "eos_token is 3 .* it must be the text of a token"),
        (b'{"eos_token": {"content": ["a"]}}', "eos_token is .* it must be the text of a token"),
        (
            b'{"eos_token": "<|endoftext|>", "add_bos_token": true, "bos_token": "<gone>"}',
            "texts begin with '<gone>', .* not in the vocabulary",
        ),
    ],
)
def test_a_broken_config_beside_a_tokenizer_is_named(
    trained: Tokenizer, tmp_path: Path, content: bytes, says: str
) -> None:
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(UserError, match=says):
        Tokenizer.load(tmp_path)


def test_a_hub_id_is_fetched_through_the_hub_library(
    trained: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.save(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path) if name == "someone/model" else ""
    )
    assert Tokenizer.load("someone/model").to_json() == trained.to_json()


def library(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.inner.encode(text, add_special_tokens=False).ids


FRAGMENTS = [
    *"ab'sStT lLvV\n\r\t 019.,#_é東\u3000\x1c\x85",
    "\n\n",
    "\n\n\n",
    "\n    ",
    "return",
    "'It''s",
    "12345",
    "main",
    ".\r\n",
]
WORDS = st.lists(st.sampled_from(FRAGMENTS)).map("".join) | st.text(st.characters(codec="utf-8"))


@settings(max_examples=300, deadline=None)
@example(text="é\n\n\nThe end")
@given(text=WORDS)
def test_encoding_by_known_words_is_that_of_the_library(trained: Tokenizer, text: str) -> None:
    assert trained.encode(text) == library(trained, text)


def test_words_are_used_for_the_known_rules_only(trained: Tokenizer) -> None:
    assert isinstance(word_encoder(trained.inner), WordEncoder)
    other = tokenizers.Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert word_encoder(other) is None
    plain = tokenizers.Tokenizer.from_str(trained.to_json())
    plain.add_tokens(["main"])  # matched before words are cut
    assert word_encoder(plain) is None


def test_qwens_rule_is_known_too(trained: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(json.dumps(json.loads(trained.to_json())).replace("{1,3}", ""))
    assert json.dumps(SPLIT_DIGITS) in inner.to_str()
    assert json.dumps(SPLIT) not in inner.to_str()
    digits = Tokenizer(inner, trained.eod)
    assert digits._words is not None
    assert digits.encode("12345 is a number") == library(digits, "12345 is a number")


def test_forgetting_words_changes_nothing(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.words.MOST_WORDS", 5)
    fresh = Tokenizer(tokenizers.Tokenizer.from_str(trained.to_json()), trained.eod)
    for text in TEXT * 3:
        assert fresh.encode(text) == library(trained, text)


def test_long_texts_are_cut_where_a_line_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\n  two\n\nthree\nfour" * 10
    monkeypatch.setattr("fivefold.data.tokenizer.PIECE", 8)
    pieces = list(cut_at_lines(text))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(not piece[0].isspace() for piece in pieces)
    assert list(cut_at_lines("x" * 100)) == ["x" * 100]
    assert PIECE > 1_000_000
