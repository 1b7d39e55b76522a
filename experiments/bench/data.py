"""Images on their way from files to training steps: waiting for input, and memory.

    python -m experiments.bench.data

Images are generated, and files are in the system's page cache, so nothing waits for a disk. The
memory of a task with many images is measured in separate processes.
"""

import contextlib
import io
import statistics
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from PIL import Image

from cheem_jax.cheem.hee import uniform_table
from cheem_jax.cheem.training import prepare, steps_of, supernet_draws
from cheem_jax.cli.arguments import parse
from cheem_jax.core.architecture import decode
from cheem_jax.core.images import in_turn
from cheem_jax.core.keys import order_at
from cheem_jax.data.folder import plan_task
from cheem_jax.data.load import ImagesConfig, Keep, load_tasks
from cheem_jax.data.task import Plan, Split
from cheem_jax.data.verify import verify
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages, prefetch
from experiments.bench import measure
from experiments.bench.measure import Bench, Row, medians, say

WIDTH = 500
HEIGHT = 375
QUALITY = 90
FINE = 0.3
"""Exponent of the cell size in the amplitude of a field; with 0.3 a JPEG file has about 60 kB."""
SMALL = 64
TINY = 32
"""Sizes in pixels of images in the cache of many images, and of the files of these images."""
NUM_CLASSES = 20
RANK = 16
BATCH = 32
GATHERED = 64
STREAMED = 100
"""Number of batches per split that are streamed from many images; memory is constant after them."""
GOAL_WAITING = 0.03
GOAL_GIGABYTES = 1.5
"""Maximum share of an epoch that is spent waiting, and maximum memory of a process in GB."""
Child = Literal["prepare", "verify", "read", "stream"]
CHILDREN: dict[Child, str] = {
    "prepare": "decoding {num:,} tiny images into a cache of {size} pixels",
    "verify": "verifying {num:,} tiny images",
    "read": "reading {num:,} images from the cache in random order",
    "stream": "streaming from {num:,} tiny images in random order",
}
"""Names and titles of the passes over many images, each in a separate process."""


def main(settings: Bench) -> None:
    """Measure every part and write `data.json`."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for part in (epochs, memory):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
            part_rows, details[part.__name__] = part(Path(folder), settings.quick)
        rows += part_rows
        say(f"data: {part.__name__} took {time.perf_counter() - start:.0f} s")
    measure.save(settings.out, "data", rows, quick=settings.quick, details=details)


# ---- images


def photographs(num: int, seed: int = 0) -> Iterator[bytes]:
    """Generate different JPEG files: windows of a random field that has structure at all scales,
    like photographs."""
    rng = np.random.default_rng(seed)
    size = (3 * WIDTH, 3 * HEIGHT)
    field = np.zeros((size[1], size[0], 3), np.float32)
    for cell in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        coarse = rng.normal(size=(3, size[1] // cell + 2, size[0] // cell + 2)).astype(np.float32)
        for channel, values in enumerate(coarse):
            smooth = Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)
            field[..., channel] += cell**FINE * np.asarray(smooth)
    pixels = np.clip(128 + 55 * field / field.std(), 0, 255).astype(np.uint8)
    for _ in range(num):
        x, y = rng.integers(0, 2 * WIDTH), rng.integers(0, 2 * HEIGHT)
        buffer = io.BytesIO()
        Image.fromarray(pixels[y : y + HEIGHT, x : x + WIDTH]).save(buffer, "JPEG", quality=QUALITY)
        yield buffer.getvalue()


def write_task(folder: Path, num_train: int) -> Plan:
    """Write a task as a folder of photographs, with a few unused images for validation and test."""
    places = [("train", row) for row in range(num_train)]
    places += [(split, row) for split in ("val", "test") for row in range(NUM_CLASSES)]
    for (split, row), data in zip(places, photographs(len(places), 1), strict=True):
        file = folder / split / f"class {row % NUM_CLASSES:02d}" / f"{row:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return plan_task(folder)


def write_many(file: Path, num: int) -> None:
    """Write a zip file with `num` tiny images: 50 different images under many names, made distinct
    by bytes after the JPEG data."""
    tiny = []
    for data in photographs(50):
        buffer = io.BytesIO()
        with Image.open(io.BytesIO(data)) as image:
            image.resize((TINY, TINY), Image.Resampling.BOX).save(buffer, "JPEG", quality=QUALITY)
        tiny.append(buffer.getvalue())
    splits = ["train"] * 8 + ["val", "test"]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for row in range(num):
            split = splits[row % 10]
            label = row // 10 % NUM_CLASSES
            archive.writestr(
                f"{split}/class {label:02d}/{row:06d}.jpg", tiny[row % len(tiny)] + row.to_bytes(4)
            )


# ---- waiting


class Epoch(NamedTuple):
    """The measurements of each step of an epoch: seconds with the wait for input, seconds of the
    wait, and loss."""

    steps: list[float]
    waits: list[float]
    losses: list[float]

    @property
    def share(self) -> float:
        """Share of the epoch that is spent waiting."""
        return sum(self.waits) / sum(self.steps)


def epochs(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Train the supernet for an epoch without cached tokens, with images in memory, from the cache
    and from the stream."""
    vit = measure.backbone("vit_nano" if quick else "deit_tiny")
    size = vit.config.image_size
    num_steps = 3 if quick else 7
    num_rounds = 1 if quick else 3
    executor = measure.stages(vit)
    plan = write_task(folder / "task", num_steps * BATCH)
    ways: tuple[Keep, ...] = ("memory", "cache", "stream")
    splits = {}
    for keep in ways:
        (task,) = load_tasks([plan], size, ImagesConfig(keep, folder / "cache"))
        splits[keep] = task.train
    prepare(executor, measure.new_task(executor, NUM_CLASSES, RANK).supernet, BATCH)
    # the first steps of a process compile functions
    epoch(
        executor, Split(splits["memory"].images[: 2 * BATCH], splits["memory"].labels[: 2 * BATCH])
    )
    rounds: dict[str, list[Epoch]] = {keep: [] for keep in ways}
    for _ in range(num_rounds):  # in turns, so that other load on the machine affects all of them
        for keep, split in splits.items():
            one = epoch(executor, split)
            if one.losses != (first := rounds["memory"] or [one])[0].losses:
                raise ValueError(
                    f"losses from {keep} {one.losses} are not those from memory {first[0].losses}"
                )
            rounds[keep].append(one)
    by_source = {
        keep: Epoch(*(sum(lists, []) for lists in zip(*epochs, strict=True)))
        for keep, epochs in rounds.items()
    }
    what = f"waiting for images, {num_rounds} epochs of {num_steps} steps of {BATCH} images"
    rows = []
    steps = medians({keep: one.steps for keep, one in by_source.items()})
    for keep, one in by_source.items():
        begin = statistics.median(epoch.waits[0] for epoch in rounds[keep])
        note = (
            f"{1e3 * begin:.0f} ms before the first step of an epoch, {1e3 * sum(one.waits):.0f} ms"
            " in all"
        )
        rows.append(
            Row(
                f"{what}, {keep}",
                {"step": steps[keep]},
                one.share,
                GOAL_WAITING,
                "at most",
                "of the time",
                note=note,
            )
        )
    return rows, {
        "epochs": {keep: one._asdict() for keep, one in by_source.items()},
        "weights": vit.source,
    }


def epoch(executor: Executor, split: Split) -> Epoch:
    """Run the training loop for one epoch with timed waits for input; each step ends before the
    next step starts."""
    order_key, mode_key, draw_key = jax.random.split(jax.random.key(3), 3)
    training = measure.new_task(executor, NUM_CLASSES, RANK)
    num = len(split.labels)
    sizes = training.supernet.sizes
    uniform = uniform_table(sizes)
    order = list(batches(order_at(order_key, num), BATCH))
    codes = supernet_draws(mode_key, draw_key, exploit=uniform, uniform=uniform, epsilon=0.3)(
        0, len(order)
    )
    data = steps_of(executor, HostImages(executor, split.images), split.labels, order, BATCH)
    steps, waits, losses = [], [], []
    start = time.perf_counter()
    following = prefetch(executor.layout, data)
    for row in codes:
        step = next(following)
        waits.append(time.perf_counter() - start)
        losses.append(training.step(decode(row, sizes), step))
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
    return Epoch(steps, waits, losses)


# ---- memory


def memory(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Measure the memory that many images need, in separate processes."""
    num = 1_000 if quick else 100_000
    write_many(folder / "many.zip", num)
    rows = []
    numbers: dict[str, Any] = {"zip_bytes": (folder / "many.zip").stat().st_size}
    for child, words in CHILDREN.items():
        what = f"memory of {words.format(num=num, size=SMALL)}"
        if quick and child in ("verify", "stream"):
            continue
        numbers[child] = result = measure.in_child(with_many, child, str(folder))
        say(f"data: {child}: {result['seconds']:.0f} s")
        note = (
            f"{result['num'] / result['seconds']:,.0f} images/s; {result['before'] / 1e9:.2f} GB"
            f" before; with mapped files {result['resident'] / 1e9:.2f} GB were resident at most"
        )
        seconds = {"pass": result["seconds"]}
        peak = result["peak"] / 1e9
        rows.append(Row(what, seconds, peak, GOAL_GIGABYTES, "at most", "GB", note=note))
    return rows, numbers


def with_many(child: Child, place: str) -> dict[str, float]:
    """Run one pass over many images; return its seconds and this process's memory in bytes."""
    folder = Path(place)
    before = measure.process_memory("RssAnon")
    num = 0
    with watching() as peak:
        plan = plan_task(folder / "many.zip")
        start = time.perf_counter()
        if child == "verify":
            if not (findings := verify(plan)).sound:
                raise ValueError(f"the generated images are broken: {findings.broken[:3]}")
            splits = []
        else:
            config = ImagesConfig("stream" if child == "stream" else "cache", folder / "cache")
            (task,) = load_tasks([plan], SMALL, config)
            splits = list(task.splits.values())
        if child in ("read", "stream"):
            start = time.perf_counter()  # without opening the task
            for split in splits:
                rng = np.random.default_rng(0)
                order = [
                    batch.rows for batch in batches(rng.permutation(len(split.labels)), GATHERED)
                ]
                for images in in_turn(
                    split.images, order[:STREAMED] if child == "stream" else order
                ):
                    if images.shape != (GATHERED, SMALL, SMALL, 3):
                        raise ValueError(f"a batch has the shape {images.shape}")
                    num += len(images)
        seconds = time.perf_counter() - start
    return {
        "num": num or plan.num_images,
        "seconds": seconds,
        "before": before,
        "peak": max(peak),
        "resident": measure.process_memory("VmHWM"),
    }


@contextlib.contextmanager
def watching() -> Iterator[list[int]]:
    """Record this process's memory without mapped files every few milliseconds.

    Pages of mapped files are resident, too, but the system can reclaim them.
    """
    sizes = [measure.process_memory("RssAnon")]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            sizes.append(measure.process_memory("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()
        sizes.append(measure.process_memory("RssAnon"))


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
