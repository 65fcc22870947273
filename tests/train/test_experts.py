"""What routers remember changes once a step, by what was trained on, and by nothing else."""

import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full

FLAGS = (
    *("--model.moe", "{experts: 4, top_k: 2, ffn: 16, scores: sigmoid, bias: true}", "--steps", "5"),
    *("--loss.balance_global", "0.1", "--routing.bias_rate", "0.05", "--routing.capacity_factor", "1.0"),
)


def test_validation_between_steps_leaves_biases_loads_and_all_else_as_they_are(trainer):
    """Its tokens got into the next change of the biases in another system."""
    saved = {}
    for every in ("1", "null"):
        trainer.train(*FLAGS, "--validate.every", every, "--name", f"every-{every}")
        saved[every] = dict(read_full(open_checkpoint(trainer.out / f"every-{every}")))
    assert len([line for line in trainer.metrics("every-1") if "val_loss/held" in line]) == 6
    often, never = saved.values()
    assert [name for name, tensor in often.items() if not torch.equal(tensor, never[name])] == []
    biases = [tensor for name, tensor in often.items() if name.endswith("router.bias")]
    assert len(biases) == 2
    assert all(bias.abs().max() > 0 for bias in biases)
