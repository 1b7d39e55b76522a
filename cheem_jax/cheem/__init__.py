"""The paper: one module per section."""
