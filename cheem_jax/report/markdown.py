"""`report.md`: a run on one page, with its tables and figures; `report.md.jinja` has its text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report import figures
from cheem_jax.report.memories import ROUTED_TO_FORGOTTEN, UNAVAILABLE, routed_to_forgotten, unmeasured
from cheem_jax.report.table import Grid, method_grid, percent, setting_rows, task_grid
from cheem_jax.run.progress import duration

Results = Mapping[str, Any]


def write_report(directory: Path, results: Results) -> Path:
    """Draw the figures into `figures/`, write `report.md` next to them and return its file."""
    figures.accuracy_heatmap(results, directory / "figures" / "accuracy.png")
    if "pool" in results:
        figures.architecture_grid(results, directory / "figures" / "architectures.png")
    compiled, splits = results["compile"], results.get("split_sha256", {})
    spent = f"{duration(results['seconds_total'])}, of which {compiled['seconds']:.1f} s to compile "
    setting = [*setting_rows(results), ("time", f"{spent}{compiled['programs']} functions")]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True,
    )  # fmt: skip
    text = environment.get_template("report.md.jinja").render(
        results=results, methods=method_grid(results), tasks=task_grid(results),
        setting=Grid("setting", ("setting", "value"), tuple(setting), 2),
        just_trained=", ".join(map(percent, results["just_trained"])),
        empty=unmeasured(results), unavailable=UNAVAILABLE,
        forgotten=ROUTED_TO_FORGOTTEN if routed_to_forgotten(results) else "",
        splits=", ".join(f"{name} `{sha256[:12]}`" for name, sha256 in splits.items() if sha256),
    )  # fmt: skip
    write_atomically(directory / "report.md", text)
    return directory / "report.md"
