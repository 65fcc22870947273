"""An accelerator as it is written down: keys with units in their names, checked, read and written.

The catalogue's own entries and a user's file have the same keys. What is missing, what cannot be a number of that unit
and what contradicts itself is collected and said at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.config.files import ConfigError
from fivefold.config.yaml12 import read_file, write_text
from fivefold.hardware.accelerator import Accelerator, Collective, Measured, Product
from fivefold.near import did_you_mean
from fivefold.outputs import write_file

FORMATS = ("bf16", "fp16", "fp8", "fp4", "fp32")
FAMILIES = ("V100", "A10", "A100", "Ada", "H100", "Blackwell", "MI300", "TPU", "CPU", "other")
"""Whose kernels an accelerator has. Those that no constants were fitted for are planned as `other`, but for a CPU."""


class Quantity(NamedTuple):
    """A number of an entry: its unit, and the range that any machine's lies in."""

    unit: str
    low: float
    high: float
    scale: float
    """Of one such unit, in plain ones."""
    mistaken: Mapping[str, float] = {}
    """Units that are written in its place, and how many of them are one."""
    zero: bool = False
    """Whether 0 (there is none) is an answer."""


OF_GB_S = {"MB/s": 1e3, "bytes/s": 1e9}
QUANTITIES = {
    "memory_gb": Quantity("GB", 0.5, 4_000, 1e9, {"MB": 1e3, "bytes": 1e9}),
    "memory_mib": Quantity("MiB", 500, 4e6, 2**20, {"bytes": 2**20}),
    "bandwidth_tb_s": Quantity("TB/s", 1e-4, 60, 1e12, {"GB/s": 1e3, "bytes/s": 1e12}),
    "link_gb_s": Quantity("GB/s", 1e-3, 8_000, 1e9, OF_GB_S, zero=True),
    "pair_gb_s": Quantity("GB/s", 1e-3, 8_000, 1e9, OF_GB_S),
    "domain": Quantity("accelerators", 1, 100_000, 1),
    "per_node": Quantity("accelerators", 1, 1_024, 1),
    "pcie_gb_s": Quantity("GB/s", 1e-3, 1_000, 1e9, OF_GB_S),
    "nic_gbit_s": Quantity("Gbit/s", 0.01, 10_000, 1.25e8, {"Mbit/s": 1e3, "bit/s": 1e9}, zero=True),
    "watts": Quantity("W", 1, 5_000, 1, {"mW": 1e3}),
}
RATE = Quantity("TFLOP/s", 1e-6, 100_000, 1e12, {"GFLOP/s": 1e3, "FLOP/s": 1e12})

TEXTS = ("name", "family", "notes")
LISTS = ("aliases", "driver_names", "sources")
MAPPINGS = ("peak_tflops", "matmul_tflops", "confidence", "measured")
KEYS = (*TEXTS, *LISTS, *MAPPINGS, *QUANTITIES)

ROUNDING = 1.005
"""By how much a measured rate may pass a peak that a datasheet gives in three digits."""


def read_entry(path: Path) -> Accelerator:
    """The accelerator that a YAML file describes. Raises ConfigError (a UserError) with all that is wrong with it."""
    document = read_file(path)
    found = list(faults(document.value))
    if found:
        places = document.places
        raise ConfigError(
            [f"{text} ({places[(key,)].where})" if (key,) in places else text for key, text in found], str(path)
        )
    given = dict.fromkeys((key for key in document.value if key in QUANTITIES or key in MAPPINGS[:2]), "given")
    stated = document.value.get("confidence", {})
    return accelerator_of({"name": path.stem, **document.value, "confidence": given | dict(stated)})


def faults(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with an entry: (the key, a sentence) of each fault."""
    bad = set()
    for key, text in _wrong_values(entry):
        bad.add(key.split(".")[0])
        yield key, text
    yield from ((key, text) for key, text in _missing(entry) if key not in bad)
    if not bad:
        yield from _contradictions(entry)


def _wrong_values(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in entry.items():
        if key in QUANTITIES:
            yield from _number(key, value, QUANTITIES[key])
        elif key in ("peak_tflops", "matmul_tflops"):
            yield from _rates(key, value)
        elif key in LISTS:
            if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                yield key, f"{key} = {value!r}: it must be a list of texts"
        elif key in TEXTS:
            if not isinstance(value, str):
                yield key, f"{key} = {value!r}: it must be a text"
            elif key == "family" and value not in FAMILIES:
                yield key, f"family = {value}: there is no such family; {_say_known(value, FAMILIES)}"
        elif key == "confidence":
            if not (isinstance(value, dict) and all(isinstance(each, str) for each in value.values())):
                yield key, f"{key} = {value!r}: it must give a word for each key"
        elif key == "measured":
            yield from _measured_faults(value)
        else:
            yield str(key), f"{key}: there is no such key; {_say_known(str(key), KEYS)}"


def _say_known(name: str, known: Sequence[str]) -> str:
    """What to say after a key that there is not: a near one, and all of them."""
    return f"{did_you_mean(name, known)}known are {', '.join(known)}"


def _number(key: str, value: Any, quantity: Quantity) -> Iterator[tuple[str, str]]:
    """A fault, if `value` is none of this quantity."""
    unit = quantity.unit
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        yield key, f"{key} = {value!r}: it must be a number of {unit}"
    elif value == 0 and quantity.zero:
        return
    elif value <= 0:
        yield key, f"{key} = {value:g}: it must be above 0"
    elif value > quantity.high:
        hints = [
            f"; if that is {other}, write {value / number:g}"
            for other, number in quantity.mistaken.items()
            if quantity.low <= value / number <= quantity.high
        ]
        most = f"nothing has {value:,.10g} {unit}, the most would be {quantity.high:,.10g}"
        yield key, f"{key} = {value:g}: {most}{hints[0] if hints else ''}"
    elif value < quantity.low:
        yield key, f"{key} = {value:g}: that is too little in {unit}, the least would be {quantity.low:g}"
    elif quantity.scale == 1 and key != "watts" and value != int(value):
        yield key, f"{key} = {value:g}: it must be a whole number"


def _rates(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield key, f"{key} = {value!r}: it must give TFLOP/s by format, such as {{bf16: 989}}"
        return
    for format, rate in value.items():
        if format not in FORMATS:
            yield key, f"{key}.{format}: there is no such format; {_say_known(str(format), FORMATS)}"
        else:
            yield from _number(f"{key}.{format}", rate, RATE)


def _missing(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not (entry.get("peak_tflops") or entry.get("matmul_tflops")):
        yield (
            "peak_tflops",
            "peak_tflops is missing: the rate of dense products by format, such as {bf16: 989} (in its place "
            "matmul_tflops, what was measured, will do)",
        )
    if not ("memory_gb" in entry or "memory_mib" in entry):
        yield "memory_mib", "memory_mib is missing: the memory in all, as nvidia-smi shows it (or memory_gb, as sold)"
    if "bandwidth_tb_s" not in entry:
        yield "bandwidth_tb_s", "bandwidth_tb_s is missing: the memory's bandwidth in TB/s, such as 3.35"
    if entry.get("domain", 1) != 1 and "link_gb_s" not in entry:
        yield "link_gb_s", f"link_gb_s is missing: what joins the domain of {entry['domain']}, in GB/s, one direction"


def _contradictions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    peak, best = entry.get("peak_tflops", {}), entry.get("matmul_tflops", {})
    for format, rate in best.items():
        if format in peak and rate > peak[format] * ROUNDING:
            yield (
                "matmul_tflops",
                f"matmul_tflops.{format} = {rate:g} is measured and lies above peak_tflops.{format} = "
                f"{peak[format]:g}, which is the most there can be; one of them is wrong",
            )
    slower = [("fp8", "bf16"), ("fp4", "fp8"), ("bf16", "fp32")]
    for narrow, wide in slower:
        if narrow in peak and wide in peak and peak[narrow] < peak[wide]:
            yield (
                "peak_tflops",
                f"peak_tflops.{narrow} = {peak[narrow]:g} lies below peak_tflops.{wide} = {peak[wide]:g}: a "
                "narrower format is not slower; are they exchanged?",
            )
    if "memory_gb" in entry and "memory_mib" in entry:
        ratio = entry["memory_mib"] * 2**20 / (entry["memory_gb"] * 1e9)
        if not 0.8 < ratio < 1.2:
            yield (
                "memory_mib",
                f"memory_mib = {entry['memory_mib']:,} and memory_gb = {entry['memory_gb']:g} differ by more than "
                "the units do; give one of them",
            )
    link, domain = entry.get("link_gb_s", 0), entry.get("domain", 1)
    if link and domain == 1:
        yield "domain", f"link_gb_s = {link:g} joins domain = 1 accelerator; how many are joined?"
    if domain > 1 and not link and "link_gb_s" in entry:
        yield "link_gb_s", f"link_gb_s = 0, and yet the links join domain = {domain} accelerators; leave domain out"
    if entry.get("pair_gb_s", 0) > link:
        yield "pair_gb_s", f"pair_gb_s = {entry['pair_gb_s']:g} is a part of link_gb_s = {link:g} and cannot be more"
    copy = (entry.get("measured") or {}).get("copy_tb_s")
    if copy is not None and copy > entry["bandwidth_tb_s"] * ROUNDING:
        yield (
            "measured",
            f"measured.copy_tb_s = {copy:g} lies above bandwidth_tb_s = {entry['bandwidth_tb_s']:g}, which is the "
            "most there can be; one of them is wrong",
        )


MEASURED_KEYS = (
    "copy_tb_s", "host_gb_s", "network_gb_s", "attention_tflops", "attention_format", "products", "collectives",
)  # fmt: skip
PRODUCT_KEYS = ("format", "m", "n", "k", "tflops")
COLLECTIVE_KEYS = ("kind", "ranks", "mib", "ms")


def _measured_faults(value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield "measured", f"measured = {value!r}: it must hold {', '.join(MEASURED_KEYS)}"
        return
    for key, part in value.items():
        name = f"measured.{key}"
        if key in ("copy_tb_s", "network_gb_s"):
            yield from _number(name, part, QUANTITIES["bandwidth_tb_s" if key == "copy_tb_s" else "link_gb_s"])
        elif key == "attention_format":
            if part not in FORMATS:
                yield "measured", f"{name} = {part!r}: it must be one of {', '.join(FORMATS)}"
        elif key in ("host_gb_s", "attention_tflops"):
            inner, quantity = {
                "host_gb_s": (("to", "from"), QUANTITIES["pcie_gb_s"]),
                "attention_tflops": (("forward", "backward"), RATE),
            }[key]
            if not (isinstance(part, dict) and set(part) <= set(inner)):
                yield "measured", f"{name} = {part!r}: it must give {' and '.join(inner)}"
                continue
            for direction, number in part.items():
                yield from _number(f"{name}.{direction}", number, quantity)
        elif key in ("products", "collectives"):
            keys = PRODUCT_KEYS if key == "products" else COLLECTIVE_KEYS
            rows = part if isinstance(part, list) else [part]
            if not all(isinstance(row, dict) and set(row) == set(keys) for row in rows):
                yield "measured", f"{name}: each row must have {', '.join(keys)}, and nothing else"
                continue
            for row in rows:
                for word in keys[1:]:
                    if isinstance(row[word], bool) or not isinstance(row[word], int | float) or row[word] <= 0:
                        yield "measured", f"{name}: {word} = {row[word]!r}: it must be above 0"
        else:
            yield "measured", f"{name}: there is no such key; {_say_known(str(key), MEASURED_KEYS)}"


def accelerator_of(entry: Mapping[str, Any]) -> Accelerator:
    """The accelerator that an entry without faults describes."""

    def plain(key: str, default: float = 0.0) -> float:
        return entry[key] * QUANTITIES[key].scale if key in entry else default

    best = {format: rate * 1e12 for format, rate in entry.get("matmul_tflops", {}).items()}
    peak = {format: rate * 1e12 for format, rate in entry.get("peak_tflops", {}).items()}
    nominal = plain("memory_gb", plain("memory_mib"))
    link = plain("link_gb_s")
    return Accelerator(
        name=entry["name"],
        driver_names=tuple(entry.get("driver_names", ())),
        family=entry.get("family", "other"),
        peak=best | peak,
        matmul=best,
        memory=plain("memory_mib", nominal),
        nominal_memory=nominal,
        bandwidth=plain("bandwidth_tb_s"),
        link=link,
        pair=plain("pair_gb_s", link),
        domain=int(entry.get("domain", 1)),
        per_node=int(entry.get("per_node", 8)),
        pcie=plain("pcie_gb_s", 32e9),
        nic=plain("nic_gbit_s"),
        watts=entry.get("watts"),
        sources=tuple(entry.get("sources", ())),
        confidence=dict(entry.get("confidence", {})),
        notes=entry.get("notes", ""),
        measured=_measured_of(entry["measured"]) if "measured" in entry else None,
    )


def _measured_of(part: Mapping[str, Any]) -> Measured:
    return Measured(
        copy=part["copy_tb_s"] * 1e12 if "copy_tb_s" in part else None,
        host={direction: rate * 1e9 for direction, rate in part.get("host_gb_s", {}).items()},
        network=part["network_gb_s"] * 1e9 if "network_gb_s" in part else None,
        attention={direction: rate * 1e12 for direction, rate in part.get("attention_tflops", {}).items()},
        attention_format=part.get("attention_format", "bf16"),
        products=tuple(
            Product(row["format"], row["m"], row["n"], row["k"], row["tflops"] * 1e12)
            for row in part.get("products", ())
        ),
        collectives=tuple(
            Collective(row["kind"], row["ranks"], row["mib"] * 2**20, row["ms"] * 1e-3)
            for row in part.get("collectives", ())
        ),
    )


def write_entry(path: Path, accelerator: Accelerator) -> None:
    """Write the file from which `read_entry` reads this accelerator, to about five digits.

    Raises UserError if it cannot be written.
    """
    head = "# An accelerator for cluster.gpu: docs/planning.md tells what the keys mean.\n"
    write_file(path, head + write_text(entry_of(accelerator)))


def entry_of(accelerator: Accelerator) -> dict[str, Any]:
    """The keys and values that describe an accelerator; what is empty is left out."""

    def number(value: float, key: str) -> int | float:
        rounded = float(f"{value / QUANTITIES[key].scale:.6g}")
        return int(rounded) if rounded == int(rounded) else rounded

    def rates(values: Mapping[str, float]) -> dict[str, float]:
        return {name: float(f"{rate / 1e12:.6g}") for name, rate in values.items()}

    best = rates(accelerator.matmul)
    entry = {
        "name": accelerator.name,
        "driver_names": list(accelerator.driver_names),
        "family": accelerator.family,
        "peak_tflops": {name: rate for name, rate in rates(accelerator.peak).items() if rate != best.get(name)},
        "matmul_tflops": best,
        "memory_gb": number(accelerator.nominal_memory, "memory_gb"),
        "memory_mib": number(accelerator.memory, "memory_mib"),
        "bandwidth_tb_s": number(accelerator.bandwidth, "bandwidth_tb_s"),
        "link_gb_s": number(accelerator.link, "link_gb_s"),
        "pair_gb_s": number(accelerator.pair, "pair_gb_s") if accelerator.pair != accelerator.link else None,
        "domain": accelerator.domain,
        "per_node": accelerator.per_node,
        "pcie_gb_s": number(accelerator.pcie, "pcie_gb_s"),
        "nic_gbit_s": number(accelerator.nic, "nic_gbit_s"),
        "watts": accelerator.watts,
        "notes": accelerator.notes,
        "sources": list(accelerator.sources),
        "confidence": dict(accelerator.confidence),
        "measured": _entry_of_measured(accelerator.measured) if accelerator.measured else None,
    }
    return {key: value for key, value in entry.items() if value not in (None, "", [], {})}


def _entry_of_measured(measured: Measured) -> dict[str, Any]:
    def short(value: float) -> float:
        return float(f"{value:.4g}")

    entry = {
        "copy_tb_s": None if measured.copy is None else short(measured.copy / 1e12),
        "host_gb_s": {name: short(rate / 1e9) for name, rate in measured.host.items()},
        "network_gb_s": None if measured.network is None else short(measured.network / 1e9),
        "attention_tflops": {name: short(rate / 1e12) for name, rate in measured.attention.items()},
        "attention_format": measured.attention_format if measured.attention else None,
        "products": [
            {"format": each.format, "m": each.m, "n": each.n, "k": each.k, "tflops": short(each.rate / 1e12)}
            for each in measured.products
        ],
        "collectives": [
            {"kind": each.kind, "ranks": each.ranks, "mib": each.bytes / 2**20, "ms": short(each.seconds * 1e3)}
            for each in measured.collectives
        ],
    }
    return {key: value for key, value in entry.items() if value not in (None, [], {})}
