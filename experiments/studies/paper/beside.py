"""Collected runs that stand beside the page's own: the same seeds on another processor, images of another size."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cheem_jax.run.differences import settings_apart, summary
from studies.paper.collected import Cells, Collected, load

AGAIN, SIZES = "again", "at_*"
"""Their folders, beside that of the page's runs."""


class Beside(NamedTuple):
    """What was found there."""

    again: Cells
    """Runs of the page made once more on another processor."""
    sizes: Sequence[Cells]
    """Runs on the same images in another size, a folder each, the smallest first."""


def load_beside(results: Path, cells: Cells) -> Beside:
    """What stands beside the folder of the page's runs, `cells`; raises ValueError where it does not belong to them."""
    folder = results.parent / AGAIN
    again = load(folder) if folder.is_dir() else {}
    for cell, found in again.items():
        for seed, run in found.items():
            if why := _no_twin(run, cells.get(cell, {}).get(seed)):
                raise ValueError(
                    f"{run.run.directory} is no run of {results} made again on another processor: {why}; remove it"
                )
    first = next(run for found in cells.values() for run in found.values())
    sizes = [load(folder) for folder in results.parent.glob(SIZES) if folder.is_dir()]
    for run in (run for other in sizes for found in other.values() for run in found.values()):
        if why := _no_other_size(run, first):
            raise ValueError(f"{run.run.directory} is no run on the same pictures in another size: {why}; remove it")
    return Beside(again, sorted(sizes, key=pixels_of))


def pixels_of(cells: Cells) -> int:
    """The size of the images."""
    return next(run.run.results["image_size"] for found in cells.values() for run in found.values())


def processor_of(run: Collected) -> str | None:
    """What the record tells."""
    return run.record.get("conditions", {}).get("device", {}).get("processor")


def _no_twin(run: Collected, twin: Collected | None) -> str:
    if twin is None:
        return "no run there is of its method, settings and seed"
    if run.run.order != twin.run.order:
        return f"its tasks are {', '.join(run.run.order)}"
    if found := settings_apart(twin.run.config, run.run.config):
        return f"its settings differ from {twin.run.directory}: {summary(found, 'settings')}"
    processors = processor_of(run), processor_of(twin)
    return f"both ran on {processors[0]}" if processors[0] == processors[1] else ""


def _no_other_size(run: Collected, first: Collected) -> str:
    if set(run.run.order) != set(first.run.order):
        return f"its tasks are {', '.join(run.run.order)}"
    if run.record["data"].get("split_seed") != first.record["data"].get("split_seed"):
        return "its splits have another seed"
    size = run.run.results["image_size"]
    return f"its size is {size} as well" if size == first.run.results["image_size"] else ""
