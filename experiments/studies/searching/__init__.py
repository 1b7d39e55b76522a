"""What the supernet of a finished run ranks, and what its searches find, unit by unit."""
