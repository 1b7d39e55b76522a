"""CHEEM, the method of the paper: one module per section."""
