"""The figure of `docs/results.md`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import frame, legend_below, mean_std
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.report.comparison import measure
from cheem_jax.report.figures import DPI, FAINT, INK, save

FOUND, GIVEN = "#1f77b4", "#c0792b"


def accuracy_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """A line per method: mean with its standard deviation, and a point per run, without and with the task ID given."""
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for place, runs in enumerate(rows.values()):
        for name, colour, shift in (("average_accuracy", FOUND, -0.14), ("local_average_accuracy", GIVEN, 0.14)):
            values = [100 * value for run in runs if (value := measure(run, name)) is not None]
            if (found := mean_std(values)) is None:
                continue
            axes.errorbar(
                found["mean"], place + shift, xerr=found["std"], fmt="D", color=colour, markersize=5, capsize=3,
                linewidth=1.5,
            )  # fmt: skip
            axes.plot(values, [place + shift] * len(values), "o", color=INK, markersize=2.5, zorder=3)
    titles = [title.replace("$", r"\$").replace(" (", "\n(") for title in rows]
    axes.set_yticks(range(len(rows)), titles, color=INK, fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 100))
    frame(axes, x="average accuracy after the last task, %", grid=True)
    handles = [
        Line2D([], [], color=FOUND, marker="D", markersize=5, linestyle="none", label="task-agnostic"),
        Line2D([], [], color=GIVEN, marker="D", markersize=5, linestyle="none", label="task ID given"),
        Line2D([], [], color=INK, marker="o", markersize=2.5, linestyle="none", label="one run"),
    ]
    legend_below(figure, handles)
    figure.suptitle("Mean over runs; bars: standard deviation over seeds", fontsize=10, color=FAINT)
    save(figure, file)
