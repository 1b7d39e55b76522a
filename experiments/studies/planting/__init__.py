"""A stream with a known structure, and whether CHEEM recovers it."""
