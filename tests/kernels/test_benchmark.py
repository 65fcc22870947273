"""The benchmark script runs where there is no GPU, in tiny, so that it will run where there is one."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def test_it_prints_one_json_line_for_each_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    module.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [line["benchmark"] for line in lines]
    assert kinds[:2] == ["environment", "copy"]
    assert kinds.count("loss") == 3
    assert {"rms_norm", "add_rms_norm", "add_layer_norm", "swiglu", "rotate", "attention"} <= set(kinds)
    assert {"gather_rows", "sum_rows", "gated_swiglu", "gated_swiglu_backward", "grouped_multiply"} <= set(kinds)
    assert {"add_grouped_weight_gradient", "adamw_", "torch's fused AdamW"} <= set(kinds)
    failed = [line for line in lines if "error" in line]
    assert {line["kernel"] for line in failed} == {"varlen_attn"}  # which torch has on GPUs alone
