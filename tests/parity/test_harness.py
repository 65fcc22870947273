"""The harness notices a fault, and names what it touched: a harness that cannot fail proves nothing."""

import numpy as np
import pytest
import torch

from tests.parity.cases import Case
from tests.parity.pieces import Piece, differing_copies, faults

CAUGHT = [
    (Case("llama", dp=2, fault="gradients-not-reduced"), "gradient of embedding.weight"),
    (Case("llama", tp=2, fault="partial-gradients-not-summed"), "gradient of layers.0.attention_norm.weight"),
    (Case("bloom", tp=2, fault="partial-gradients-not-summed"), "gradient of embedding_norm.weight"),
    (Case("llama", dp=2, fault="loss-times-dp"), "gradient of embedding.weight: relative error 1.0e+00"),
    (Case("llama", cp=2, fault="gradient-of-travelling-keys-lost"), "gradient of embedding.weight"),
    (Case("bloom", cp=4, fault="gradient-of-travelling-keys-lost"), "gradient of embedding.weight"),
    (
        Case("llama", pp=2, schedule="zb-h1", micro=2, fault="one-weight-gradient-dropped"),
        "gradient of layers.3.ffn.down",
    ),
    (Case("llama-tied", pp=2, micro=2, fault="copy-of-the-embedding-not-added"), "gradient of embedding.weight"),
    (Case("llama-tied", pp=2, micro=2, fault="copy-of-the-embedding-never-renewed"), "losses on rank 0"),
    (Case("llama", tp=2, fault="norm-not-summed-over-tp"), "norms on rank 0"),
    (Case("moe-bias", ep=2, dp=4, fault="expert-gradients-doubled"), "gradient of layers.1.ffn.experts.gate_up"),
    (Case("moe-bias", ep=2, dp=2, fault="counts-not-summed"), "losses on rank 0"),
    (Case("moe-sigmoid", ep=2, dp=2, fault="gates-lose-their-gradient"), "gradient of embedding.weight"),
    (Case("moe-bias", tp=2, fault="partial-gradients-not-summed"), "gradient of layers.0.attention_norm.weight"),
]


@pytest.mark.parametrize(("case", "says"), CAUGHT, ids=str)
def test_a_fault_made_on_purpose_is_noticed_and_named(harness, case, says):
    difference = harness.difference(case)
    assert difference is not None
    assert difference.startswith(says)


WHOLE = {"a": torch.arange(6.0).view(3, 2), "b": torch.ones(2)}


def pieces(**changed):
    """One of two ranks that cut `a` by rows and have a copy of `b` each."""
    right = {"a": Piece((3, 2), (0, 0), np.array([[0.0, 1], [2, 3]])), "b": Piece((2,), (0,), np.ones(2))}
    return right | changed


OTHER = pieces(a=Piece((3, 2), (2, 0), np.array([[4.0, 5]])))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (pieces(), []),
        (pieces(a=Piece((3, 2), (1, 0), np.array([[2.0, 3], [4, 5]]))), ["weight of a is not held once: its elements"]),
        (pieces(a=Piece((2, 2), (0, 0), np.array([[0.0, 1], [2, 3]]))), ["weight of a has the shape (2, 2)"]),
        (pieces(a=Piece((3, 2), (0, 0), np.array([[0.0, 1], [2, 4]]))), ["weight of a: relative error 1.3e-01"]),
        (pieces(b=Piece((2,), (0,), np.array([1.0, np.nan]))), ["weight of b: relative error inf"]),
    ],
    ids=["right", "overlap", "shape", "value", "undefined"],
)
def test_pieces_must_make_up_the_whole(first, says):
    found = list(faults("weight", WHOLE, [first, OTHER], 1e-10))
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True))


def test_copies_must_be_the_same_bytes():
    assert list(differing_copies([pieces(), OTHER])) == []
    close = pieces(b=Piece((2,), (0,), np.array([1.0, 1.0 + 2e-16])))
    assert list(differing_copies([close, OTHER])) == ["copies of b differ on ranks 0 and 1"]
