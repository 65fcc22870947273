"""Published runs, and how far off the planner is on them. Begin with `validate.py`. Imports no torch."""
