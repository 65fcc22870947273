"""The drawings: every action where its time says, told apart without colours and by every kind of colour vision."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from click import unstyle

from fivefold.pipeline.draw import Panel, last_end
from fivefold.pipeline.draw_colours import ACTION, COMMUNICATION, IDLE, channels, ink, shade
from fivefold.pipeline.draw_svg import CURVE, LEFT, RIGHT, TITLES_AT_MOST, WIDTH, comfortable_width, svg
from fivefold.pipeline.draw_text import legend, painted, text_rows
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.page import page
from fivefold.pipeline.schedule import KINDS
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.times import Times

SVG = "{http://www.w3.org/2000/svg}"


def panel(name: str, ranks: int, microbatches: int, chunks: int = 1, hop: float = 0.0, title: str = "") -> Panel:
    """A schedule of which every F, I and W takes 1."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    times = Times.uniform(schedule.stages, 1.0, 1.0, 1.0, hop)
    return Panel(title or name, simulate(schedule, times))


def drawn(one: Panel, cells: int) -> list[str]:
    """Its rows on `cells` columns and the two in which the rank stands."""
    return text_rows(one, 2 + cells, one.timeline.makespan)


def test_a_row_has_each_action_with_its_microbatch_as_long_as_it_runs() -> None:
    assert drawn(panel("1f1b", 2, 2), 18) == [
        "0 F0F1....B0--..B1--",
        "1 ..F0B0--F1B1--....",
    ]


def test_the_second_chunk_of_a_rank_has_small_letters() -> None:
    assert drawn(panel("zb-v", 2, 2, 2), 42) == [
        "0 F0-F1-...f0-i0-w0-f1-i1-w1-I0-W0-...I1-W1-",
        "1 ...F0-f0-F1-f1-i0-w0-I0-W0-i1-w1-I1-W1-...",
    ]


def test_a_rank_that_waits_for_a_transfer_is_not_drawn_as_idle() -> None:
    assert drawn(panel("gpipe", 2, 2, hop=1.0), 22) == [
        "0 F0F1~~......~~B0--B1--",
        "1 ..~~F0F1B0--B1--~~....",
    ]


def test_an_action_too_short_for_its_number_is_its_letter() -> None:
    # a cell is one unit of time: a forward has one, a backward two
    forward, backward = "F" * 12, "".join(f"B{number}" for number in range(10)) + "B-B-"
    assert drawn(panel("gpipe", 1, 12), 36) == [f"0 {forward}{backward}"]


def test_two_timelines_share_one_scale() -> None:
    quick, slow = panel("1f1b", 2, 2), panel("gpipe", 2, 2, hop=1.0)
    assert text_rows(quick, 2 + 22, last_end([quick, slow]))[0] == "0 F0F1....B0--..B1--...."


@pytest.mark.parametrize("width", [1, 12, 33, 100, 250])
def test_rows_are_as_wide_as_the_terminal_whatever_is_in_them(width: int) -> None:
    for one in (panel("zb-v", 12, 48, 2, hop=0.3), panel("1f1b", 1, 1), panel("interleaved", 3, 7, 4, hop=2.0)):
        rows = text_rows(one, width, one.timeline.makespan)
        label = len(str(len(rows) - 1))
        assert {len(row) for row in rows} == {max(width, label + 11)}


def test_colours_change_no_letter() -> None:
    for row in drawn(panel("zb-v", 4, 8, 2, hop=0.3), 120):
        assert painted(row) != row
        assert unstyle(painted(row)) == row


def test_the_legend_says_what_there_is_and_nothing_else() -> None:
    assert legend([panel("1f1b", 1, 1)]) == "F forward, B both gradients, . idle"
    assert legend([panel("1f1b", 1, 1), panel("zb-v", 2, 2, 2, hop=0.1)]).startswith(
        "F forward, B both gradients, I gradient of the input, W gradient of the weights, small letters"
    )


def boxes(picture: str) -> list[tuple[str, float, float, str]]:
    """Class, left edge, width and title of each box that has a title."""
    return [
        (rect.get("class", ""), float(rect.get("x", "")), float(rect.get("width", "")), title.text or "")
        for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    ]


def test_the_picture_has_a_box_for_every_action_where_its_time_says() -> None:
    one = panel("zb-v", 4, 8, 2, hop=0.3)
    found = {title: (name, x, width) for name, x, width, title in boxes(svg([one])) if name != "sent"}
    spans = [span for row in one.timeline.spans for span in row]
    assert len(found) == len(spans)
    pixels = (WIDTH - LEFT - RIGHT) / one.timeline.makespan
    for action, start, end in spans:
        name, x, width = found[f"{action}: {start:.5g} to {end:.5g}"]
        assert name == f"{action.kind}{int(action.stage >= 4)}"
        assert x == pytest.approx(LEFT + pixels * start, abs=0.06)
        assert 0 <= pixels * (end - start) - width <= 0.5 + 0.11


def test_the_picture_shows_what_a_rank_receives_below_its_row() -> None:
    one = panel("gpipe", 2, 1, hop=1.0)
    assert [title for name, _, _, title in boxes(svg([one])) if name == "sent"] == [
        "1B0 from rank 1: 5 to 6",
        "0F0 from rank 0: 1 to 2",
    ]
    assert "communication" not in svg([panel("gpipe", 2, 1)])


def curves(picture: str) -> list[list[tuple[float, float]]]:
    """Of each rank: the corners of its curve of activations, how far from the left and how high."""
    return [
        [(float(x), CURVE - float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", path.get("d", ""))]
        for path in ElementTree.fromstring(picture).iter(f"{SVG}path")
        if path.get("class") == "held"
    ]


def test_the_curve_of_a_rank_rises_to_its_peak_and_ends_at_0() -> None:
    heights = [[height for _, height in curve] for curve in curves(svg([panel("1f1b", 2, 3)]))]
    assert [max(levels) for levels in heights] == [CURVE - 2, (CURVE - 2) / 2]  # peaks of 2 and 1
    assert [levels[-1] for levels in heights] == [0, 0]


def test_activations_held_too_shortly_to_be_seen_are_a_needle_and_not_a_block() -> None:
    # rank 1 holds one at 1000 and at 3000 of 4000, for a hundredth each time
    times = Times((1000.0, 0.01), (500.0, 0.005), (500.0, 0.005))
    curve = curves(svg([Panel("naive", simulate(make_schedule("naive", 2, 2), times))]))[1]
    high = [number for number, (_, height) in enumerate(curve) if height == CURVE - 2]
    assert len(high) == 2
    for number in high:
        (x, _), (end, after) = curve[number : number + 2]
        assert (end - x, after) == (0.5, 0)


def test_a_picture_of_several_timelines_puts_them_on_one_scale() -> None:
    quick, slow = panel("1f1b", 2, 2), panel("gpipe", 2, 2, hop=1.0)
    ends = {
        name: max(x + width for _, x, width, _ in boxes(svg(panels)))
        for name, panels in (("both", [quick, slow]), ("quick", [quick]))
    }
    assert ends["both"] == pytest.approx(ends["quick"], abs=0.6)
    first = next(box for box in boxes(svg([quick, slow])) if box[3] == "0F0: 0 to 1")
    assert first[2] == pytest.approx((WIDTH - LEFT - RIGHT) / 11 - 0.5, abs=0.11)


def test_16_ranks_with_64_microbatches_make_a_small_page() -> None:
    one = panel("zb-v", 16, 64, 2)
    assert sum(map(len, one.timeline.spans)) == 16 * 64 * 6
    assert len(page("zb-v", [one])) < 1_000_000


def test_very_many_actions_are_areas_without_titles_and_the_picture_says_so() -> None:
    one = panel("zb-h1", 32, 256, hop=0.1)
    count = sum(map(len, one.timeline.spans))
    assert count > TITLES_AT_MOST
    picture = svg([one], comfortable_width([one]))
    assert boxes(picture) == []
    assert "more than 12,000 actions" in picture
    assert len(picture) < 2_000_000
    areas = [
        path for path in ElementTree.fromstring(picture).iter(f"{SVG}path") if path.get("class") in ("F0", "I0", "W0")
    ]
    # at this width none is narrower than half a pixel, so none is left out
    assert sum(path.get("d", "").count("M") for path in areas) == count


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_is_told() -> None:
    text = page("<b>&", [panel("1f1b", 2, 2, title="<i>mine")], ["a<b"])
    assert "<b>&" not in text
    assert "<i>" not in text
    assert "<script" not in text
    assert re.findall(r'(?:href|src|url)\s*[=(]\s*"?([^")>]*)', text) == []
    assert set(re.findall(r"https?://[^\"<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "<tr><th>bubble</th><td>0.3333</td></tr>" in text


# Machado, Oliveira and Fernandes 2009, severity 1: what people without one kind of cone see, in linear RGB.
VISION = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def linear(colour: str) -> list[float]:
    parts = [channel / 255 for channel in channels(colour)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(entry * value for entry, value in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as it is seen."""
    seen = [min(1.0, max(0.0, value)) for value in times(VISION[vision], linear(colour))]
    x, y, z = (
        value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116
        for value in (part / white for part, white in zip(times(XYZ, seen), WHITE, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
def test_no_two_things_have_colours_that_look_alike(vision: str) -> None:
    """A distance of 2 is just seen; in all shades of two chunks, everything is at least 14 apart."""
    colours = [(kind, shade(kind, chunk, 2)) for kind in KINDS for chunk in (0, 1)]
    colours += [("communication", COMMUNICATION), ("idle", IDLE)]
    for (one, first), (other, second) in combinations(colours, 2):
        distance = sum((a - b) ** 2 for a, b in zip(lab(first, vision), lab(second, vision), strict=True)) ** 0.5
        assert one == other or distance > 14, (one, other, distance)


def test_chunks_are_shades_from_the_colour_to_a_lighter_one() -> None:
    for kind in KINDS:
        shades = [shade(kind, chunk, 4) for chunk in range(4)]
        assert shades[0] == ACTION[kind]
        light = [sum(channels(colour)) for colour in shades]
        assert light == sorted(set(light))


def test_numbers_in_boxes_are_read_on_every_shade() -> None:
    for colour in [shade(kind, chunk, 2) for kind in KINDS for chunk in (0, 1)]:
        bright = sum(part * weight for part, weight in zip(linear(colour), XYZ[1], strict=True))
        contrast = (bright + 0.05) / 0.05 if ink(colour) == "#000" else 1.05 / (bright + 0.05)
        assert contrast >= 4.5, colour  # WCAG 2, level AA
