"""What a broken rule suggests is tried: each value that it names, put into the run, mends that breach."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold import Run
from fivefold.config.expert_rules import EXPERTS
from fivefold.config.layout_rules import LAYOUT
from fivefold.config.memory_rules import MEMORY
from fivefold.config.model_rules import MODEL
from fivefold.config.pipeline_rules import PIPELINE
from fivefold.config.rule import Rule
from fivefold.config.rules import broken_rules, with_world
from fivefold.config.run import Batch, Cluster, Data, Loss, Model, Parallel, Recompute, Routing, Source
from fivefold.config.schedules import SCHEDULES
from fivefold.config.split_rules import SPLITS

MIXTURE = tuple(rule for rule in EXPERTS if rule.name not in {"experts have no biases"})
LATENT = tuple(
    rule
    for rule in MODEL
    if rule.name.startswith(("latent attention turns", "values of", "a sequence has", "the weight of"))
)
TABLES = (*LAYOUT, *PIPELINE, *SPLITS, *MEMORY, *MIXTURE, *LATENT)
OF_THE_BATCH = next(rule for rule in LAYOUT if rule.name == "microbatches make up the batch")
Edit = tuple[str, Any]
NEXT = re.compile(r", (?:or|with) (?=[a-z]+\.[a-z_.]+ |offload |[\d, or]+ ranks|auto)")


def suggestions(sentence: str) -> list[list[Edit]]:
    """The edits that `sentence` offers, each a list of (key, value) to be made together."""
    _, found, ways = sentence.partition("; use ")
    assert found, f"no way out: {sentence}"
    ways, _, always = ways.partition(", with ")
    edits: list[list[Edit]] = []
    key = ""
    for way in NEXT.split(ways):
        named = re.match(r"([a-z]+(?:\.[a-z_]+)*) (?!or )(.*)", way)
        key, values = named.groups() if named else (key, way)
        if values.endswith(" ranks"):
            key, values = "cluster.gpus", values.removesuffix(" ranks")
        edits += [[(key, _value(word))] for word in _words(values.removesuffix(" or less").removesuffix(" or more"))]
    together = [(key, _value(value)) for key, _, value in [always.partition(" ")]] if always else []
    return [edit + together for edit in edits]


def _words(values: str) -> list[str]:
    return [values] if values.startswith("[") else [w for w in re.split(r", | or ", values) if w != "..."]


def _value(word: str) -> Any:
    if word.startswith("["):
        return word[1:-1].split(", ")
    return None if word == "null" else int(word) if word.isdigit() else word


def changed(run: Run, edits: list[Edit]) -> Run:
    for key, value in edits:
        run = _with(run, key, value)
    return run


def _with(section: Any, key: str, value: Any) -> Any:
    name, _, inner = key.partition(".")
    return section.model_copy(update={name: _with(getattr(section, name), inner, value) if inner else value})


def breaches(run: Run) -> list[Rule]:
    """The broken rules on layouts, and the values of the run as they see it."""
    return broken_rules(with_world(run, run.cluster.gpus), TABLES)


def mends(run: Run, rule: Rule, edit: list[Edit]) -> bool:
    return rule not in breaches(changed(run, edit))


def a_run(**given: Any) -> Run:
    """A small run; `given` says which of its numbers are others."""
    sizes = {"layers": 5, "hidden": 96, "heads": 12, "kv_heads": 4, "head_dim": 8, "ffn": 96, "vocab": 1003}
    others = ("context", "moe", "mla", "mtp", "activation", "bias")
    chosen = {key: given.pop(key) for key in [*sizes, *others] if key in given}
    batch = Batch(global_size=given.pop("global_size", 8), micro_size=given.pop("micro_size", 1))
    return Run(
        name="a",
        steps=1,
        cluster=Cluster(gpus=given.pop("gpus", "auto")),
        model=Model(**(sizes | {"context": 4096} | chosen)),
        data=Data(train=[Source(path="x")], seq_len=given.pop("seq_len", 256)),
        batch=batch,
        recompute=Recompute(**given.pop("recompute", {})),
        offload=given.pop("offload", []),
        loss=Loss(**given.pop("loss", {})),
        routing=Routing(**given.pop("routing", {})),
        parallel=Parallel(**given),
    )


def experts(experts: int = 12, top_k: int = 2, **given: Any) -> dict[str, Any]:
    return {"moe": {"experts": experts, "top_k": top_k, "ffn": 48} | given}


LATENT_HEADS = {"mla": {"kv_rank": 8, "plain": 4, "rotated": 4, "value": 6}}

BY_HAND = [
    experts(top_k=13),
    experts(groups=5),
    experts(groups=12),
    experts(experts=2, groups=2),
    experts(groups=3, top_groups=4),
    experts(top_groups=2),
    experts(groups=4, top_k=4),
    experts(groups=4, top_k=7, top_groups=2),
    experts(groups=6, top_k=13),
    experts(dense_layers=5),
    experts(dense_layers=7, groups=3) | {"layers": 1},
    experts() | {"activation": "gelu"},
    experts(shared=1, ffn=50) | {"tp": 4},
    experts(dense_layers=1) | {"ffn": 97, "tp": 2},
    experts() | {"ep": 5},
    experts() | {"ep": 8, "gpus": 8},
    experts() | {"ep": 12, "gpus": 8},
    experts() | {"ep": 6, "tp": 2, "cp": 2, "dp": 2},
    {"ep": 2},
    {"loss": {"balance_sequence": 0.1, "balance_global": 0.2, "router_z": 0.3}},
    {"routing": {"capacity_factor": 1.25, "placement": "load"}},
    {"mla": LATENT_HEADS["mla"] | {"rotated": 5}},
    {"mla": LATENT_HEADS["mla"] | {"value": 9}},
    LATENT_HEADS | {"tp": 8},
    LATENT_HEADS | {"cp": 4, "cp_method": "ulysses", "tp": 2},
    {"routing": {"bias_rate": 0.01}},
    experts() | {"routing": {"bias_rate": 0.01}},
    {"loss": {"mtp": 0.1}},
    {"mtp": 256},
    {"mtp": 1, "seq_len": 1},
    {"tp": 8, "gpus": 12},
    {"tp": 4, "pp": 2, "gpus": 12},
    {"dp": 2, "tp": 8, "gpus": 12},
    {"dp": 3, "gpus": 4},
    {"gpus": 8, "replicate": 3},
    {"gpus": 8, "replicate": 2, "zero": 0},
    {"global_size": 10, "micro_size": 4},
    {"global_size": 12, "micro_size": 4, "gpus": 2},
    {"ffn": 97, "tp": 2},
    {"pp": 3, "chunks": 2},
    {"pp": 2, "chunks": 6},
    {"pp": 1, "layers_per_stage": [2, 2]},
    {"schedule": "zb-v"},
    {"schedule": "zb-v", "layers": 1},
    {"chunks": 2},
    {"chunks": 3, "schedule": "dualpipe-v", "pp": 1},
    {"schedule": "dualpipe-v", "chunks": 2, "pp": 2, "micro_size": 4},
    {"schedule": "dualpipe-v", "chunks": 2, "pp": 2, "global_size": 12, "micro_size": 2, "dp": 3},
    {"schedule_memory": 2.5},
    {"schedule": "auto", "pp": 2, "offload": ["activations", "heavy-activations", "optimizer"]},
    {"offload": ["optimizer", "heavy-activations"]},
    {"recompute": {"every": 3}},
    {"offload": ["parameters"]},
    {"offload": ["activations", "parameters"]},
    {"vocab": 5, "tp": 4},
    {"seq_len": 255, "tp": 2},
    {"cp": 4, "cp_method": "ulysses", "tp": 2},
    *({"heads": h, "kv_heads": kv, "tp": tp} for h, kv, tp in [(6, 2, 4), (6, 6, 4), (6, 3, 2), (5, 5, 2)]),
    *({"seq_len": length, "cp": cp} for length, cp in product([250, 254, 255, 6], [2, 4]) if length % (2 * cp)),
    *({"seq_len": length, "cp": 4, "cp_method": "ulysses"} for length in (250, 254, 255, 6)),
]


@pytest.mark.parametrize("given_values", BY_HAND, ids=str)
def test_each_value_that_a_message_names_mends_the_breach(given_values: dict[str, Any]) -> None:
    run = a_run(**given_values)
    broken = breaches(run)
    assert broken
    for rule in broken:
        sentence = rule.says(with_world(run, run.cluster.gpus))
        edits = suggestions(sentence)
        assert edits
        assert [edit for edit in edits if not mends(run, rule, edit)] == [], sentence


def test_the_table_breaks_every_rule_on_layouts() -> None:
    broken = {rule.name for values in BY_HAND for rule in breaches(a_run(**values))}
    assert broken == {rule.name for rule in TABLES} - {"the pipeline schedule is known"}


def test_other_numbers_of_ranks_are_offered_only_if_they_share_out_the_batch() -> None:
    """tp 1, and 480 ranks, were offered: 125 and 15 shares of 512 sequences."""
    run = a_run(tp=4, pp=4, gpus=500, global_size=512)
    assert LAYOUT[0].says(run).endswith("does not divide the 500 ranks there are; use 256 or 512 ranks")
    fixed = a_run(dp=3, gpus=5, global_size=9)
    assert LAYOUT[0].says(fixed).endswith("but there are 5 ranks; use 3 or 9 ranks, with parallel.dp auto")


degree = st.sampled_from([1, 2, 3, 4, 5, 6, 8])
LAYOUTS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([1, 5, 6, 8, 12]),
        "kv_heads": st.sampled_from([1, 2, 3, 4, "auto"]),
        "ffn": st.sampled_from([48, 50, 96, 97]),
        "vocab": st.sampled_from([3, 5, 1003, "auto"]),
        "layers": st.integers(1, 9),
        "context": st.sampled_from([256, 4096]),
        "seq_len": st.integers(1, 260),
        "global_size": st.integers(1, 40),
        "micro_size": st.integers(1, 5),
        **dict.fromkeys(("tp", "pp", "cp", "replicate", "chunks"), degree),
        "dp": st.one_of(st.just("auto"), degree),
        "gpus": st.one_of(st.just("auto"), st.integers(1, 64)),
        "zero": st.integers(0, 3),
        "cp_method": st.sampled_from(["ring", "gather", "ulysses"]),
        "schedule": st.sampled_from([*SCHEDULES]),
        "schedule_memory": st.sampled_from([None, 3.5]),
        "ep": degree,
        "moe": st.none()
        | st.fixed_dictionaries(
            {
                "experts": st.integers(1, 12),
                "ffn": st.sampled_from([48, 50]),
                "shared": st.integers(0, 1),
                "dense_layers": st.integers(0, 3),
                **dict.fromkeys(("top_k", "groups", "top_groups"), st.integers(1, 6)),
            }
        ),
        "mla": st.sampled_from([None, LATENT_HEADS["mla"]]),
        "mtp": st.integers(0, 4),
    }
)


@settings(max_examples=300, deadline=None)
@given(LAYOUTS)
def test_whatever_the_layout_each_suggestion_mends_what_it_is_for(values: dict[str, Any]) -> None:
    run = a_run(**values)
    for rule in breaches(run):
        sentence = rule.says(with_world(run, run.cluster.gpus))
        edits = suggestions(sentence)
        assert edits, sentence
        assert [edit for edit in edits if not mends(run, rule, edit)] == [], sentence
        if rule is LAYOUT[0] and run.batch.global_size % run.batch.micro_size == 0:
            assert all(OF_THE_BATCH not in breaches(changed(run, edit)) for edit in edits), sentence
