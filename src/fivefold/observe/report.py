"""The report of a run: one HTML page with what the run is, its curves, the loads of its experts, and what happened.

It is made from the files in the run's folder, while the run goes on or after it, and needs neither script nor network.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median

from fivefold.config.run import Run
from fivefold.model.spec import parameters
from fivefold.observe import curves, heat
from fivefold.observe.console import clock_time
from fivefold.observe.curves import Curve, picture
from fivefold.observe.heat import Row, heat_map
from fivefold.observe.history import Choices, History, finite, read_history
from fivefold.outputs import check_file, write_file
from fivefold.pages import document, say

REPORT = "report.html"
"""Its name in the run's folder."""
EVENTS_AT_MOST = 200
CELLS_AT_MOST = 12_000
"""Of the picture of a layer over time; a browser moves through so many without delay."""
RECENT = 100
"""Steps whose speed is told."""
STYLE = (
    ":root{color-scheme:light dark;--ink:#222;--paper:#fff;--line:#ddd;--faint:#bbb}"
    "@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181b;--line:#3a3d42;--faint:#5c6066}}"
    "body{font:14px system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:24px}"
    "table{border-collapse:collapse;margin:16px 0}"
    "th,td{text-align:left;vertical-align:top;padding:3px 20px 3px 0;border-bottom:1px solid var(--line)}"
    "th{font-weight:600;white-space:nowrap}"
    ".side{display:flex;flex-wrap:wrap;gap:16px}.wide{overflow-x:auto;margin:16px 0}"
    f"{curves.STYLE}{heat.STYLE}"
)


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write the report of the run in `folder`, as `file` or else in the folder; where it is.

    Raises UserError if there is no run, nothing to tell of it yet, or no way to write.
    """
    check_file(file)
    target = folder / REPORT if file is None else file
    write_file(target, report(read_history(folder)))
    return target


def report(history: History) -> str:
    """The page."""
    body = [
        f"<h1>{escape(history.run.name)}</h1>",
        _table(_facts(history)),
        f'<div class="side">{"".join(_training(history))}</div>',
    ]
    if history.run.model.moe is not None:
        body += ["<h2>Experts</h2>", *_experts(history)]
    body += ["<h2>Events</h2>", *_events(history)]
    return document(f"{history.run.name}: report", STYLE, body)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _facts(history: History) -> list[tuple[str, str]]:
    """What the run is, and how far it has come."""
    run, last = history.run, history.last
    tokens = run.batch.global_size * run.data.seq_len
    facts = [
        ("model", _model(run)),
        ("layout", _layout(run)),
        ("step", f"{run.batch.global_size:,} sequences x {run.data.seq_len:,} = {tokens:,} tokens"),
        ("precision", run.precision.compute),
        ("done", f"step {last['step']:,} of {run.total_steps:,}, {last.get('tokens', 0):,} tokens"),
        ("loss", say(last["loss"])),
    ]
    if run.model.moe is not None:
        facts[1:1] = [("experts", _mixture(run)), ("balanced by", _balance(run))]
    for key in history.keys("val_loss/"):
        if points := finite(history.points(key)):
            best = min(points, key=lambda point: point[1])
            newest = f"{say(points[-1][1])} at step {points[-1][0]:,}"
            facts.append(
                (f"validation: {key.removeprefix('val_loss/')}", f"{newest}; best {say(best[1])} at {best[0]:,}")
            )
    if rates := finite(history.points("tok_per_s"))[-RECENT:]:
        speed = median(value for _, value in rates)
        facts.append(("speed", f"{speed:,.0f} tokens/s, median of the last {len(rates)} steps{_use(history)}"))
    if peaks := finite(history.points("mem_peak_gib")):
        facts.append(("memory", f"{max(value for _, value in peaks):.2f} GiB at most on one rank"))
    seconds = sum(value for _, value in finite(history.points("step_s")))
    return [*facts, ("time in steps", clock_time(seconds))]


def _use(history: History) -> str:
    points = finite(history.points("mfu"))[-RECENT:]
    return f"; MFU {median(value for _, value in points):.1%}" if points else ""


def _model(run: Run) -> str:
    model = run.model
    counts = parameters(model)
    active = "" if counts.active == counts.total else f", of which a token meets {counts.active:,}"
    name = model.preset or model.from_ or model.family
    return f"{name}: {model.layers} layers of width {model.hidden:,}, {counts.total:,} parameters{active}"


def _mixture(run: Run) -> str:
    moe = run.model.moe
    assert moe is not None, "asked of a model with experts"
    shared = f" and {moe.shared} shared" if moe.shared else ""
    dense = f"; from layer {moe.dense_layers} on" if moe.dense_layers else ""
    return f"{moe.experts} a layer, {moe.top_k}{shared} a token, of width {moe.ffn:,}; {moe.scores} scores{dense}"


def _balance(run: Run) -> str:
    """What acts on the loads of experts, and of the ranks that have them."""
    moe, loss, routing = run.model.moe, run.loss, run.routing
    assert moe is not None, "asked of a model with experts"
    ways = {
        f"biases, rate {routing.bias_rate:g}": moe.bias and routing.bias_rate,
        f"balance_sequence {loss.balance_sequence:g}": loss.balance_sequence,
        f"balance_global {loss.balance_global:g}": loss.balance_global,
        f"capacity_factor {routing.capacity_factor}": routing.capacity_factor is not None,
        "placement by load": routing.placement == "load" and run.parallel.ep > 1,
    }
    return ", ".join(way for way, acts in ways.items() if acts) or "nothing"


def _layout(run: Run) -> str:
    """Degrees above 1, and what else is always there."""
    parallel = run.parallel
    degrees = [f"{name} {getattr(parallel, name)}" for name in ("pp", "dp", "cp", "tp", "ep")]
    several = [words for words in degrees if not words.endswith(" 1")]
    schedule = [f"schedule {parallel.schedule}"] if parallel.pp > 1 else []
    return ", ".join(
        [*(several or ["one rank"]), f"ZeRO {parallel.zero}", *schedule, f"recompute {run.recompute.mode}"]
    )


def _training(history: History) -> Iterator[str]:
    losses = {"loss": "loss"} | {
        key: f"validation {key.removeprefix('val_loss/')}" for key in history.keys("val_loss/")
    }
    losses |= {key: f"mtp {key.removeprefix('mtp_loss/')}" for key in history.keys("mtp_loss/")}
    yield _of_keys(history, "loss (nats a token)", losses)
    yield _of_keys(history, "gradient norm before clipping", {"grad_norm": "norm"})
    yield _of_keys(history, "tokens a second", {"tok_per_s": "tok/s"})
    yield _of_keys(history, "learning rate", {"lr": "lr"})


def _of_keys(history: History, title: str, names: dict[str, str]) -> str:
    """A picture of what lies under keys of the lines."""
    return picture(title, [Curve(name, history.points(key)) for key, name in names.items()])


def _experts(history: History) -> Iterator[str]:
    loads = {"moe_load_max": "worst layer", "moe_load_mean": "mean of layers"}
    figures = [
        _of_keys(history, "largest load, x even", loads),
        _by_layer(history) if history.choices else "",
        _of_keys(history, "entropy of the choices, of the largest", {"moe_entropy": "entropy"}),
    ]
    if any(value > 0 for _, value in history.points("moe_dropped")):
        figures.append(_of_keys(history, "share of choices dropped", {"moe_dropped": "dropped"}))
    figures.append(_of_keys(history, "seconds of waiting for all-to-alls", {"moe_exchange_s": "slowest rank"}))
    figures.append(_of_keys(history, "losses of routers", {"balance_loss": "balance", "z_loss": "z"}))
    yield f'<div class="side">{"".join(figures)}</div>'
    if history.choices:
        yield f'<div class="wide">{_newest(history)}</div>'
        yield f'<div class="wide">{_over_time(history)}</div>'


def _by_layer(history: History) -> str:
    """The largest load of each layer over time, the layers that are worst now first."""
    newest = history.choices[-1]
    layers = sorted(newest.by_layer, key=lambda layer: -newest.worst_load(layer))
    lines = [
        Curve(history.name_of(layer), [(each.step, each.worst_load(layer)) for each in history.choices])
        for layer in layers
    ]
    return picture("largest load of each layer, x even", lines)


def _newest(history: History) -> str:
    """A cell a layer and expert, of the newest step."""
    newest = history.choices[-1]
    rows = [_row(history.name_of(layer), history.name_of(layer), newest, layer) for layer in newest.by_layer]
    return heat_map(f"loads in step {newest.step:,}", rows, _numbers(newest), "expert")


def _over_time(history: History) -> str:
    """A line a step, of the layer that is worst in the newest."""
    newest = history.choices[-1]
    layer = max(newest.by_layer, key=newest.worst_load)
    name = history.name_of(layer)
    shown = _spread(history.choices, max(2, min(160, CELLS_AT_MOST // len(newest.by_layer[layer]))))
    rows = [_row(f"{each.step}", f"step {each.step}, {name}", each, layer) for each in shown]
    left_out = "" if len(shown) == len(history.choices) else f", {len(shown)} of {len(history.choices)} steps"
    title = f"loads in {name}, the least even of step {newest.step:,}, over the steps{left_out}"
    return heat_map(title, rows, _numbers(newest), "expert")


def _row(name: str, where: str, choices: Choices, layer: int) -> Row:
    loads = choices.loads(layer)
    titles = [
        f"{where}, expert {expert}: {say(load)} x even, {count:,} choices"
        for expert, (load, count) in enumerate(zip(loads, choices.by_layer[layer], strict=True))
    ]
    return Row(name, loads, titles)


def _numbers(choices: Choices) -> list[str]:
    """The experts' numbers."""
    return [str(expert) for expert in range(len(next(iter(choices.by_layer.values()))))]


def _spread(choices: Sequence[Choices], most: int) -> list[Choices]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(choices) <= most:
        return list(choices)
    return [choices[round(number * (len(choices) - 1) / (most - 1))] for number in range(most)]


def _events(history: History) -> Iterator[str]:
    """The newest events, in their order."""
    events = history.events[-EVENTS_AT_MOST:]
    if len(events) < len(history.events):
        yield f"<p>The newest {len(events)} of {len(history.events)}; all are in events.jsonl.</p>"
    rows = []
    for event in events:
        more = {key: value for key, value in event.items() if key not in ("time", "kind", "message")}
        words = event.get("message") or ", ".join(f"{key} {value}" for key, value in more.items())
        cells = (
            str(event.get("time", ""))[:19].replace("T", " "),
            str(event.get("kind", "")).replace("_", " "),
            str(words),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    yield f"<table><tr><th>time (UTC)</th><th>what</th><th></th></tr>{''.join(rows)}</table>"
