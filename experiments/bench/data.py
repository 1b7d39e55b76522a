"""Images from files to training steps: decoding, waiting for input, memory, and prepared data sets.

    python -m experiments.bench.data

Images are generated, and files are in the system's page cache, so nothing waits for a disk. The
memory of a task with many images is measured in separate processes. Needs the extra `datasets`.
"""

import contextlib
import io
import statistics
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
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
from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.files import FolderFiles
from cheem_jax.data.folder import plan_task
from cheem_jax.data.load import ImagesConfig, Keep, StreamedImages, load_tasks
from cheem_jax.data.records import all_pictures
from cheem_jax.data.task import Plan, Split
from cheem_jax.data.verify import verify
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages, ahead
from experiments.bench import measure
from experiments.bench.measure import Bench, Row, alternate, compare, medians, say

WIDTH = 500
HEIGHT = 375
QUALITY = 90
FINE = 0.3
"""Exponent of the amplitude of a field in its cell size: at 0.3 a JPEG file has about 60 kB."""
IMAGE_SIZE = 224
SMALL = 64
TINY = 32
"""Pixels of training images, of the cache of many images, and of their files."""
NUM_CLASSES = 20
RANK = 16
BATCH = 32
GATHERED = 64
STREAMED = 100
"""Batches per split that are streamed from many images; memory is constant by then."""
GOAL_DECODE = 1.5
GOAL_WAITING = 0.03
GOAL_GIGABYTES = 1.5
"""Required speed relative to one thread; maximum share of waiting in an epoch; maximum memory of a
process."""
THREADS, PILLOW = "threads", "Pillow in one thread"
Child = Literal["prepare", "verify", "read", "stream"]
CHILDREN: dict[Child, str] = {
    "prepare": "decoding {num:,} tiny images into a cache of {size} pixels",
    "verify": "verifying {num:,} tiny images",
    "read": "reading {num:,} images from the cache in random order",
    "stream": "streaming from {num:,} tiny images in random order",
}
"""Work on many images, each in a separate process."""


def main(settings: Bench) -> None:
    """Measure every part and write `data.json`."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for part in (decoding, epochs, memory, prepared):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
            found, details[part.__name__] = part(Path(folder), settings.quick)
        rows += found
        say(f"data: {part.__name__} took {time.perf_counter() - start:.0f} s")
    measure.save(settings.out, "data", rows, quick=settings.quick, details=details)


# ---- images


def photographs(num: int, seed: int = 0) -> Iterator[bytes]:
    """Different JPEG files: windows of a random field with structure at all scales, like
    photographs."""
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
        left, top = rng.integers(0, 2 * WIDTH), rng.integers(0, 2 * HEIGHT)
        buffer = io.BytesIO()
        Image.fromarray(pixels[top : top + HEIGHT, left : left + WIDTH]).save(
            buffer, "JPEG", quality=QUALITY
        )
        yield buffer.getvalue()


def write_task(folder: Path, num_train: int) -> Plan:
    """A folder of photographs as a task, with a few unused images for validation and test."""
    places = [("train", row) for row in range(num_train)]
    places += [(split, row) for split in ("val", "test") for row in range(NUM_CLASSES)]
    for (split, row), data in zip(places, photographs(len(places), 1), strict=True):
        file = folder / split / f"class {row % NUM_CLASSES:02d}" / f"{row:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return plan_task(folder)


def write_many(file: Path, num: int) -> None:
    """Write a zip of tiny images: 50 different ones under many names, distinct by bytes after the
    JPEG."""
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


# ---- decoding


def decoding(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Decode files to the size of training, by the library and by a plain loop."""
    names, num_bytes = [], []
    for row, data in enumerate(photographs(16 if quick else 400)):
        names.append(f"{row:05d}.jpg")
        num_bytes.append((folder / names[-1]).write_bytes(data))
    files = FolderFiles(folder, names)
    found: dict[str, np.ndarray] = {}

    def library() -> None:
        found[THREADS] = np.concatenate(list(decode_in_order(files, IMAGE_SIZE, range(len(names)))))

    def loop() -> None:
        found[PILLOW] = np.stack([pillow(folder / name) for name in names])

    times = alternate({THREADS: library, PILLOW: loop}, 1 if quick else 5)
    if not np.array_equal(found[THREADS], found[PILLOW]):
        raise ValueError("the library's pixels are not Pillow's")
    seconds = medians(times)
    what = f"{len(names)} files to {IMAGE_SIZE} pixels, against {PILLOW}"
    note = (
        f"{len(names) / seconds[THREADS]:,.0f} and {len(names) / seconds[PILLOW]:,.0f} images/s;"
        " equal pixels"
    )
    row = compare(what, times, PILLOW, THREADS, GOAL_DECODE, note=note)
    return [row], {"samples": times, "mean_file_bytes": float(np.mean(num_bytes))}


def pillow(file: Path) -> np.ndarray:
    """Read one image by Pillow."""
    with Image.open(file) as image:
        return np.asarray(
            image.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        )


# ---- waiting


class Epoch(NamedTuple):
    """Seconds of each step with its wait, seconds of the wait, and losses."""

    steps: list[float]
    waits: list[float]
    losses: list[float]

    @property
    def share(self) -> float:
        """Share of the epoch spent waiting."""
        return sum(self.waits) / sum(self.steps)


def epochs(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Train the supernet for an epoch from images in memory, from the cache and from the stream,
    without cached tokens."""
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
    prepare(executor, measure.new_task(executor.base_pool, NUM_CLASSES, RANK).supernet, BATCH)
    # the first steps of a process compile
    epoch(
        executor, Split(splits["memory"].images[: 2 * BATCH], splits["memory"].labels[: 2 * BATCH])
    )
    rounds: dict[str, list[Epoch]] = {keep: [] for keep in ways}
    for _ in range(num_rounds):  # in turns, so that other load affects all of them
        for keep, split in splits.items():
            one = epoch(executor, split)
            if one.losses != (first := rounds["memory"] or [one])[0].losses:
                raise ValueError(
                    f"losses from {keep} {one.losses} are not those from memory {first[0].losses}"
                )
            rounds[keep].append(one)
    found = {
        keep: Epoch(*(sum(lists, []) for lists in zip(*epochs, strict=True)))
        for keep, epochs in rounds.items()
    }
    what = f"waiting for images, {num_rounds} epochs of {num_steps} steps of {BATCH} images"
    rows = []
    steps = medians({keep: one.steps for keep, one in found.items()})
    for keep, one in found.items():
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
    for keep in ways[1:]:
        times = {name: [sum(one.steps) for one in rounds[name]] for name in ("memory", keep)}
        note = (
            "the same losses; decoding takes its share of the cores"
            if keep == "stream"
            else "the same losses"
        )
        what = f"the whole epoch, {keep} over memory"
        rows.append(compare(what, times, keep, "memory", note=note))
    row, samples = gathering(splits["cache"], splits["memory"], 5 if quick else 50)
    return [*rows, row], {
        "epochs": {keep: one._asdict() for keep, one in found.items()},
        "gathering": samples,
        "weights": vit.source,
    }


def epoch(executor: Executor, split: Split) -> Epoch:
    """The training loop with timed waits for input; each step runs to its end before the next."""
    order_key, mode_key, draw_key = jax.random.split(jax.random.key(3), 3)
    fitting = measure.new_task(executor.base_pool, NUM_CLASSES, RANK)
    num = len(split.labels)
    sizes = fitting.supernet.sizes
    uniform = uniform_table(sizes)
    order = list(batches(order_at(order_key, num), BATCH))
    codes = supernet_draws(mode_key, draw_key, exploit=uniform, uniform=uniform, epsilon=0.3)(
        0, len(order)
    )
    data = steps_of(executor, HostImages(executor, split.images), split.labels, order, BATCH)
    steps, waits, losses = [], [], []
    start = time.perf_counter()
    following = ahead(executor.layout, data)
    for row in codes:
        step = next(following)
        waits.append(time.perf_counter() - start)
        losses.append(measure.step(executor, fitting, decode(row, sizes), step))
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
    return Epoch(steps, waits, losses)


def gathering(cache: Split, kept: Split, repeats: int) -> tuple[Row, dict[str, list[float]]]:
    """Time batches of random rows from a mapped file and from memory."""
    rng = np.random.default_rng(0)
    num = len(cache.labels)
    sides: dict[str, Callable[[], object]] = {
        name: lambda split=split: np.asarray(split.images[rng.integers(0, num, GATHERED)])
        for name, split in (("cache", cache), ("memory", kept))
    }
    times = alternate(sides, repeats)
    what = f"{GATHERED} images in random order, cache over memory"
    note = (
        f"{GATHERED / statistics.median(times['cache']):,.0f} images/s from the mapped file, warm"
    )
    return compare(what, times, "cache", "memory", note=note), times


# ---- memory


def memory(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Memory of many images, in separate processes."""
    num = 1_000 if quick else 100_000
    write_many(folder / "many.zip", num)
    rows = []
    found: dict[str, Any] = {"zip_bytes": (folder / "many.zip").stat().st_size}
    for child, words in CHILDREN.items():
        what = f"memory of {words.format(num=num, size=SMALL)}"
        if quick and child in ("verify", "stream"):
            continue
        found[child] = result = measure.in_child(with_many, child, str(folder))
        say(f"data: {child}: {result['seconds']:.0f} s")
        note = (
            f"{result['num'] / result['seconds']:,.0f} images/s; {result['before'] / 1e9:.2f} GB"
            f" before; with mapped files {result['resident'] / 1e9:.2f} GB were resident at most"
        )
        seconds = {"pass": result["seconds"]}
        peak = result["peak"] / 1e9
        rows.append(Row(what, seconds, peak, GOAL_GIGABYTES, "at most", "GB", note=note))
    return rows, found


def with_many(child: Child, place: str) -> dict[str, float]:
    """One pass over many images, with this process's peak memory."""
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
            start = time.perf_counter()  # without opening
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


# ---- prepared data sets


def prepared(folder: Path, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Images per second from a data set prepared by TFDS: by Grain's threads and processes, and
    without Grain."""
    num = 2 * GATHERED if quick else 32 * GATHERED
    ways = {"Grain, threads": 0, **({} if quick else {"Grain, 2 processes": 2})}
    what = f"{num} records to {IMAGE_SIZE} pixels in random order"
    start = time.perf_counter()
    write_records(folder, num)
    preparing = time.perf_counter() - start
    files = all_pictures("photographs", "train", folder)
    order = np.split(np.random.default_rng(0).permutation(num), num // GATHERED)
    (wanted,) = decode_in_order(files, IMAGE_SIZE, order[0])

    def follow(name: str) -> None:
        following = in_turn(StreamedImages(files, IMAGE_SIZE, workers=ways[name]), order)
        if (
            not np.array_equal(next(following), wanted)
            or sum(map(len, following)) != num - GATHERED
        ):
            raise ValueError(f"{name} gives other images")

    sides: dict[str, Callable[[], object]] = {
        THREADS: lambda: sum(map(len, decode_in_order(files, IMAGE_SIZE, np.concatenate(order)))),
        **{name: lambda name=name: follow(name) for name in ways},
    }
    times = alternate(sides, 1 if quick else 2)
    rows = []
    for name, seconds in medians(times).items():
        note = (
            "the workers start in every epoch"
            if name in ways
            else "the library's own, as for a cache; no Grain"
        )
        rows.append(
            Row(f"{what}, {name}", {"pass": seconds}, num / seconds, unit="images/s", note=note)
        )
    return rows, {"samples": times, "prepare_seconds": preparing}


def write_records(folder: Path, num: int) -> None:
    """Prepare photographs by TFDS."""
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
        }
    )

    class Photographs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        name = "photographs"

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for row, data in enumerate(photographs(num, 2)):
                yield row, {"image": data, "label": row % NUM_CLASSES}

    tfds.disable_progress_bar()
    builder = Photographs(data_dir=folder)
    builder.download_and_prepare(file_format="array_record", download_dir=folder / "downloads")


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
