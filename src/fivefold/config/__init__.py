"""The run file: its classes, the rules a run must obey, presets, and reading with overrides. Imports no torch."""
