"""The forward of a model alone. Begin with `forecast.py`. Imports no torch."""
