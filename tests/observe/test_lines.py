"""Files of JSON lines: whole after a crash, whole on a full disk, valid JSON whatever the numbers are."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fivefold.observe.lines import LineFile, read_lines, to_json


def everything(path: Path) -> LineFile:
    return LineFile(path, keep=lambda fields: True)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Any file of this process that would grow beyond `limit` bytes: EFBIG, a disk that is full for this file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_is_in_the_file_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    file = everything(tmp_path / "a.jsonl")
    file.append({"step": 1, "loss": 0.1})
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 1, "loss": 0.1}\n'
    file.close()


@pytest.mark.parametrize("number", [0.1 + 0.2, 1e-320, 5.551115123125783e-17, 123456789.123456789, 2**53 + 1])
def test_numbers_come_back_to_the_last_bit(tmp_path: Path, number: float) -> None:
    file = everything(tmp_path / "a.jsonl")
    file.append({"loss": number})
    file.close()
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"loss": number}]


def test_nan_and_infinities_are_valid_json_and_come_back_as_floats(tmp_path: Path) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    path = tmp_path / "a.jsonl"
    file = everything(path)
    file.append({"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "nested": {"list": [math.nan]}})
    file.close()
    json.loads(path.read_text(), parse_constant=refuse)
    (fields,) = read_lines(path)
    assert math.isnan(fields["loss"])
    assert (fields["grad_norm"], fields["low"]) == (math.inf, -math.inf)


def test_text_with_a_newline_stays_on_one_line() -> None:
    assert "\n" not in to_json({"message": "first\nsecond", "path": Path("a/b")})


def test_a_torn_last_line_goes_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "lo')
    file = everything(path)
    file.append({"n": 3})
    file.close()
    assert path.read_text() == '{"n": 1}\n{"n": 3}\n'


def test_a_last_line_that_lacks_only_its_newline_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}')
    file = everything(path)
    file.append({"n": 3})
    file.close()
    assert [fields["n"] for fields in read_lines(path)] == [1, 2, 3]


def test_a_block_of_zeros_left_by_a_power_cut_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + bytes(512) + b'\n{"n": 2}\n')
    everything(path).close()
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_a_line_of_nothing_but_brackets_goes(tmp_path: Path) -> None:
    """Python's JSON reader ends in a RecursionError there, which is no ValueError."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' + "[" * 100_000 + "\n")
    everything(path).close()
    assert path.read_text() == '{"n": 1}\n'


def test_a_whole_file_is_not_rewritten_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n')
    before = path.stat().st_ino
    everything(path).close()
    assert path.stat().st_ino == before


def test_the_newest_line_can_be_extended_also_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = everything(path)
    file.append({"n": 1})
    file.extend({"a": 2})
    file.close()
    file = everything(path)
    file.extend({"b": 3})
    file.append({"n": 2})
    file.close()
    assert path.read_text() == '{"n": 1, "a": 2, "b": 3}\n{"n": 2}\n'


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = everything(path)
    file.append({"n": 1})
    with file_size_limit(path.stat().st_size + 4):
        for n in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                file.append({"n": n})
        assert path.read_text() == '{"n": 1}\n', "nothing half-written"
        with pytest.raises(OSError, match="File too large"):
            file.extend({"late": True})
    file.append({"n": 4})
    file.close()
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n{"n": 3, "late": true}\n{"n": 4}\n'


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []
