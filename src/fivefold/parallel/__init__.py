"""How a model is spread over ranks, one dimension a file: what it splits, which collective, where."""
