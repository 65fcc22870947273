"""The best layout for a run, found by memory and time. Begin with `best.py`. Imports no torch."""
