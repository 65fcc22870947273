"""Each rule is broken once, by flags over a legal run file, and its message must hold the numbers and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold import Run, plugins
from fivefold.config import ranges
from fivefold.config.duration import parse_duration
from fivefold.config.rule import choices, divisors_of, multiples_around, value_of
from fivefold.config.rules import RULES, broken_rules, check, with_world
from fivefold.config.run import Data, Model, Parallel, Source
from fivefold.config.schedules import Demands
from fivefold.errors import UserError
from tests.config.conftest import Load, Refusal

HUGE = str(2**63)
LINEAR, LLAMA3, YARN = (f"{{type: {kind}, factor: 2}}" for kind in ("linear", "llama3", "yarn"))
ROPE = "--model.rope_scaling="
MOE = "--model.moe={experts: 8, top_k: 2, ffn: 256} "
MLA = "--model.mla={kv_rank: 64, plain: 32, rotated: 16, value: 32} "
SETS = "--data.validation=[{name: %s, path: x}, {name: %s, path: y}]"

BROKEN: list[tuple[str, str]] = [
    ("--steps 0", "steps = 0: it must be 1 or more"),
    ("--steps null --tokens 0", "tokens = 0.0: it must be above 0"),
    ("--steps null --tokens .inf", "tokens = inf: it must be above 0, and finite"),
    ("--steps null --tokens .nan", "tokens = nan: it must be above 0, and finite"),
    ("--tokens 1e9", "steps = 300 and tokens = 1e+09 are both given; give one"),
    ("--steps null", "neither steps nor tokens; give one of them"),
    ("--name a/b", "name = 'a/b': it becomes a folder"),
    ("--name ..", "name = '..': it becomes a folder"),
    ("--name=-x", "name = '-x': it becomes a folder"),
    ("--name=''", "name = '': it becomes a folder"),
    (f"--name={'x' * 101}", "at most 100"),
    ("--seed -1", "seed = -1: it must be from 0 to 9223372036854775807"),
    (f"--seed {HUGE}", f"seed = {HUGE}: it must be from 0 to"),
    ("--gpus 0", "cluster.gpus = 0: it must be 1 or more"),
    ("--cluster.gpus_per_node 0", "cluster.gpus_per_node = 0"),
    ("--cluster.nic_gbit_s 0", "cluster.nic_gbit_s = 0.0: it must be above 0"),
    ("--cluster.price_per_gpu_hour -2", "cluster.price_per_gpu_hour = -2.0: it must be 0 or more"),
    ("--model.family lama", "model.family = lama: did you mean llama? known are bloom, deepseek, llama"),
    ("--model.layers 0", "model.layers = 0: it must be 1 or more"),
    ("--model.hidden 0", "model.hidden = 0: it must be 1 or more"),
    ("--model.heads 0", "model.heads = 0: it must be 1 or more"),
    ("--model.heads -8", "model.heads = -8: it must be 1 or more"),
    ("--model.kv_heads 0", "model.kv_heads = 0: it must be 1 or more"),
    ("--model.head_dim 0", "model.head_dim = 0: it must be 1 or more"),
    ("--model.ffn 0", "model.ffn = 0: it must be 1 or more"),
    ("--model.vocab 0", "model.vocab = 0: it must be 1 or more"),
    ("--model.context 0", "model.context = 0: it must be 1 or more"),
    ("--model.norm_eps 0", "model.norm_eps = 0.0: it must be above 0"),
    ("--model.rope_theta .inf", "model.rope_theta = inf: it must be above 0, and finite"),
    ("--model.init_std -1", "model.init_std = -1.0: it must be above 0"),
    ("--model.weights load", "model.weights = load needs model.from"),
    ("--model.heads 6", "model.hidden = 256 is no multiple of model.heads = 6"),
    ("--model.heads 6", "use model.heads 1, 2, 4, 8, 16, 32, 64, 128 or 256, or model.hidden 252 or 258"),
    ("--model.kv_heads 3", "model.kv_heads = 3 does not divide model.heads = 8; use model.kv_heads 1, 2, 4 or 8"),
    ("--model.kv_heads 16", "model.kv_heads = 16 does not divide model.heads = 8"),
    ("--model.head_dim 33", "a head is 33 wide (hidden 256, heads 8)"),
    ("--model.head_dim 33", "use model.head_dim 32 or 34"),
    ("--model.head_dim 1", "use model.head_dim 2, or"),
    (
        f"--model.position alibi {ROPE}{LINEAR}",
        "model.rope_scaling stretches rotary positions, but model.position = alibi",
    ),
    (f"{ROPE}{LLAMA3}", "model.rope_scaling: type llama3 needs original_context"),
    (f"{ROPE}{YARN}", "model.rope_scaling: type yarn needs original_context"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.factor 0.5", "model.rope_scaling.factor = 0.5: it must be 1 or more"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.original_context 0", "model.rope_scaling.original_context = 0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.low_freq_factor 0", "model.rope_scaling.low_freq_factor = 0.0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.high_freq_factor 0", "model.rope_scaling.high_freq_factor = 0.0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.beta_fast 0", "model.rope_scaling.beta_fast = 0.0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.beta_slow 0", "model.rope_scaling.beta_slow = 0.0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.mscale 0", "model.rope_scaling.mscale = 0.0: it must be above 0"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.mscale_all_dim -1", "model.rope_scaling.mscale_all_dim = -1.0: it must"),
    (f"{ROPE}{LINEAR} --model.rope_scaling.attention_factor 0", "model.rope_scaling.attention_factor = 0.0"),
    (
        f"{ROPE}{LLAMA3} --model.rope_scaling.original_context 64 --model.rope_scaling.low_freq_factor 4",
        "low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
    ),
    (
        f"{ROPE}{YARN} --model.rope_scaling.original_context 64 --model.rope_scaling.beta_slow 40",
        "beta_slow = 40.0 must be below beta_fast = 32.0",
    ),
    *(
        (f"{MOE}--model.moe.{size} 0", f"model.moe.{size} = 0: it must be 1 or more")
        for size in ("experts", "top_k", "ffn", "groups", "top_groups")
    ),
    (f"{MOE}--model.moe.shared -1", "model.moe.shared = -1: it must be 0 or more"),
    (f"{MOE}--model.moe.dense_layers -1", "model.moe.dense_layers = -1: it must be 0 or more"),
    (f"{MOE}--model.moe.scale 0", "model.moe.scale = 0.0: it must be above 0, and finite"),
    *(
        (f"{MLA}--model.mla.{size} 0", f"model.mla.{size} = 0: it must be 1 or more")
        for size in ("q_rank", "kv_rank", "plain", "rotated", "value")
    ),
    ("--model.mtp -1", "model.mtp = -1: it must be 0 or more"),
    (
        f"{MOE}--model.moe.top_k 9",
        "model.moe.top_k = 9 is more than model.moe.experts = 8; use model.moe.top_k 8 or less, or model.moe.experts 9 "
        "or more",
    ),
    (
        f"{MOE}--model.moe.groups 3",
        "model.moe.groups = 3 does not divide model.moe.experts = 8; use model.moe.groups 1, 2 or 4, or "
        "model.moe.experts 6 or 9",
    ),
    (
        f"{MOE}--model.moe.groups 8",
        "model.moe.groups = 8 of model.moe.experts = 8 have one expert each, and a group is chosen by its two best "
        "scores; use model.moe.groups 1, 2 or 4",
    ),
    (
        f"{MOE}--model.moe.groups 4 --model.moe.top_groups 5",
        "model.moe.top_groups = 5 is more than model.moe.groups = 4; use model.moe.top_groups 4 or less",
    ),
    (f"{MOE}--model.moe.top_groups 2", "model.moe.top_groups = 2 is more than model.moe.groups = 1; use"),
    (
        f"{MOE}--model.moe.groups 4 --model.moe.top_k 3",
        "model.moe.top_groups 1 x 2 experts a group = 2 are fewer than model.moe.top_k = 3; use model.moe.top_groups 2 "
        "or more, or model.moe.top_k 2 or less",
    ),
    (f"{MOE}--model.activation gelu", "model.activation = gelu, but the experts of model.moe are gated; use model.ac"),
    (f"{MOE}--model.bias true", "the experts of model.moe and their router have no biases; use model.bias false"),
    (
        f"{MOE}--model.moe.dense_layers 4",
        "model.moe.dense_layers = 4 leaves none of model.layers = 4 for experts; use model.moe.dense_layers 3 or less, "
        "or model.layers 5 or more",
    ),
    (
        "--loss.balance_sequence 0.01",
        "loss.balance_sequence = 0.01 is of experts, but model.moe = null: there are none",
    ),
    ("--loss.balance_global 0.01", "there are none; use loss.balance_global 0"),
    ("--loss.router_z 0.001", "there are none; use loss.router_z 0"),
    ("--routing.capacity_factor 1.5", "there are none; use routing.capacity_factor null"),
    ("--routing.placement load", "there are none; use routing.placement fixed"),
    ("--parallel.ep 2", "parallel.ep = 2 is of experts, but model.moe = null: there are none; use parallel.ep 1"),
    *(
        (f"--loss.{name} {value}", f"loss.{name} = {value}: it must be 0 or more, and finite")
        for name, value in [
            *[("mtp", "-0.1"), ("mtp", "nan"), ("balance_sequence", "-1.0"), ("balance_global", "inf")],
            ("router_z", "-0.5"),
        ]
    ),
    ("--routing.bias_rate 0.01", "routing.bias_rate = 0.01 is of experts, but model.moe = null: there are none; use"),
    (
        "--model.preset tiny-switch --routing.bias_rate 0.01",
        "routing.bias_rate = 0.01 moves the experts' biases, but model.moe.bias = false: there are none; use "
        "model.moe.bias true, or routing.bias_rate 0",
    ),
    (
        "--loss.mtp 0.1",
        "loss.mtp = 0.1 weighs multi-token prediction, but model.mtp = 0: no further token is predicted; use model.mtp "
        "1 or more, or loss.mtp 0",
    ),
    ("--routing.bias_rate -0.001", "routing.bias_rate = -0.001: it must be 0 or more, and finite"),
    (f"{MOE}--routing.capacity_factor 0", "routing.capacity_factor = 0.0: it must be above 0, and finite"),
    (
        f"{MOE}--parallel.ep 3",
        "model.moe.experts = 8 cannot be shared out over parallel.ep = 3; use parallel.ep 1, 2, 4 or 8, or "
        "model.moe.experts 6 or 9",
    ),
    (f"{MOE}--parallel.ep 3 --parallel.tp 2 --gpus 4 --batch.micro_size 1", "ep = 3; use parallel.ep 1, 2 or 4, or"),
    (
        f"{MOE}--parallel.ep 8 --parallel.tp 2 --gpus 4 --batch.micro_size 1",
        "parallel.ep = 8 does not divide dp 2 x cp 1 x tp 2 = 4, the ranks that hold the same layers; use parallel.ep "
        "1, 2 or 4",
    ),
    (
        "--model.moe={experts: 6, top_k: 2, ffn: 256} --parallel.ep 3 --parallel.pp 3 --gpus 12 --batch.micro_size 1",
        "parallel.ep = 3 does not divide dp 4 x cp 1 x tp 1 = 4, the ranks that hold the same layers; use parallel.ep "
        "1 or 2",
    ),
    (
        "--model.moe={experts: 8, top_k: 2, ffn: 90, shared: 1} --parallel.tp 4",
        "model.moe.ffn 90 x model.moe.shared 1 = 90, the width of the shared experts, cannot be split over parallel.tp "
        "= 4; use model.moe.ffn 88 or 92, or parallel.tp 1 or 2",
    ),
    (
        "--model.moe={experts: 8, top_k: 2, ffn: 64, dense_layers: 1} --model.ffn 510 --parallel.tp 4",
        "model.ffn = 510 cannot be split over parallel.tp = 4; use model.ffn 508 or 512, or parallel.tp 1 or 2",
    ),
    (f"{MLA}--model.position alibi", "model.position = alibi, but a part of each head of model.mla turns"),
    (
        f"{MLA}--model.mla.value 50",
        "model.mla.value = 50 is more than a key's width of plain + rotated = 48, to which attention's kernels fill "
        "values up; use model.mla.value 48 or less",
    ),
    (
        f"{MLA}--model.mla.rotated 15",
        "model.mla.rotated = 15, and rotary positions turn pairs; use model.mla.rotated 14 or 16",
    ),
    (
        f"{MLA}--model.bias true",
        "model.bias = true, but the matrices of model.mla have no biases; use model.bias false",
    ),
    (f"{MLA}--model.qk_norm true", "and keys come from; use model.qk_norm false"),
    (f"{MLA}--parallel.tp 3", "model.heads = 8 cannot be split over parallel.tp = 3; use parallel.tp 1, 2, 4 or 8"),
    (
        f"{MLA}--parallel.tp 4 --parallel.cp 4 --parallel.cp_method ulysses",
        "shares out heads: 2 heads (of 8, over parallel.tp 4) cannot be split over parallel.cp = 4; use parallel.cp "
        "1 or 2, or parallel.cp_method ring or gather",
    ),
    (
        "--model.mtp 4 --data.seq_len 4",
        "model.mtp = 4 predicts as many tokens after the next, and more than data.seq_len = 4 leaves; use model.mtp 3 "
        "or less, or data.seq_len 5 or more",
    ),
    ("--data.train []", "data.train is empty"),
    ("--data.train.1.weight 0", "data.train.1.weight = 0.0: a weight must be above 0"),
    ("--data.train.0.weight -1", "data.train.0.weight = -1.0"),
    ("--data.train.0.weight .inf", "data.train.0.weight = inf"),
    ("--data.train.0.weight .nan", "data.train.0.weight = nan"),
    (SETS % ("a", "a"), "data.validation has the name a (2 times); each set needs its own"),
    (SETS % ("a/b", "c"), "data.validation has the name 'a/b': it becomes the metric val_loss/NAME"),
    (SETS % ("''", "c"), "data.validation has the name '':"),
    ("--data.seq_len 0", "data.seq_len = 0: it must be 1 or more"),
    ("--data.seq_len 1025", "data.seq_len = 1025 is longer than model.context = 1024; use data.seq_len 1024 or less"),
    ("--data.seq_len 1025", "or model.context 1025 (a model that was trained on 1024 tokens then also wants"),
    ("--model.preset tiny-bloom --data.seq_len 8192", "or model.context 8192 (ALiBi works beyond the length"),
    ("--validate.every 0", "validate.every = 0: it must be 1 or more"),
    ("--validate.tokens 0", "validate.tokens = 0: it must be 1 or more"),
    ("--batch.global_size 0", "batch.global_size = 0: it must be 1 or more"),
    ("--batch.micro_size 0", "batch.micro_size = 0: it must be 1 or more"),
    ("--batch.global_size 10", "batch.global_size = 10 is no multiple of batch.micro_size 4; "),
    ("--batch.global_size 10", "use batch.global_size 8 or 12, or batch.micro_size 1 or 2"),
    ("--batch.global_size 12 --gpus 2", "batch.global_size = 12 is no multiple of batch.micro_size 4 x dp 2 = 8"),
    ("--batch.global_size 12 --gpus 2", "use batch.global_size 8 or 16, or batch.micro_size 1, 2 or 3"),
    ("--batch.global_size 16 --batch.micro_size 2 --parallel.dp 3", "use batch.global_size 12 or 18"),
    ("--batch.global_size 3", "use batch.global_size 4, or batch.micro_size 1 or 3"),
    ("--parallel.dp 0", "parallel.dp = 0: it must be 1 or more"),
    (
        "--parallel.dp 3 --gpus 4 --batch.global_size 16",
        "parallel.dp 3 x pp 1 x cp 1 x tp 1 = 3, but there are 4 ranks; use parallel.dp 4, or auto",
    ),
    (
        "--parallel.tp 8 --gpus 12 --batch.global_size 48",
        "pp 1 x cp 1 x tp 8 = 8 does not divide the 12 ranks there are",
    ),
    ("--parallel.tp 8 --gpus 12 --batch.global_size 48", "use parallel.tp 1, 2 or 4, or 8 or 16 ranks"),
    (
        "--parallel.tp 4 --parallel.pp 2 --gpus 12 --batch.global_size 48",
        "use parallel.tp 1 or 2, or parallel.pp 1 or 3, or 8 or 16 ranks",
    ),
    (
        "--parallel.dp 2 --parallel.tp 8 --gpus 12 --batch.global_size 48",
        "= 16, but there are 12 ranks; use parallel.tp 1, 2 or 4, or",
    ),
    ("--parallel.tp 8 --gpus 12", "the 12 ranks there are; use 8 or 16 ranks"),
    ("--parallel.tp 16 --gpus 2", "use parallel.tp 1 or 2, or 16 ranks"),
    ("--parallel.tp 0", "parallel.tp = 0: it must be 1 or more"),
    ("--parallel.pp 0", "parallel.pp = 0: it must be 1 or more"),
    ("--parallel.cp 0", "parallel.cp = 0: it must be 1 or more"),
    ("--parallel.ep 0", "parallel.ep = 0: it must be 1 or more"),
    ("--parallel.replicate 0", "parallel.replicate = 0: it must be 1 or more"),
    ("--parallel.chunks 0", "parallel.chunks = 0: it must be 1 or more"),
    (
        "--parallel.schedule_memory 0.5",
        "parallel.schedule_memory = 0.5: it must be 1 or more, so that a microbatch can run, and",
    ),
    ("--parallel.schedule_memory .inf", "parallel.schedule_memory = inf: it must be 1 or more, so that"),
    ("--parallel.schedule zbh2", "parallel.schedule = zbh2: did you mean zb-h2? known are naive, gpipe, 1f1b,"),
    ("--parallel.schedule 1b1f", "parallel.schedule = 1b1f: known are naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2,"),
    ("--parallel.schedule 1b1f", "or a CSV file; others register under the entry point fivefold.schedules"),
    ("--parallel.schedule mine.csv", "parallel.schedule = mine.csv: there is no such file; known are naive, gpipe,"),
    (
        "--parallel.schedule zb-v --parallel.pp 2",
        "parallel.schedule = zb-v has 2 model chunks a rank, but parallel.chunks = 1; use parallel.chunks 2, or "
        "parallel.schedule naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2 or auto",
    ),
    (
        "--parallel.schedule dualpipe-v --parallel.pp 3",
        "dualpipe-v has 2 model chunks a rank, but parallel.chunks = 1; use parallel.schedule naive, gpipe",
    ),
    (
        "--parallel.chunks 2 --parallel.pp 2",
        "parallel.schedule = 1f1b has 1 model chunk a rank, but parallel.chunks = 2; use parallel.chunks 1, or "
        "parallel.schedule interleaved, zb-v or auto",
    ),
    ("--parallel.chunks 2 --batch.micro_size 1", "parallel.schedule interleaved, zb-v, dualpipe-v or auto"),
    (
        "--parallel.schedule dualpipe-v --parallel.chunks 2 --parallel.pp 2",
        "parallel.schedule = dualpipe-v on parallel.pp = 2 ranks needs 4 microbatches a step or more, but "
        "batch.global_size 8 / (batch.micro_size 4 x dp 1) = 2; use batch.global_size 16, or batch.micro_size 1 or 2, "
        "or parallel.schedule interleaved, zb-v or auto",
    ),
    (
        "--parallel.schedule dualpipe-v --parallel.chunks 2 --parallel.pp 2 --batch.micro_size 1 --gpus 8",
        "but batch.global_size 8 / (batch.micro_size 1 x dp 4) = 2; use batch.global_size 16, or parallel.schedule",
    ),
    (
        "--parallel.schedule_memory 4",
        "parallel.schedule_memory = 4 limits the greedy schedule, but parallel.schedule = 1f1b is fixed; use "
        "parallel.schedule auto, or parallel.schedule_memory null",
    ),
    (
        "--gpus 8 --parallel.replicate 3",
        "parallel.replicate = 3 does not divide dp = 8; use parallel.replicate 1, 2, 4 or 8",
    ),
    ("--parallel.layers_per_stage [0,6]", "parallel.layers_per_stage = [0, 6]: every stage needs 1 layer or more"),
    ("--parallel.layers_per_stage []", "parallel.layers_per_stage = []: every stage needs"),
    (
        "--model.layers 6 --parallel.layers_per_stage [5]",
        "must be pp x chunks = 1 numbers whose sum is model.layers = 6",
    ),
    ("--model.layers 6 --parallel.layers_per_stage [3,3]", "must be pp x chunks = 1 numbers"),
    ("--parallel.tp 3", "model.heads = 8 cannot be split over parallel.tp = 3; use parallel.tp 1, 2 or 4"),
    (
        "--parallel.tp 8",
        "4 key/value heads (model.kv_heads = 4) cannot be split over parallel.tp = 8; use parallel.tp 1, 2 or 4",
    ),
    (
        "--model.ffn 704 --parallel.tp 3",
        "model.ffn = 704 cannot be split over parallel.tp = 3; use model.ffn 702 or 705, or parallel.tp 1, 2 or 4",
    ),
    (
        "--data.seq_len 250 --parallel.cp 2",
        "data.seq_len = 250 is no multiple of 2 x parallel.cp = 4; use data.seq_len 248 or 252",
    ),
    ("--data.seq_len 6 --parallel.cp 4", "data.seq_len = 6 is no multiple of 2 x parallel.cp = 8; use data.seq_len 8"),
    (
        "--data.seq_len 250 --parallel.cp 4 --parallel.cp_method ulysses",
        "data.seq_len = 250 is no multiple of parallel.cp = 4; use data.seq_len 248 or 252",
    ),
    (
        "--data.seq_len 255 --parallel.tp 2 --batch.micro_size 1",
        "a microbatch of batch.micro_size 1 x data.seq_len 255 / parallel.cp 1 = 255 tokens cannot be split over "
        "parallel.tp = 2; use data.seq_len 254 or 256, or batch.micro_size 2",
    ),
    (
        "--data.seq_len 255 --parallel.tp 2 --batch.micro_size 1 --batch.global_size 7",
        "parallel.tp = 2; use data.seq_len 254 or 256",
    ),
    (
        "--parallel.tp 2 --parallel.cp 4 --parallel.cp_method ulysses",
        "parallel.cp_method = ulysses shares out heads: 4 query and 2 key/value heads (of 8 and 4, over parallel.tp 2) "
        "cannot be split over parallel.cp = 4; use parallel.cp 1 or 2, or parallel.cp_method ring or gather",
    ),
    (
        "--model.vocab 5 --parallel.tp 4",
        "model.vocab = 5 has no row for each of parallel.tp = 4 ranks; use model.vocab 8, or parallel.tp 1 or 2",
    ),
    (
        "--parallel.pp 2 --parallel.chunks 3",
        "parallel.pp 2 x parallel.chunks 3 = 6 stages, but model.layers = 4; use parallel.pp 1, or "
        "model.layers 6 or more",
    ),
    (
        "--parallel.pp 2 --parallel.chunks 5",
        "parallel.pp 2 x parallel.chunks 5 = 10 stages, but model.layers = 4; use model.layers 10 or more",
    ),
    (
        "--parallel.zero 0 --parallel.replicate 2 --gpus 4 --batch.micro_size 1",
        "parallel.zero = 0 shards nothing over dp = 4, so parallel.replicate = 2 has no meaning; use "
        "parallel.replicate 1 or 4, or parallel.zero 1, 2 or 3",
    ),
    ("--precision.linear fp4", "precision.linear = fp4: this version does not run 8-bit and 4-bit linear layers"),
    ("--precision.compute fp16", "precision.compute = fp16: this version does not scale the loss"),
    (
        "--precision.moments bf16",
        "precision.moments = bf16, but master weights are in fp32 (auto): this version keeps the moments in their "
        "format; use precision.moments auto",
    ),
    ("--precision.moments bf16 --precision.master fp32", "moments = bf16, but master weights are in fp32: this"),
    ("--precision.moments fp32 --precision.master bf16", "moments = fp32, but master weights are in bf16: this"),
    (
        "--precision.moments fp32 --precision.compute fp64",
        "moments = fp32, but master weights are in fp64 (auto): this",
    ),
    ("--recompute.every 2", "recompute.every = 2 chooses layers, but recompute.mode = none recomputes nothing; "),
    ("--recompute.every 2", "use recompute.mode selective or full, or recompute.every 1"),
    ("--offload [parameters]", "offload = [parameters]: the update happens where the parameters are"),
    ("--offload [parameters,activations]", "use offload [optimizer, parameters, activations]"),
    (
        "--offload [optimizer,activations,optimizer]",
        "offload = [optimizer, activations, optimizer] names a thing twice; use offload [optimizer, activations]",
    ),
    (
        "--offload [activations,heavy-activations] --parallel.pp 2",
        "offload = [activations, heavy-activations]: activations are those of all layers, heavy-activations those of "
        "some; use offload [activations], or offload [heavy-activations]",
    ),
    (
        "--offload [optimizer,heavy-activations]",
        "offload heavy-activations evens out what the pipeline ranks keep, but parallel.pp = 1; use offload "
        "[optimizer, activations], or parallel.pp 2 or more",
    ),
    ("--recompute.every 0", "recompute.every = 0: it must be 1 or more"),
    ("--optim.name adam", "optim.name = adam: did you mean adamw? known are adamw"),
    ("--optim.lr -1", "optim.lr = -1.0: it must be 0 or more, and finite"),
    ("--optim.lr .nan", "optim.lr = nan: it must be 0 or more, and finite"),
    ("--optim.lr .inf", "optim.lr = inf: it must be 0 or more, and finite"),
    ("--optim.betas [0.9,1]", "optim.betas = [0.9, 1.0]: both must be 0 or more and below 1"),
    ("--optim.betas [-0.1,0.9]", "optim.betas = [-0.1, 0.9]"),
    ("--optim.betas [0.9,.nan]", "optim.betas = [0.9, nan]"),
    ("--optim.eps 0", "optim.eps = 0.0: it must be from 1e-37"),
    ("--optim.eps 1e-50", "optim.eps = 1e-50: it must be from 1e-37, below which it is 0 in fp32 and 0 / 0 an update"),
    ("--optim.eps .inf", "optim.eps = inf: it must be from 1e-37"),
    ("--optim.weight_decay -0.1", "optim.weight_decay = -0.1: it must be 0 or more"),
    ("--optim.clip 0", "optim.clip = 0.0: it must be above 0; null (or .inf) turns clipping off"),
    ("--optim.clip -1", "optim.clip = -1.0: it must be above 0"),
    ("--optim.clip .nan", "optim.clip = nan: it must be above 0"),
    ("--optim.clip nan", "optim.clip = nan: it must be above 0"),
    ("--optim.warmup_fraction 1.1", "optim.warmup_fraction = 1.1: it must be from 0 to 1"),
    ("--optim.warmup_fraction -0.1", "optim.warmup_fraction = -0.1: it must be from 0 to 1"),
    ("--optim.decay cosin", "optim.decay = cosin: did you mean cosine? known are constant, cosine, linear, wsd"),
    ("--optim.decay_steps 0", "optim.decay_steps = 0: it must be 1 or more"),
    (
        "--optim.decay_steps 271",
        "optim.decay_steps = 271 is more than the 270 steps that the warm-up leaves (of 300 steps",
    ),
    ("--optim.decay constant --optim.decay_steps 5", "optim.decay = constant has no decay, but optim.decay_steps = 5"),
    ("--optim.final_lr_fraction -1", "optim.final_lr_fraction = -1.0: it must be 0 or more"),
    ("--checkpoint.every 0", "checkpoint.every = 0: it must be 1 step or more"),
    ("--checkpoint.every 30mni", "checkpoint.every: '30mni' is no duration; write one as 90s, 30min, 2h or 1d"),
    ("--checkpoint.every 0s", "checkpoint.every: '0s' is no duration"),
    ("--checkpoint.keep 0", "checkpoint.keep = 0: it must be 1 or more"),
    ("--log.every 0", "log.every = 0: it must be 1 or more"),
]


def flags(text: str) -> list[str]:
    """The words of a flag line; a `--key=value` may hold blanks up to the next ` --`."""
    parts = [part if part.startswith("--") else f"--{part}" for part in text.split(" --")]
    return [word for part in parts for word in ([part] if "=" in part.split(" ")[0] else part.split(" ", 1))]


@pytest.mark.parametrize(("line", "expected"), BROKEN, ids=[f"{line} | {expected[:30]}" for line, expected in BROKEN])
def test_a_broken_rule_says_the_numbers_and_what_to_do(refusal: Refusal, line: str, expected: str) -> None:
    assert expected in refusal(*flags(line))


def test_every_rule_is_broken_by_a_line_of_the_table(unchecked: Load) -> None:
    broken = set()
    for line in {line for line, _ in BROKEN}:
        run = unchecked(*flags(line))
        broken |= {rule.name for rule in broken_rules(with_world(run, run.cluster.gpus))}
    assert {rule.name for rule in RULES} - broken == set()


@pytest.mark.parametrize(
    "line",
    [
        f"{MLA}--model.mla.plain -1",
        f"{MLA}--model.mla.rotated -2",
        f"{ROPE}{{type: yarn, factor: 2, original_context: 8}} --model.rope_scaling.beta_fast 0",
        "--parallel.schedule zb-v --batch.micro_size 0",
        "--parallel.schedule zb-v --batch.global_size 0",
        "--parallel.schedule zb-v --parallel.dp -1",
    ],
)
def test_what_follows_from_an_impossible_value_is_not_said_beside_it(unchecked: Load, line: str) -> None:
    (sentence,) = check(unchecked(*flags(line)))
    assert ": it must be " in sentence


def test_groups_of_one_expert_get_one_piece_of_advice(unchecked: Load) -> None:
    """Beside it stood to choose more groups of them."""
    (sentence,) = check(unchecked(*flags(f"{MOE}--model.moe.experts 7 --model.moe.groups 7")))
    assert sentence.endswith("and a group is chosen by its two best scores; use model.moe.groups 1")


LEGAL = [
    "--optim.clip null",
    "--optim.clip .inf",
    "--optim.clip inf",
    "--optim.lr 0",
    "--optim.warmup_fraction 0",
    "--optim.warmup_fraction 1",
    "--optim.decay_steps 270",
    "--optim.decay wsd --optim.decay_steps 30",
    "--validate.every null",
    "--checkpoint.every null",
    "--checkpoint.every never",
    "--checkpoint.every 2h",
    "--checkpoint.every 90s",
    "--steps null --tokens 1e9",
    "--parallel.zero 0",
    "--parallel.zero 3",
    "--precision.compute fp64",
    "--precision.moments bf16 --precision.master bf16 --precision.reduce bf16",
    "--precision.moments fp32 --precision.master fp32",
    "--parallel.pp 4",
    "--parallel.pp 4 --parallel.schedule gpipe",
    "--parallel.pp 2 --parallel.chunks 2 --parallel.schedule interleaved",
    "--parallel.pp 4 --parallel.schedule interleaved",
    "--parallel.pp 2 --parallel.chunks 2 --parallel.schedule zb-v",
    "--parallel.pp 2 --parallel.chunks 2 --parallel.schedule dualpipe-v --batch.micro_size 2",
    "--parallel.pp 2 --parallel.schedule auto --parallel.schedule_memory 1",
    "--parallel.chunks 4 --parallel.schedule auto",
    "--parallel.pp 2 --parallel.layers_per_stage memory",
    "--parallel.pp 2 --parallel.layers_per_stage [1,3]",
    "--parallel.pp 2 --offload [heavy-activations]",
    "--model.tied true --parallel.pp 2 --parallel.zero 2 --parallel.tp 2 --recompute.mode full",
    "--data.validation []",
    "--data.seq_len 1024",
    "--data.seq_len 2048 --model.context 2048",
    "--model.preset tiny-bloom --data.seq_len 8192 --model.context 8192",
    "--model.head_dim 48",
    "--model.heads 6 --model.kv_heads 6 --model.head_dim 32",
    "--model.preset tiny-bloom --model.hidden 36 --model.ffn 144",
    "--gpus 2",
    "--gpus 2 --parallel.dp 2",
    "--model.layers 6 --parallel.layers_per_stage [6]",
    "--parallel.tp 4 --parallel.cp 4",
    "--parallel.tp 2 --parallel.cp 2 --parallel.cp_method ulysses",
    "--data.seq_len 250 --parallel.cp 2 --parallel.cp_method ulysses",
    "--data.seq_len 255 --parallel.tp 4",
    "--model.vocab 1003 --parallel.tp 4",
    "--model.vocab 4 --parallel.tp 4",
    "--parallel.replicate 2",
    "--parallel.replicate 2 --gpus 4 --batch.micro_size 1",
    "--parallel.replicate 4 --gpus 4 --batch.micro_size 1 --parallel.zero 0",
    "--recompute.mode full --recompute.every 2",
    "--recompute.mode selective",
    "--offload [optimizer,parameters,activations]",
    f"{MOE}--parallel.ep 8",
    f"{MOE}--parallel.ep 8 --parallel.tp 4 --gpus 8 --batch.micro_size 1",
    f"{MOE}--parallel.ep 2 --parallel.dp 2 --routing.capacity_factor 0.5 --loss.router_z 1e-3",
    f"{MOE}--model.ffn 511 --parallel.tp 4",
    "--model.moe={experts: 8, top_k: 2, ffn: 255, dense_layers: 3} --parallel.tp 4",
    "--model.moe={experts: 8, top_k: 8, ffn: 64, shared: 2, groups: 4, top_groups: 4}",
    "--model.moe={experts: 1, top_k: 1, ffn: 64}",
    f"{MLA}--parallel.tp 8",
    f"{MLA}--model.heads 6 --model.kv_heads 4 --model.head_dim 33 --model.ffn 510 --parallel.tp 3 "
    "--batch.micro_size 3 --batch.global_size 3",
    f"{MLA}--parallel.cp 4 --parallel.tp 2 --parallel.cp_method ulysses",
    "--model.mtp 3 --data.seq_len 4",
    *(f"--model.preset {name} --routing.bias_rate 0" for name in ("tiny-moe", "tiny-switch", "tiny-deepseek")),
]


@pytest.mark.parametrize("line", LEGAL)
def test_what_is_legal_is_left_alone(load: Load, line: str) -> None:
    assert check(load(*flags(line))) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "fitting"),
    [(6, 2, 4, "1 or 2"), (6, 6, 4, "1, 2, 3 or 6"), (6, 3, 2, "1 or 3"), (5, 5, 2, "1"), (12, 3, 3, None)],
)
def test_heads_that_tp_cannot_split_are_refused_with_what_it_can(
    heads: int, kv_heads: int, tp: int, fitting: str | None
) -> None:
    model = Model(layers=5, hidden=heads * 8, heads=heads, kv_heads=kv_heads, ffn=48)
    run = Run(
        name="a", steps=1, model=model, data=Data(train=[Source(path="x")], seq_len=128), parallel=Parallel(tp=tp)
    )
    about_heads = [sentence for sentence in check(run) if "heads" in sentence]
    assert all(f"over parallel.tp = {tp}; use parallel.tp {fitting}" in sentence for sentence in about_heads)
    assert bool(about_heads) == (fitting is not None)


@pytest.mark.parametrize(
    ("seq_len", "cp", "fitting"),
    [
        *[(250, 2, "248 or 252"), (250, 4, "248 or 256"), (254, 2, "252 or 256"), (254, 4, "248 or 256")],
        *[(255, 2, "252 or 256"), (255, 4, "248 or 256"), (256, 2, None), (256, 4, None)],
        *[(6, 2, "4 or 8"), (6, 4, "8"), (255, 1, None)],
    ],
)
def test_sequences_that_cp_cannot_cut_are_refused_with_the_lengths_that_it_can(
    unchecked: Load, seq_len: int, cp: int, fitting: str | None
) -> None:
    run = unchecked("--data.seq_len", str(seq_len), "--parallel.cp", str(cp))
    about_length = [sentence for sentence in check(run) if "seq_len" in sentence]
    expected = f"data.seq_len = {seq_len} is no multiple of 2 x parallel.cp = {2 * cp}; use data.seq_len {fitting}"
    assert about_length == ([] if fitting is None else [expected])


def test_all_that_tp_cannot_split_is_said_at_once() -> None:
    model = Model(layers=5, hidden=48, heads=6, kv_heads=2, ffn=50, vocab=3)
    data = Data(train=[Source(path="x")], seq_len=127)
    found = check(Run(name="a", steps=1, model=model, data=data, parallel=Parallel(tp=4)))
    starts = ("model.heads = 6", "2 key/value heads", "model.ffn = 50", "model.vocab = 3", "a microbatch of")
    assert all(sentence.startswith(start) for sentence, start in zip(found, starts, strict=True)), found


def test_a_length_that_cp_can_cut_is_one_that_tp_can_share_and_that_the_context_allows(unchecked: Load) -> None:
    layout = ["--parallel.cp", "2", "--parallel.tp", "4", "--batch.micro_size", "1"]
    for length, expected in ((250, ["248 or 256"] * 2), (252, ["248 or 256"]), (256, [])):
        found = check(unchecked(*layout, "--data.seq_len", str(length)))
        lengths = [sentence.split("; use data.seq_len ")[1].split(", or batch")[0] for sentence in found]
        assert lengths == expected
    (at_the_end,) = check(unchecked(*layout, "--data.seq_len=252", "--model.context=255"))
    assert "use data.seq_len 248, or batch.micro_size 2" in at_the_end


def test_the_names_that_are_built_in_are_those_that_the_torch_half_has() -> None:
    from fivefold.model.family import BUILT_IN
    from fivefold.optim.optimizer import OPTIMIZERS
    from fivefold.optim.schedule import DECAYS

    assert sorted(BUILT_IN) == list(ranges.FAMILIES)
    assert sorted(OPTIMIZERS) == list(ranges.OPTIMIZERS)
    assert sorted(DECAYS) == list(ranges.DECAYS)


class Point:
    """An entry point of the group `fivefold.schedules`."""

    name, value, module = "mine", "mine:schedule", "mine"

    def __init__(self, found: object) -> None:
        self.found = found

    def load(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "chunks", "expected"),
    [
        (Demands(chunks=3, splits=False), 3, None),
        (Demands(chunks=None, splits=False), 1, None),
        (Demands(chunks=3, splits=False), 1, "parallel.schedule = mine has 3 model chunks a rank, but"),
        (Demands(chunks=None, splits=False, microbatches_a_rank=9), 1, "= mine on parallel.pp = 1 ranks needs 9 micro"),
        (
            len,
            1,
            "= mine: what is registered under fivefold.schedules is a builtin_function_or_method, and should be a",
        ),
        (ImportError("no torch"), 1, "as mine:schedule, which cannot be imported: no torch"),
    ],
)
def test_a_schedule_that_another_package_registers_is_asked_what_it_demands(
    monkeypatch: pytest.MonkeyPatch, unchecked: Load, found: object, chunks: int, expected: str | None
) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point(found)] * (group == "fivefold.schedules"))
    problems = check(unchecked("--parallel.schedule", "mine", "--parallel.chunks", str(chunks)))
    assert [expected in problem for problem in problems if expected] == [True] * (expected is not None)
    assert bool(problems) == (expected is not None)
    named = "zb-h2, zb-v, dualpipe-v, auto, mine, or a CSV file"
    assert named in check(unchecked("--parallel.schedule", "nobodys"))[0]


def test_a_registered_schedule_is_offered_where_it_fits(monkeypatch: pytest.MonkeyPatch, unchecked: Load) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point(Demands(chunks=1, splits=False))])
    (sentence,) = check(unchecked("--parallel.schedule", "zb-v"))
    assert sentence.endswith("zb-h2, auto or mine")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point(ImportError("no torch"))])
    (sentence,) = check(unchecked("--parallel.schedule", "zb-v"))
    assert sentence.endswith("zb-h2 or auto")


def test_a_schedule_file_is_enough_for_the_rules(folder: Path, load: Load) -> None:
    (folder / "mine.csv").write_text("0F0,0B0\n")
    assert check(load("--parallel.schedule", "mine.csv", "--parallel.chunks", "3")) == []


def test_the_world_decides_dp_and_with_it_the_batch(load: Load) -> None:
    run = load("--batch.global_size", "12")
    assert check(run) == []
    assert check(run, world=3) == []
    assert check(run, world=2) == [
        "batch.global_size = 12 is no multiple of batch.micro_size 4 x dp 2 = 8; "
        "use batch.global_size 8 or 16, or batch.micro_size 1, 2 or 3"
    ]
    assert check(load("--parallel.dp", "2", "--batch.global_size", "16"), world=4) == [
        "parallel.dp 2 x pp 1 x cp 1 x tp 1 = 2, but there are 4 ranks; use parallel.dp 4, or auto"
    ]


def test_the_ranks_that_run_count_more_than_those_of_the_plan(load: Load) -> None:
    run = load("--gpus", "2", "--batch.global_size", "12", "--batch.micro_size", "2")
    assert check(run) == []
    assert with_world(run, 4).parallel.dp == 4
    assert check(run, world=4) != []


def test_an_impossible_number_of_ranks_in_the_file_is_reported_whatever_runs(unchecked: Load) -> None:
    assert check(unchecked("--gpus", "0"), world=2) == ["cluster.gpus = 0: it must be 1 or more"]


def test_an_impossible_size_is_reported_once_and_divides_nothing(load: Load, refusal: Refusal) -> None:
    message = refusal("--model.heads", "0", "--parallel.tp", "0", "--batch.micro_size", "0", "--parallel.cp", "-1")
    assert message.count("must be") == 4


def test_sizes_beyond_reason_are_answered_as_well(unchecked: Load) -> None:
    absurd = ["--model.hidden", str(10**30 + 57), "--model.heads", str(10**18 + 9), "--gpus", str(10**20)]
    assert "model.hidden" in " ".join(check(unchecked(*absurd)))


def test_rules_have_names_and_keys_that_exist(load: Load) -> None:
    run = load(*flags(f"{ROPE}{LINEAR} {MOE}{MLA}".strip()))
    for rule in RULES:
        for key in rule.about:
            value_of(run, key)
    assert len({(rule.name, rule.about) for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30min", 1800), ("2h", 7200), ("1.5h", 5400), ("1d", 86400), (" 2 h ", 7200)]
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "min", "30 minutes", "-1h", "0h", "1h30min", "1e3s", "infs", "nan h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no duration; write one as 90s, 30min, 2h or 1d"):
        parse_duration(text)


def test_divisors_multiples_and_choices() -> None:
    assert divisors_of(12) == [1, 2, 3, 4, 6, 12]
    assert divisors_of(49) == [1, 7, 49]
    assert multiples_around(10, 4) == [8, 12]
    assert multiples_around(3, 4) == [4]
    assert choices([1]) == "1"
    assert choices(range(1, 13)) == "1, 2, 3, 4, 5, 6, ..., 11 or 12"
