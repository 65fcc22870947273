"""The run file as classes: one `Run`, one class a section, one sentence under each field.

Everything a run can be told stands here, and nothing else: what must hold *between* fields is in `rules.py`, reading a
file and its overrides in `files.py`. The sentences below the fields are the reference page and the comments that
`fivefold init` writes, so they give the unit and the reason of the default. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Auto = Literal["auto"]
ComputeType = Literal["fp64", "fp32", "bf16", "fp16"]
StateType = Literal["auto", "fp32", "bf16"]
RecomputeMode = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
"""From the one that keeps most on."""


class Section(BaseModel):
    """A part of the run file. Unknown keys are refused; a value is never changed after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is wanted; Python would take them for 1 and 0."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        listed = value if isinstance(value, list | tuple) else [value]
        if wanted is not bool and any(isinstance(item, bool) for item in listed):
            raise ValueError("true and false are no numbers")
        return value


class Cluster(Section):
    """The machines that the run is planned for."""

    gpu: str = "auto"
    """Name of the accelerator, such as `h100`, or a YAML file that describes one; `auto` takes what is found here."""
    gpus: int | Auto = "auto"
    """Accelerators (or CPU processes) in all; `auto` takes what is found, or what the launcher started."""
    gpus_per_node: int | Auto = "auto"
    """Accelerators in one node; `auto` is the catalogue's usual number."""
    nic_gbit_s: float | Auto = "auto"
    """Network bandwidth of one accelerator in Gbit/s, one direction; `auto` is the catalogue's."""
    price_per_gpu_hour: float | None = None
    """Money for one accelerator hour, in any currency; null leaves cost out."""


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the length that a model was trained for."""

    type: Literal["linear", "llama3", "yarn"]
    """`linear` divides every frequency; `llama3` only the low ones; `yarn` blends the two and scales attention."""
    factor: float
    """How many times longer the context becomes."""
    original_context: int | None = None
    """Tokens of context before the stretch; needed by llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / this are divided by the factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / this stay."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context above which a frequency stays."""
    beta_slow: float = 1.0
    """yarn: rotations over the original context below which a frequency is divided by the factor."""
    attention_factor: float | None = None
    """yarn: multiplies cosine and sine; null is 0.1 ln(factor) + 1, or what mscale and mscale_all_dim say."""
    mscale: float | None = None
    """yarn with model.mla (DeepSeek-V3): with attention_factor null, cosine and sine are multiplied by (0.1 mscale
    ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: float | None = None
    """yarn with model.mla: attention's scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1) squared."""


class Experts(Section):
    """The mixture of experts in the place of a layer's feed-forward: a router sends each token to a few experts."""

    experts: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that each token is sent to."""
    ffn: int
    """Width inside one expert."""
    shared: int = 0
    """Shared experts, which see every token: one feed-forward of this many times an expert's width."""
    dense_layers: int = 0
    """Leading layers that have a dense feed-forward (of width model.ffn) instead."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How a token's affinity to each expert becomes a score."""
    normalize: bool = True
    """Whether the gates, the scores of a token's chosen experts, are divided by their sum."""
    scale: float = 1.0
    """Multiplies the gates."""
    groups: int = 1
    """Equal groups of experts, to limit how many groups (and so nodes) a token is sent to."""
    top_groups: int = 1
    """Groups that a token's experts are chosen from: those whose two best scores have the greatest sums."""
    bias: bool = False
    """Whether each expert has a bias that is added to its score for the choice alone and balances the load
    (DeepSeek-V3); see routing.bias_rate."""


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one short vector a token.

    A query or key head is `plain` + `rotated` wide, of which the last part turns with the position; the rotated part
    of the key is one for all heads.
    """

    q_rank: int | None = None
    """Width of the short vector that queries come from; null for queries straight from the residual stream."""
    kv_rank: int
    """Width of the short vector that keys and values come from."""
    plain: int
    """Width of the part of a query or key head that knows no position."""
    rotated: int
    """Width of the part that the rotary embedding turns."""
    value: int
    """Width of a value head."""


class Model(Section):
    """The architecture. A preset or a Hugging Face directory fills these fields; each can be overridden by name."""

    preset: str | None = None
    """Name of a preset (`fivefold presets` lists them), or a YAML file of the fields below."""
    from_: str | None = Field(default=None, alias="from")
    """A Hugging Face directory or hub id whose config.json gives the architecture."""
    weights: Literal["load", "random"] = "random"
    """With `from`: start from its weights, or from new random ones."""
    family: str = "llama"
    """Which file format: `llama` (also Mixtral and Qwen3, dense or with experts), `deepseek` (DeepSeek-V3), `bloom`, or
    one of your own (`fivefold.families`)."""
    layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int | Auto = "auto"
    """Key/value heads (grouped-query attention); `auto` is as many as query heads."""
    head_dim: int | Auto = "auto"
    """Width of a head; `auto` is hidden / heads."""
    ffn: int
    """Width inside the feed-forward."""
    vocab: int | Auto = "auto"
    """Rows of the embedding; `auto` is the tokenizer's vocabulary."""
    context: int = 2048
    """Longest sequence, in tokens, that the model is made for; data.seq_len may be less. An export states it."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before attention and feed-forward, and at the end."""
    norm_eps: float = 1e-5
    """Added to the variance inside the normalization."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """`swiglu` is gated, with two up-projections; `gelu` is the tanh approximation."""
    bias: bool = False
    """Whether the linear layers and norms of a block have biases."""
    position: Literal["rope", "alibi"] = "rope"
    """Rotary embedding of queries and keys, or a linear bias on attention by distance."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies for long context; null for none."""
    qk_norm: bool = False
    """Normalize each query and key head before the rotary embedding (Qwen3)."""
    embedding_norm: bool = False
    """Normalize the embedding's output (BLOOM)."""
    tied: bool = False
    """Whether the output head uses the embedding's weights."""
    moe: Experts | None = None
    """Experts in the place of the feed-forward; null for a dense model."""
    mla: LatentAttention | None = None
    """Latent attention in the place of grouped queries; kv_heads and head_dim are then not read. Null for none."""
    mtp: int = 0
    """Depth of multi-token prediction: so many tokens after the next are predicted too, each by a further block."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back to the residual have it / sqrt(2 layers)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of a family of your own, passed to it as they are."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads if self.head_dim == "auto" else self.head_dim

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads."""
        return self.heads if self.kv_heads == "auto" else self.kv_heads


class Source(Section):
    """One token set to train on."""

    path: Path
    """Folder written by `fivefold data build`, or the common prefix of a .bin/.idx pair; from the current directory."""
    weight: float = 1.0
    """Share of the tokens, relative to the other sources' weights."""


class ValidationSet(Section):
    """One token set to validate on."""

    name: str
    """Its metric is val_loss/NAME."""
    path: Path
    """As in data.train."""


class Data(Section):
    """What the model reads."""

    train: list[Source]
    """Token sets and their weights."""
    validation: list[ValidationSet] = Field(default_factory=list)
    """Token sets to validate on, each reported by its own name."""
    seq_len: int = 1024
    """Tokens of a training sequence."""
    document_mask: bool = True
    """Keep attention and positions inside a document; its first token is then no target."""
    tokenizer: str = "auto"
    """`auto` is the one stored beside the data; a file or directory is needed for .bin/.idx files made elsewhere."""


class Validate(Section):
    """How often the validation sets are read, and how much of them."""

    every: int | None = 100
    """Optimizer steps between validations; also at step 0 and at the end; null for never."""
    tokens: int = 200_000
    """Tokens of a set at most, the same each time; a smaller set is read whole."""


class Batch(Section):
    """How many sequences make a step."""

    global_size: int = 8
    """Sequences an optimizer step, over all ranks."""
    micro_size: int = 1
    """Sequences a microbatch of one rank; the steps accumulated are global_size / (micro_size x dp)."""


class Parallel(Section):
    """The layout: world = pp x dp x cp x tp."""

    tp: int = 1
    """Tensor (and sequence) parallel degree; it divides heads, kv_heads and ffn; keep it inside the NVLink domain."""
    pp: int = 1
    """Pipeline parallel degree: ranks that share out the layers; they hold pp x chunks stages."""
    cp: int = 1
    """Context parallel degree: ranks that share one sequence; 2 x cp divides seq_len (ulysses: cp does)."""
    ep: int = 1
    """Expert parallel degree: ranks that share out a layer's experts; it divides dp x cp x tp, innermost first."""
    dp: int | Auto = "auto"
    """Data-parallel replicas; `auto` is world / (pp x cp x tp)."""
    replicate: int = 1
    """Of dp, the replicas that are not sharded (hybrid sharding): dp = replicate x shard, replicate outside."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicates all, 1 shards optimizer state, 2 and gradients, 3 and parameters; with pp above 1, 2 is as 1."""
    schedule: str = "1f1b"
    """Pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, auto (the greedy one), a name
    registered under the entry point `fivefold.schedules`, or a CSV file; 1f1b is the plainest that keeps few
    activations."""
    schedule_memory: float | None = None
    """With schedule auto: the most activations that a rank may hold, in those of all its layers for one microbatch;
    null for no limit."""
    chunks: int = 1
    """Stages of each pipeline rank: zb-v and dualpipe-v have 2, interleaved and auto any number, the others 1."""
    layers_per_stage: list[int] | Literal["auto", "memory"] = "auto"
    """Layers of each of the pp x chunks stages; `auto` gives the busiest rank as little to do as can be, `memory` makes
    the fullest rank as empty as can be."""
    cp_method: Literal["ring", "gather", "ulysses"] = "ring"
    """How the ranks of cp attend to each other's part: keys and values travel, are gathered, or heads are exchanged."""


class Precision(Section):
    """Number formats."""

    compute: ComputeType = "bf16"
    """Format of matrix products and activations."""
    linear: Literal["auto", "fp8-block", "fp8-tensor", "fp4"] = "auto"
    """Format of the linear layers' products; `auto` is as compute."""
    master: StateType = "auto"
    """Format in which weights are kept; `auto` is fp32 (fp64 with compute fp64)."""
    moments: StateType = "auto"
    """Format of the optimizer's moments, which this version keeps as the master weights; `auto` as master."""
    reduce: StateType = "auto"
    """Format in which gradients are accumulated and reduced; `auto` as master."""


class Recompute(Section):
    """Which activations are computed again in backward instead of kept."""

    mode: RecomputeMode = "none"
    """`selective` keeps matrix products and attention's output; `full` keeps a block's input only."""
    every: int = 1
    """Of every n-th layer."""


class Optim(Section):
    """The optimizer and its learning rate."""

    name: str = "adamw"
    """`adamw`, or one of your own (entry point `fivefold.optimizers`)."""
    lr: float = 3e-4
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of the weights with two or more dimensions; norms and biases have none."""
    clip: float | None = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it; null or .inf for no limit."""
    warmup_fraction: float = 0.1
    """Share of all steps in which the rate rises from zero."""
    decay: str = "cosine"
    """Shape after the warm-up: cosine, linear, wsd (constant, then linear), constant, or one of your own."""
    decay_steps: int | None = None
    """Steps of the decay, up to the last step; null is all after the warm-up (wsd: a fifth of all steps)."""
    final_lr_fraction: float = 0.1
    """Rate at the end, as a share of lr."""


class Loss(Section):
    """Weights of what is added to the cross-entropy of the next token. `loss` in the metrics is without them."""

    mtp: float = 0.3
    """Of the mean loss over the depths of multi-token prediction; read with model.mtp."""
    balance_sequence: float = 0.0
    """Of the experts' balance within each sequence: experts x sum of (share of the choices x mean probability)."""
    balance_global: float = 0.0
    """Of the experts' balance over all tokens: the shares are those of the step before."""
    router_z: float = 0.0
    """Of the mean squared log-sum-exp of the router's logits, which keeps them small."""


class Routing(Section):
    """How tokens are spread over the experts of a model that has some."""

    bias_rate: float = 1e-3
    """What an expert's bias rises or falls by a step, if it had fewer or more tokens than the mean; with
    model.moe.bias."""
    capacity_factor: float | None = None
    """An expert takes at most this many times its even share of a sequence's choices, and later ones are dropped (and
    counted); null drops none."""
    placement: Literal["fixed", "load"] = "fixed"
    """`load` moves experts at each checkpoint so that the ranks of ep get equal loads, as measured since the last."""


class Checkpoint(Section):
    """When the state is written to disk."""

    every: int | str | None = 100
    """Optimizer steps between checkpoints, or a time (90s, 30min, 2h); null for one at the end only, never for none."""
    keep: int = 3
    """How many of the newest stay on disk."""


class Log(Section):
    """Where metrics go; metrics.jsonl is always written."""

    every: int = 1
    """Steps between lines on the console and in TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases (extra `wandb`), or only write its files."""


class Run(Section):
    """A run: everything that decides what is computed, and where it is written."""

    name: str
    """Name of the run, its folder under `out`: letters, digits, `.`, `_`, `-`."""
    out: Path = Path("runs")
    """Folder of all runs, from the current directory; shared storage when there are several nodes."""
    seed: int = 0
    """Decides the initial weights and the order of the data."""
    steps: int | None = None
    """Optimizer steps; give this or tokens."""
    tokens: float | None = None
    """Tokens to train on, rounded up to whole steps; give this or steps."""
    cluster: Cluster = Cluster()
    model: Model
    data: Data
    validation: Validate = Field(default=Validate(), alias="validate")
    batch: Batch = Batch()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    offload: list[Literal["optimizer", "parameters", "activations", "heavy-activations"]] = Field(default_factory=list)
    """What is kept in CPU memory while it is not used; `parameters` only with `optimizer`, which updates them;
    `heavy-activations` are those of so many layers that no pipeline rank keeps more than the mean of all ranks."""
    optim: Optim = Optim()
    loss: Loss = Loss()
    routing: Routing = Routing()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @property
    def folder(self) -> Path:
        """Where this run writes."""
        return self.out / self.name

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None, "a run has steps or tokens: a rule checks it"
        return -(-int(self.tokens) // (self.batch.global_size * self.data.seq_len))

    @classmethod
    def load(cls, file: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Run:
        """Read a run file. `overrides` are flags as on the command line, such as `["--optim.lr", "1e-3"]`.

        Raises `fivefold.config.files.ConfigError` with one message that lists everything that is wrong. A run that is
        legal and that this version cannot train is read as well, for a plan; `fivefold.train` refuses it.
        """
        from fivefold.config.files import load_run
        from fivefold.config.rules import LEGALITY

        return load_run(Path(file), overrides, LEGALITY)
