"""What can be said about a run before it runs. Arithmetic only: imports no torch."""
