"""What a model is trained for beside the next token's cross-entropy, in constants that hold for a whole run.

The weights of the run file's section `loss` are divided here by what their losses are means over: all sequences, or all
tokens, of a step. So each microbatch adds final sums, as the cross-entropy does, and no factor of ranks or microbatches
appears anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.run import Run


@dataclass(frozen=True)
class Objective:
    """By default the next token's cross-entropy alone, with no token dropped."""

    a_sequence: float = 0.0
    """Weight of one sequence's balance loss."""
    a_token: float = 0.0
    """Weight of one token's part in the balance loss over all tokens."""
    a_logit: float = 0.0
    """Weight of one token's squared log-sum-exp of the router's logits."""
    capacity_factor: float | None = None
    """How many times its even share of a sequence's choices an expert takes at most; None for any number."""
    bias_rate: float = 0.0
    """What an expert's bias rises or falls by a step."""
    mtp: float = 0.0
    """Weight of the mean loss over the depths of multi-token prediction."""

    @classmethod
    def of(cls, run: Run) -> Objective:
        """That of a run."""
        sequences = run.batch.global_size
        tokens = sequences * run.data.seq_len
        return cls(
            a_sequence=run.loss.balance_sequence / sequences,
            a_token=run.loss.balance_global / tokens,
            a_logit=run.loss.router_z / tokens,
            capacity_factor=run.routing.capacity_factor,
            bias_rate=run.routing.bias_rate,
            mtp=run.loss.mtp,
        )
