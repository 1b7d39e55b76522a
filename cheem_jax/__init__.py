"""Continual learning with Vision Transformers that never forget and store no old images."""

__version__ = "0.1.0"
