"""What a person sees of a run: console, metrics and event files, TensorBoard, Weights & Biases."""
