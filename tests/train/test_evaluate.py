"""The validation loss against its definition: each document alone, token by token, over the number of its targets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fivefold.config.run import Data, Model, Parallel, Precision, Run, Source
from fivefold.data.loader import validation_batches
from fivefold.data.tokens import TokenSet
from fivefold.data.writer import TokenWriter
from fivefold.parallel.mesh import connect
from fivefold.parallel.state import sharded_parameters
from fivefold.train.build import build_pipeline, load_initial_weights
from fivefold.train.evaluate import validation_loss

LENGTHS = (5, 1, 8, 11)  # together one row of 24 targets and the token before them
MODEL = Model(layers=2, hidden=16, heads=2, ffn=24, vocab=97, init_std=0.5)


def test_it_is_the_mean_over_documents_that_do_not_see_each_other(tmp_path):
    """A validation that forgets the documents of packed rows gives plausible values, a little too low or too high."""
    tokens = np.random.default_rng(0).integers(1, 97, sum(LENGTHS))
    writer = TokenWriter(tmp_path / "held", 97, eod=0)
    writer.write(tokens, np.array(LENGTHS))
    writer.close()
    run = Run(
        name="validated",
        steps=1,
        model=MODEL,
        data=Data(train=[Source(path=Path("none"))]),
        parallel=Parallel(dp=1),
        precision=Precision(compute="fp64"),
    )
    with connect(Parallel()) as mesh:
        pipeline = build_pipeline(run, mesh)
        load_initial_weights(sharded_parameters(pipeline.stages, mesh), {}, run, lambda *_: None)
        batches = validation_batches(TokenSet.open(tmp_path / "held"), 24, 1000, 2, 0, 1, document_mask=True)
        found = validation_loss(pipeline, batches, mesh)
        model = pipeline.stages[0]
        with torch.no_grad():
            documents = [torch.from_numpy(part)[None] for part in np.split(tokens, np.cumsum(LENGTHS)[:-1])]
            losses = [model(each[:, :-1], each[:, 1:]).item() for each in documents if each.numel() > 1]
    assert found == pytest.approx(sum(losses) / (sum(LENGTHS) - len(LENGTHS)), rel=1e-12)
