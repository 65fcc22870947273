"""Fivefold: pretraining of large language models, from a laptop CPU to tens of thousands of GPUs.

`from fivefold import Run, train` is the Python entry: `Run.load("run.yaml")` reads a run file, `train(run)` runs it.
Importing this package loads no torch.
"""

from fivefold.config.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "__version__"]
