"""Export of a memory or of one task's network to a file that runs without this library."""

from cheem_jax.export.exporting import Exported, Format, export, kind_of
from cheem_jax.export.programs import Subject

__all__ = ["Exported", "Format", "Subject", "export", "kind_of"]
