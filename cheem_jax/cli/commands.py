"""The table of commands. A command's module is imported only if the command is called."""

import importlib
import typing
from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command of `cheem`."""

    name: str
    function: str
    """Module of this folder and function of the module, as `MODULE.FUNCTION`. The function returns
    the exit status; None means 0."""
    help: str
    computes: bool = True
    """Whether the command compiles functions, which are then cached."""

    def load(self) -> tuple[type, Callable[[Any], int | None]]:
        """Return the dataclass of the options, and the function. Raises ImportError for missing
        packages.

        If the defaults of the options depend on the command line, the dataclass has a method
        `defaults` that accepts the command-line arguments.
        """
        module, _, name = self.function.partition(".")
        function = getattr(importlib.import_module(f"cheem_jax.cli.{module}"), name)
        return typing.get_type_hints(function)["settings"], function


GROUPS: dict[str, tuple[Command, ...]] = {
    "use a memory": (
        Command("learn", "memory.learn_tasks", "Learn tasks into a new or existing memory."),
        Command("predict", "ask.predict_images", "Predict the task and the class of images."),
        Command(
            "evaluate",
            "ask.evaluate_memory",
            "Measure accuracy on labelled images of a memory's tasks.",
        ),
        Command(
            "info",
            "info.show_info",
            "Show a memory's tasks, networks, experts and sizes.",
            computes=False,
        ),
        Command(
            "forget",
            "memory.forget_tasks",
            "Delete tasks, and experts that only they use, for good.",
        ),
        Command("export", "memory.export_memory", "Export a task's network or the whole memory."),
        Command(
            "serve", "ask.serve_memory", "Predict over HTTP, with a page for browsers (`serve`)."
        ),
        Command(
            "push", "memory.push_memory", "Upload a memory to the Hugging Face hub.", computes=False
        ),
        Command(
            "pull",
            "memory.pull_memory",
            "Download a memory from the Hugging Face hub.",
            computes=False,
        ),
    ),
    "learn a stream": (
        Command("run", "run.run_seeds", "Learn a stream of tasks with any method, or resume."),
        Command("demo", "demo.learn_demo", "Learn six small bundled tasks in minutes."),
    ),
    "look at runs and memories": (
        Command(
            "report",
            "report.write_report_page",
            "Draw runs and memories as one HTML page.",
            computes=False,
        ),
        Command(
            "watch",
            "report.watch_run",
            "Watch a run or memory that another process works on.",
            computes=False,
        ),
        Command(
            "tensorboard",
            "report.write_tensorboard",
            "Write TensorBoard event files (`tensorboard`).",
            computes=False,
        ),
    ),
    "data and weights": (
        Command(
            "data list",
            "data.list_data",
            "List the benchmarks' tasks: state, licence, source.",
            computes=False,
        ),
        Command(
            "data prepare",
            "data.prepare_data",
            "Download and prepare data sets, or say how to get them.",
            computes=False,
        ),
        Command(
            "data verify",
            "data.verify_data",
            "Decode every image; find broken files and copies.",
            computes=False,
        ),
        Command(
            "data show",
            "data.show_data",
            "Draw contact sheets of tasks, or a figure of a stream.",
            computes=False,
        ),
        Command("convert", "convert.convert_weights", "Convert the weights of a timm ViT."),
    ),
    "installation": (
        Command(
            "doctor",
            "doctor.examine",
            "Check packages, devices and caches; say how to repair them.",
            computes=False,
        ),
        Command(
            "completion",
            "completion.print_completion",
            "Print a script for tab completion in a shell.",
            computes=False,
        ),
    ),
}
"""Commands, keyed by the headings of the help. A name in parentheses in a help text is an extra to
install."""

COMMANDS: dict[str, Command] = {
    command.name: command for group in GROUPS.values() for command in group
}
