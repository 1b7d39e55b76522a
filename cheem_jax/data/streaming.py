"""Pictures decoded when they are asked for, ahead of their use: nothing of the data set is held or stored.

Reading ahead with threads or processes is Grain's. Which pictures a step sees is decided by the caller, so a stream
gives what the same pictures in memory would give, and whoever asks from a later step on gets what would have come then.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from cheem_jax.data.decode import decode_image, decode_in_order
from cheem_jax.data.files import Encoded


class StreamedImages:
    """Files that behave like uint8 images `[N, S, S, 3]`.

    `workers` processes decode ahead; with 0 it is threads of this process, which is faster up to a handful of cores.
    Processes take seconds to start, and start anew for every pass over the files.
    """

    def __init__(self, files: Encoded, image_size: int, *, workers: int = 0):
        _grain()  # missing, it is missed now and not in the middle of a run
        self.files, self.image_size, self.workers = files, image_size, workers
        self.shape = (len(files), image_size, image_size, 3)
        self.dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: np.ndarray | slice, /) -> np.ndarray:
        none = np.empty((0, *self.shape[1:]), np.uint8)
        wanted = np.arange(len(self.files))[rows]
        return np.concatenate([none, *decode_in_order(self.files, self.image_size, wanted)])

    def follow(self, order: Sequence[np.ndarray]) -> Any:
        """The pictures of each of these rows in turn, all of one length, as Grain's iterator.

        Its `get_state()` tells how far it has come; `set_state` of an equal one goes on from there.
        """
        grain = _grain()
        batch_size, num_threads = len(order[0]), max(2, min(16, os.cpu_count() or 1))
        pictures = grain.MapDataset.source(_Pictures(self.files, self.image_size, np.concatenate(order)))
        if self.workers:  # whole batches, since each process takes every so many-th element
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
            options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
            return iter(pictures.batch(batch_size).to_iter_dataset(reading).mp_prefetch(options))
        # single pictures, put together afterwards, so that the threads share the work on the first batch too
        reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=3 * batch_size)
        return iter(pictures.to_iter_dataset(reading).batch(batch_size))


class _Pictures:
    """A data source of Grain's: decoded pictures in the order in which they are wanted."""

    def __init__(self, files: Encoded, image_size: int, rows: np.ndarray):
        self.files, self.image_size, self.rows = files, image_size, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        row = int(self.rows[index])
        return decode_image(self.files.read(row), self.image_size, name=self.files.where(row))


def _grain() -> Any:
    try:
        import grain
        from absl import flags
    except ImportError as error:
        raise ValueError(
            "streaming pictures needs Grain: `pip install 'cheem_jax[datasets]'`, or --images.keep cache"
        ) from error
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # starting workers, Grain asks for absl's flags, which nobody parses here
    return grain
