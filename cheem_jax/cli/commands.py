"""The sub-commands of `cheem`, one file each: a dataclass of settings and the function that carries it out.

Their table is here, and a command's own module is imported when that command is given.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One sub-command, and where it is to be found in this folder."""

    name: str
    module: str
    settings: str
    """The dataclass that holds its options."""
    function: str
    """Takes the settings; returns the exit status, None for 0."""
    help: str
    """The first line of the dataclass's docstring."""
    computes: bool = True
    """Whether programs are compiled, which are then kept for the next time."""

    def load(self) -> tuple[type, Callable[[Any], int | None]]:
        """The dataclass and the function. Raises ImportError where a package is missing."""
        module = importlib.import_module(f"cheem_jax.cli.{self.module}")
        return getattr(module, self.settings), getattr(module, self.function)


GROUPS: dict[str, tuple[Command, ...]] = {
    "use a memory": (
        Command(
            "learn", "learn", "Learn", "learn_tasks",
            "Learn tasks into a memory, which is made if there is none; earlier tasks' images are not needed.",
        ),
        Command(
            "predict", "predict", "Predict", "predict_images",
            "Say which task and class images belong to, and which blocks answered.",
        ),
        Command(
            "evaluate", "evaluate", "Evaluate", "evaluate_memory",
            "Measure a memory on labelled images of tasks that it has learned.",
        ),
        Command(
            "info", "info", "Info", "show_info",
            "Show what a memory contains: its tasks and their networks, the pool of experts, sizes.",
        ),
        Command(
            "forget", "forget", "Forget", "forget_task",
            "Drop a task and what only it uses; every other task answers as before, and this cannot be undone.",
        ),
        Command(
            "export", "export", "Export", "export_memory",
            "Write one task's network, or the whole memory behind its router, for use without this library.",
        ),
        Command(
            "serve", "serve", "Serve", "serve_memory",
            "Answer images over HTTP, with a page in the browser that shows which blocks ran (extra `serve`).",
        ),
    ),
    "look": (
        Command(
            "report", "report", "Report", "write_report_page",
            "Draw one or several runs or memories as a single HTML page that needs no network.", computes=False,
        ),
        Command(
            "watch", "watch", "Watch", "watch_run",
            "Watch a run or memory that another process works on: what is learned, learning now, and the time left.",
            computes=False,
        ),
        Command(
            "tensorboard", "tensorboard", "Tensorboard", "write_tensorboard",
            "Write TensorBoard event files of runs or memories, finished or not; written again, they continue.",
            computes=False,
        ),
    ),
    "data and weights": (
        Command(
            "data list", "data", "List", "list_data",
            "What of the benchmarks is prepared, what is missing, its licence and where to get it.", computes=False,
        ),
        Command(
            "data prepare", "data", "Prepare", "prepare_data",
            "Get data sets in place: download and prepare what can be, and say exactly what must be done for the rest.",
            computes=False,
        ),
        Command(
            "data verify", "data", "Verify", "verify_data",
            "Decode every image of a stream and count: broken files, exact copies across splits, wrong labels.",
            computes=False,
        ),
        Command(
            "data show", "data", "Show", "show_data",
            "Draw a contact sheet of each task, or with --stream the figure of a whole benchmark or stream.",
            computes=False,
        ),
        Command(
            "convert", "convert", "Convert", "convert_weights",
            "Convert timm weights; they keep their own image size, and resize when they are loaded.",
        ),
    ),
    "the rest": (
        Command(
            "demo", "demo", "Demo", "learn_demo",
            "CHEEM learns six small tasks with the bundled vit_micro: no network, no data, minutes on a laptop.",
        ),
        Command(
            "doctor", "doctor", "Doctor", "examine",
            "Look at versions, devices, memory and caches, try a small network, and say how to get what is missing.",
            computes=False,
        ),
        Command(
            "completion", "completion", "Completion", "print_completion",
            "Print what makes a shell complete `cheem`, its commands and their options.", computes=False,
        ),
    ),
}  # fmt: skip
"""Commands as the help shows them."""

COMMANDS: dict[str, Command] = {command.name: command for group in GROUPS.values() for command in group}
