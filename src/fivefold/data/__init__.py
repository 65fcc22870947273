"""From documents to batches: building token files, reading them, the sample order, and delivery to ranks."""
