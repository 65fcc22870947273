"""What all tests share: one thread a process, for the models are tiny and the worker processes many."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the workers that tests start
