"""What each rank holds at its fullest moment, in bytes. Begin with `peak.py`. Imports no torch."""
