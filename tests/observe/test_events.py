"""events.jsonl: the history of a run over all its starts."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from fivefold.observe.events import EventsFile, read_events


def test_events_of_earlier_starts_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for start in (1, 2):
        file = EventsFile(path)
        file.write("started", start=start, folder=tmp_path)
        file.close()
    assert [(event["kind"], event["start"]) for event in read_events(path)] == [("started", 1), ("started", 2)]
    assert read_events(path)[0]["folder"] == str(tmp_path)


def test_an_event_carries_its_time_in_utc(tmp_path: Path) -> None:
    file = EventsFile(tmp_path / "events.jsonl")
    file.write("saved", step=10)
    file.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)


def test_a_torn_last_event_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": "t", "kind": "started"}\n{"time": "t", "ki')
    file = EventsFile(path)
    file.write("resumed", step=10)
    file.close()
    assert [event["kind"] for event in read_events(path)] == ["started", "resumed"]
