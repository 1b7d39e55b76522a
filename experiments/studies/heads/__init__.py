"""Designs of the head: margins of the logits beside what theory says of them."""
