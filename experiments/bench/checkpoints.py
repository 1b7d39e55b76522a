"""What it costs that nothing is lost: saving during the demo, and opening a memory of many tasks.

python -m experiments.bench.checkpoints
"""

import dataclasses
import tempfile
import time
from pathlib import Path

from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cheem.config import PRESETS
from cheem_jax.cheem.saved_memory import open_memory, save_memory_task
from cheem_jax.cli.main import parse, run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import Stream
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from experiments.bench.demo_compile import small, small_tasks
from experiments.bench.growth import RANK, drawn_memory
from experiments.bench.measure import Bench, Row, alternate, bytes_of, medians, save, say, stages

GOAL_SHARE, GOAL_SECONDS = 0.02, 5.0


@dataclasses.dataclass(frozen=True)
class Settings(Bench):
    """What is measured."""

    num_tasks: int = 100
    """Tasks of the memory that is opened."""


def main(settings: Settings) -> None:
    """Run the demo once, fill a memory, and write `checkpoints.json`."""
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        whole, saving, parts = demo_seconds(Path(folder) / "demo", settings.quick)
        say(f"checkpoints: {saving:.2f} s of the demo's {whole:.1f} s")
        num_tasks = 4 if settings.quick else settings.num_tasks
        seconds, size = opening(Path(folder) / "memory", num_tasks)
    rows = [
        Row(
            "saving and reading back, share of the demo", {"demo": whole, "checkpoints": saving}, saving / whole,
            GOAL_SHARE, "at most", "of the time", note="rolling ones where due; fsync and hashes included",
        ),
        Row(
            f"opening {num_tasks} tasks", {"opening": seconds}, seconds, GOAL_SECONDS, "at most", "s",
            note=f"vit_micro, drawn architectures; every file and the content hashed; {size / 1e6:.1f} MB",
        ),
    ]  # fmt: skip
    save(settings.out, "checkpoints", rows, quick=settings.quick, tasks=parts)


def demo_seconds(directory: Path, quick: bool) -> tuple[float, float, list[float]]:
    """Seconds of the demo's learning, of its checkpoints, and those by task."""
    stream = Stream("two", small_tasks()[:2]) if quick else demo_stream()
    config = small(1) if quick else PRESETS["demo"]
    start = time.perf_counter()
    run_stream(stream, load_pretrained("vit_micro"), RunConfig(config, "demo"), directory, Progress())
    whole = time.perf_counter() - start
    parts = [entry["checkpoint_seconds"] for entry in read(directory) if entry["event"] == "evaluated"]
    return whole, sum(parts), parts


def opening(root: Path, num_tasks: int) -> tuple[float, int]:
    """Median seconds to open a memory of so many tasks, and its bytes."""
    executor = stages(load_pretrained("vit_micro"))
    memory = drawn_memory(executor, num_tasks).memory
    for index in range(num_tasks):
        save_memory_task(root, memory, index, RANK)
    assert len(saved_tasks(root)) == num_tasks
    times = alternate({"open": lambda: open_memory(root, executor.base_pool)}, 5)
    return medians(times)["open"], bytes_of(root)


if __name__ == "__main__":
    run_command(main, parse(Settings, description=__doc__))
