"""What is trained: the model's arithmetic (`spec.py`, pure), its modules, initial weights, Hugging Face in and out."""
