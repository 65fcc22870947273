"""Fast operations, one file each: a small pure function with a plain PyTorch reference beside it."""
