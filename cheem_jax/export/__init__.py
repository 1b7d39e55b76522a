"""A learned memory, or one task's network, as a file that runs without this library."""

from cheem_jax.export.exporting import Exported, Format, export, kind_of
from cheem_jax.export.programs import Subject

__all__ = ["Exported", "Format", "Subject", "export", "kind_of"]
