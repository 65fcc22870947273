"""Only experts of the chosen groups are used, also with negative biased scores, and gates are unbiased."""

import torch

from fivefold.config.run import Experts
from fivefold.kernels.routing import choose
from tests.model.hf_models import biased, deepseek

MOE = Experts(
    experts=12, top_k=3, ffn=8, scores="sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, bias=True
)


def test_with_biases_of_minus_5_each_token_stays_in_its_two_groups_and_has_transformers_gates():
    """The fault seen elsewhere: groups that are not chosen were masked with 0, which beats every score - 5."""
    gate = biased(deepseek(), -5.0).model.layers[1].mlp.gate
    x_td = torch.randn(500, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits_te, their_gates, their_experts = gate(x_td)
    choice = choose(logits_te, gate.e_score_correction_bias, MOE)
    biased_scores = (logits_te.sigmoid() + gate.e_score_correction_bias).view(500, 4, 3)
    assert (biased_scores < 0).all()
    chosen_groups = biased_scores.sort(dim=-1).values[..., 1:].sum(dim=-1).argsort(dim=-1, descending=True)[:, :2]
    groups_tk = choice.experts_tk // 3
    assert (groups_tk[:, :, None] == chosen_groups[:, None, :]).any(dim=-1).all()
    ours, theirs = torch.zeros(500, 12), torch.zeros(500, 12)
    ours.scatter_(1, choice.experts_tk, choice.gates_tk)
    theirs.scatter_(1, their_experts, their_gates)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    scores = logits_te.sigmoid().gather(1, choice.experts_tk)
    torch.testing.assert_close(choice.gates_tk, 2.5 * scores / scores.sum(dim=1, keepdim=True), rtol=1e-6, atol=1e-7)
