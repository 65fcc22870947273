"""What failures and saving leave of the time. Begin with `formulas.py`. Imports no torch."""
