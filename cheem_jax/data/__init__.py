"""What goes in: tasks and streams of labelled images, from folders, zips or the bundled demo."""

from cheem_jax.data.decode import decode_image, decode_many
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.folder import load_stream, load_task
from cheem_jax.data.task import Split, Stream, Task, fingerprint, select

__all__ = [
    "Split",
    "Stream",
    "Task",
    "decode_image",
    "decode_many",
    "demo_stream",
    "fingerprint",
    "load_stream",
    "load_task",
    "select",
]
