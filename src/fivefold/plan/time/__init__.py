"""How long a step takes, from operations to the whole of it. Begin with `step.py`. Imports no torch."""
