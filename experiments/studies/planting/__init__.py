"""A stream whose right structure is known, and whether CHEEM finds it."""
