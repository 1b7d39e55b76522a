"""Designs of the head: margins of the logits, measured and predicted."""
