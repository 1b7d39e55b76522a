"""Eleven components of a ViT block, each fine-tuned alone: transfer and forgetting."""
