"""Writes a token set of random tokens, for measuring speed: `python benchmarks/random_tokens.py data/random`.

Uniform over the vocabulary, in documents of `--document` tokens; a document longer than a sequence is never cut by the
document mask, so the default measures plain causal attention.
"""

import argparse
from pathlib import Path

import numpy as np

from fivefold.data.writer import TokenWriter

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=Path)
parser.add_argument("--vocab", type=int, default=128_256)
parser.add_argument("--tokens", type=int, default=4_194_304)
parser.add_argument("--document", type=int, default=4_194_304)
arguments = parser.parse_args()

writer = TokenWriter(arguments.out, arguments.vocab, eod=0)
generator = np.random.default_rng(0)
for _ in range(arguments.tokens // arguments.document):
    writer.write(generator.integers(1, arguments.vocab, arguments.document), np.array([arguments.document]))
writer.close()
