"""Exchange with Megatron-LM's own reader and writer (megatron-core, installed without dependencies by scripts/test)."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fivefold.data.tokens import TokenSet
from tests.data.corpora import write_set

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of the GPU libraries that it does not find
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

DOCUMENTS = [[[5, 6, 7]], [[1], [2, 3, 4], [9]], [[65_000 % 60_000] * 40]]
"""Three documents, the second of three sequences."""


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_megatron_writes_is_read_token_for_token(tmp_path: Path, dtype: type) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    tokens = TokenSet.open(tmp_path / "theirs")
    flat = [token for document in DOCUMENTS for sequence in document for token in sequence]
    assert tokens.read(0, tokens.tokens).tolist() == flat
    assert tokens.documents_in(0, tokens.tokens).tolist() == [0, 3, 8]


@pytest.mark.parametrize("vocab", [1003, 70_000])
def test_what_we_write_is_read_by_megatron_token_for_token(tmp_path: Path, vocab: int) -> None:
    ours = write_set(tmp_path / "ours", [3, 1, 500, 2], vocab)
    theirs = IndexedDataset(str(tmp_path / "ours/tokens"))
    assert theirs.sequence_lengths.tolist() == [3, 1, 500, 2]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert np.concatenate([theirs[i] for i in range(4)]).tolist() == ours.read(0, ours.tokens).tolist()
