"""What a finished run corrects of a plan. Begin with `calibrate.py`. Imports no torch."""
