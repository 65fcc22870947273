"""A measured accelerator in the planner: its own rates stand in for its family's, in the same formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.config.run import Precision, Run
from fivefold.hardware.accelerator import Accelerator, Measured, Product
from fivefold.hardware.catalogue import by_name
from fivefold.hardware.entry import accelerator_of
from fivefold.plan.cluster import cluster
from fivefold.plan.constants import constants
from fivefold.plan.software import stack
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.step import step_time
from fivefold.plan.time.work import Operation, Shape
from tests.plan.runs import small_run

SHAPES = ((8192, 8192, 8192), (8192, 6144, 4096), (8192, 28672, 4096))
LARGE = Shape(8192, 8192, 8192, 1)


def rates(accelerator: Accelerator, software: str = "fivefold", run: Run | None = None) -> Rates:
    return Rates(run or small_run(), accelerator, stack(software), constants())


def seconds(found: Rates, shape: Shape = LARGE) -> float:
    """Without what a launch costs."""
    return found.product(shape, linear=False) - found.generation.launch


def measured(name: str, share: float, **more: object) -> Accelerator:
    """An accelerator that was measured to take 1 / share of the time that the planner takes it for."""
    known = by_name(name)
    found = rates(known)
    products = tuple(
        Product("bf16", m, n, k, share * 2 * m * n * k / seconds(found, Shape(m, n, k, 1))) for m, n, k in SHAPES
    )
    small = Product("bf16", 128, 512, 512, 1e12)
    return replace(known, measured=Measured(products=(*products, small), **more))  # type: ignore[arg-type]


def test_products_take_as_long_as_they_were_measured_to() -> None:
    usual = rates(by_name("h200"))
    assert seconds(rates(measured("h200", 1.0))) == pytest.approx(seconds(usual))
    assert seconds(rates(measured("h200", 0.5))) == pytest.approx(2 * seconds(usual))


def test_what_was_measured_in_bf16_holds_for_fp16() -> None:
    half = small_run().model_copy(update={"precision": Precision(compute="fp16")})
    assert seconds(rates(measured("h200", 0.5), run=half)) == pytest.approx(2 * seconds(rates(by_name("h200"))))


def test_a_card_without_bf16_computes_in_fp16() -> None:
    half = small_run().model_copy(update={"precision": Precision(compute="fp16")})
    assert seconds(rates(by_name("v100"), run=half)) > 0


def test_attention_of_our_own_software_is_the_measured_one() -> None:
    work = Operation("attention", "attention", "attention", flops=1e12)
    card = measured("h200", 1.0, attention={"forward": 500e12, "backward": 400e12})
    ours = rates(card)
    both = ours.forward(work) + ours.backward(work)[0] - 2 * ours.generation.launch
    assert both == pytest.approx(1e12 / 500e12 + 2.5e12 / 400e12)
    assert rates(card, "fsdp-2023").forward(work) == rates(by_name("h200"), "fsdp-2023").forward(work)


def in_format(compute: str) -> Run:
    return small_run(gpus=1, dp=1).model_copy(update={"precision": Precision(compute=compute)})


def test_attention_that_was_measured_in_one_format_says_nothing_of_another() -> None:
    card = measured("h200", 1.0, attention={"forward": 500e12, "backward": 400e12})
    work = Operation("attention", "attention", "attention", flops=1e12)
    single = in_format("fp32")
    assert rates(card, run=single).forward(work) == rates(by_name("h200"), run=single).forward(work)
    half = in_format("fp16")
    assert rates(card, run=half).forward(work) == rates(card).forward(work)


def test_16_bit_formats_of_two_peaks_do_not_stand_for_each_other() -> None:
    known = replace(by_name("h200"), peak={"bf16": 400e12, "fp16": 800e12})
    card = replace(known, measured=Measured(products=(Product("bf16", 8192, 8192, 8192, 300e12),)))
    half = in_format("fp16")
    assert seconds(rates(card, run=half)) == pytest.approx(seconds(rates(known, run=half)))


BENCHED_CPU = {
    "name": "cpu",
    "family": "CPU",
    "matmul_tflops": {"fp32": 0.046, "bf16": 0.0034},
    "memory_gb": 25,
    "bandwidth_tb_s": 0.008,
    "measured": {
        "attention_tflops": {"forward": 0.0022, "backward": 0.011},
        "attention_format": "fp32",
        "products": [
            {"format": "fp32", "m": 256, "n": 256, "k": 256, "tflops": 0.042},
            {"format": "fp32", "m": 512, "n": 512, "k": 512, "tflops": 0.046},
            {"format": "bf16", "m": 128, "n": 128, "k": 128, "tflops": 0.0034},
        ],
    },
}
"""As `fivefold bench` writes it on one core: small products, and bf16 far slower than fp32."""


@pytest.mark.parametrize(("compute", "rate"), [("fp32", 0.044e12), ("bf16", 0.0034e12), ("fp64", 0.044e12)])
def test_a_measured_cpu_multiplies_as_fast_as_it_did_in_the_format_of_the_run(compute: str, rate: float) -> None:
    card = accelerator_of(BENCHED_CPU)
    run = in_format(compute)
    assert seconds(rates(card, run=run)) == pytest.approx(2 * 8192**3 / rate)
    found = step_time(run, cluster(card, 1))
    assert 0 < found.mfu <= 1


def test_nothing_is_faster_than_the_peak_of_its_format() -> None:
    """A product so small that its shape leaves a GPU almost nothing says little of large ones."""
    known = by_name("h200")
    small = Product("bf16", 64, 64, 64, 10e12)
    fast = {"forward": 5e15, "backward": 5e15}
    card = replace(known, measured=Measured(products=(small,), attention=fast))
    found = rates(card)
    assert seconds(found) == pytest.approx(2 * 8192**3 / known.peak["bf16"])
    work = Operation("attention", "attention", "attention", flops=1e12)
    assert found.forward(work) - found.generation.launch == pytest.approx(1e12 / known.peak["bf16"])


def test_a_product_moves_operands_of_the_width_of_its_format() -> None:
    row, known = Shape(8, 8192, 8192, 1), by_name("h200")
    card = replace(known, peak={"bf16": known.peak["bf16"], "fp32": known.peak["bf16"]})
    assert seconds(rates(card, run=in_format("fp32")), row) == pytest.approx(2 * seconds(rates(card), row))


def test_a_measured_copy_gives_the_memorys_rate() -> None:
    known = by_name("h200")
    card = replace(known, measured=Measured(copy=known.bandwidth / 2))
    assert rates(card).bandwidth == pytest.approx(known.bandwidth / 2)


def test_a_rate_that_the_user_gives_counts_and_one_of_the_catalogue_does_not() -> None:
    entry = {"name": "own", "matmul_tflops": {"bf16": 400}, "memory_gb": 80, "bandwidth_tb_s": 4.0}
    given = rates(accelerator_of(entry | {"confidence": {"matmul_tflops": "given"}}))
    assert seconds(given) == pytest.approx(2 * 8192**3 / 400e12)
    assert rates(by_name("h200")).family == constants().family("H100")
