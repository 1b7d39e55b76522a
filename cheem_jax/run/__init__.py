"""A run: its session, checkpoints, record, results and training loop."""
