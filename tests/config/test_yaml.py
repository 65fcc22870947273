"""The run file is YAML 1.2, and what is no YAML is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.yaml12 import read_file, read_text, write_text
from fivefold.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("2e12", 2e12),
        ("15e9", 15e9),
        ("1e3", 1000.0),
        ("-1", -1),
        ("-1e-3", -1e-3),
        (".5", 0.5),
        (".inf", float("inf")),
        ("010", 10),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("1f1b", "1f1b"),
        ("30min", "30min"),
        ("2024-01-01", "2024-01-01"),
        ("12:30:45", "12:30:45"),
        ("=", "="),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[{path: x}]", [{"path": "x"}]),
    ],
)
def test_a_word_means_what_yaml_1_2_says(text: str, value: object) -> None:
    found = read_text(text, "here").value
    assert found == value
    assert type(found) is type(value)


def test_an_anchor_gives_each_use_a_value_of_its_own() -> None:
    value = read_text("a: &x {k: 1}\nb: *x\nc: {<<: *x, l: 2}\nd: {<<: *x, k: 3}", "here").value
    assert value == {"a": {"k": 1}, "b": {"k": 1}, "c": {"k": 1, "l": 2}, "d": {"k": 3}}
    assert value["a"] is not value["b"]


def test_every_value_knows_its_line() -> None:
    places = read_text("a: 1\nb:\n- c: 2\n- 3\n", "f.yaml").places
    assert places["b", 0, "c"].where == "f.yaml line 3"
    assert places["b", 1].where == "f.yaml line 4"


def test_the_place_of_a_value_is_the_line_of_its_key() -> None:
    # A key without a value was placed on the line after it, a section on the line of its first key.
    places = read_text("a: 1\nb:\n\nc:\n  d: &x {e: 1}\n  f:\ng: *x\n", "f.yaml").places
    lines = {key: int(places[key].where.removeprefix("f.yaml line ")) for key in places if key}
    assert lines == {("a",): 1, ("b",): 2, ("c",): 4, ("c", "d"): 5, ("c", "d", "e"): 5, ("c", "f"): 6, ("g",): 7} | {
        ("g", "e"): 5
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "`a` is given twice, in line 1 and in line 3"),
        ("o:\n  lr: 1\n  x: 2\n  lr: 3\n", "`o.lr` is given twice, in line 2 and in line 4"),
        ("a: 1\nb: [1, 2\n", "f.yaml line 3 is not valid YAML"),
        ("a: 1\nb:\n\t- c\n", "f.yaml line 3 is not valid YAML"),
        ("a: b: c", "f.yaml line 1 is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "f.yaml line 2 is not valid YAML"),
        ("a: *gone\n", "f.yaml line 1 is not valid YAML"),
        ("a: 1\nb: !!python/object:os.system x\n", "f.yaml line 2: the tag"),
        ("a: 1\nb: !mine [1]\n", "f.yaml line 2: the tag `!mine`"),
        ("a: &x [*x]\n", "f.yaml line 1: the alias `*x` contains itself"),
        ("[1, 2]: 3\n", "f.yaml line 1: a key must be a word"),
        ("a: {<<: 3}\n", "f.yaml line 1: `<<` merges a mapping"),
        ("a: \x01\n", "f.yaml is not valid YAML"),
        ("a: " + "[" * 500, "f.yaml is nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read_text(text, "f.yaml")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_that_multiply_each_other_end_in_a_message() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(UserError, match="more than 100000 values"):
        read_text("\n".join(lines), "f.yaml")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- 1\n- 2\n", "holds a list; it must hold keys and values"),
        (b"hello", "holds the single value 'hello'"),
        (b"name: \xff\xfe", "is not UTF-8 text: byte 6 is 0xff"),
        (b"\x80\x04\x95", "is not UTF-8 text: byte 0 is 0x80"),
    ],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "f.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / "f.yaml")
    assert expected in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_file(tmp_path / "gone.yaml")
    with pytest.raises(UserError, match="is a folder"):
        read_file(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_no_content(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfname: a\r\nsteps: 3\r\n")
    assert read_file(tmp_path / "f.yaml").value == {"name": "a", "steps": 3}


PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("text", ["?a", "a: b", "a,b", "- a", "off", "1e3", "010", "=", "", " a", "x " * 200, "a\nb\t"])
def test_a_text_stays_that_text_as_key_and_as_value(text: str) -> None:
    value = {"outer": {"inner": [text], text: text, "last": 1}}
    assert read_text(write_text(value), "here").value == value


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read_text(write_text(value), "here").value == value
