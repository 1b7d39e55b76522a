"""The sub-commands of `cheem`: each a dataclass of settings and the function that carries it out.

Their table is here, and a command's own module is imported when that command is given.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One sub-command, and where it is to be found in this folder."""

    name: str
    module: str
    settings: str
    """The dataclass that holds its options."""
    function: str
    """Takes the settings; returns the exit status, None for 0."""
    computes: bool = True
    """Whether functions are compiled, which are then kept for the next time."""

    def load(self) -> tuple[type, Callable[[Any], int | None]]:
        """The dataclass and the function. Raises ImportError where a package is missing."""
        module = importlib.import_module(f"cheem_jax.cli.{self.module}")
        return getattr(module, self.settings), getattr(module, self.function)

    @property
    def help(self) -> str:
        """The first line of the dataclass's docstring, read without importing what the command needs."""
        source = ast.parse(Path(__file__).with_name(f"{self.module}.py").read_text())
        kinds = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == self.settings)
        return (ast.get_docstring(next(kinds)) or "").splitlines()[0]


GROUPS: dict[str, tuple[Command, ...]] = {
    "use a memory": (
        Command("learn", "learn", "Learn", "learn_tasks"),
        Command("predict", "ask", "Predict", "predict_images"),
        Command("evaluate", "ask", "Evaluate", "evaluate_memory"),
        Command("info", "ask", "Info", "show_info"),
        Command("forget", "learn", "Forget", "forget_task"),
        Command("export", "export", "Export", "export_memory"),
        Command("serve", "serve", "Serve", "serve_memory"),
    ),
    "look": (
        Command("report", "report", "Report", "write_report_page", computes=False),
        Command("watch", "watch", "Watch", "watch_run", computes=False),
        Command("tensorboard", "tensorboard", "Tensorboard", "write_tensorboard", computes=False),
    ),
    "data and weights": (
        Command("data list", "data", "List", "list_data", computes=False),
        Command("data prepare", "data", "Prepare", "prepare_data", computes=False),
        Command("data verify", "data", "Verify", "verify_data", computes=False),
        Command("data show", "data", "Show", "show_data", computes=False),
        Command("convert", "convert", "Convert", "convert_weights"),
    ),
    "the rest": (
        Command("demo", "demo", "Demo", "learn_demo"),
        Command("doctor", "doctor", "Doctor", "examine", computes=False),
        Command("completion", "completion", "Completion", "print_completion", computes=False),
    ),
}
"""Commands as the help shows them."""

COMMANDS: dict[str, Command] = {command.name: command for group in GROUPS.values() for command in group}
