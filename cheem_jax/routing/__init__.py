"""External memory: what tasks keep of the frozen backbone's features, and how that names the task of a test image."""
