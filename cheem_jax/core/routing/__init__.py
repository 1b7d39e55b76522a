"""External memory: what tasks store of the frozen features, and how it infers the task ID of a test image."""
