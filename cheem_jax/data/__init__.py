"""Load tasks and streams of labelled images from folders, zips, manifests, TFDS, the Hugging Face
hub or the bundled demo."""

from cheem_jax.data.decode import decode_image, decode_many
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.folder import plan_stream, plan_task
from cheem_jax.data.load import ImagesConfig, load_stream, load_task, load_tasks
from cheem_jax.data.task import EncodedSplit, Plan, Split, Stream, Task, fingerprint, select

__all__ = [
    "ImagesConfig",
    "EncodedSplit",
    "Plan",
    "Split",
    "Stream",
    "Task",
    "decode_image",
    "decode_many",
    "demo_stream",
    "fingerprint",
    "load_stream",
    "load_task",
    "load_tasks",
    "plan_stream",
    "plan_task",
    "select",
]
