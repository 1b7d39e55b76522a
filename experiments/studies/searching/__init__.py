"""Scores and searches for target networks, unit by unit."""
