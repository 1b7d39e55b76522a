"""Figures of `head_analysis.py`: match probability against the number of rivals, and margins."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import frame, legend_below
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import METHODS
from studies.heads.margins import Margins, fit_of

MARKERS = {"ewc": "^", "moal": "v", "coda_prompt": "D", "dualprompt": "s", "l2p": "o"}
HIT, MISS, THEORY = "#1b6ca8", "#c8553d", INK
GAPS = Normalize(0, 5)
COLOURS = colormaps["viridis_r"]
Numbers = Mapping[str, Any]


def match_figure(curves: Sequence[Numbers], measured: Sequence[Numbers], file: Path) -> None:
    """What the theory says for several gaps, with measured tasks laid over it and, beside it, held against it.

    Left, the theory's deviations are equal: a task stands at its number of rivals, coloured by its gap in sigmas.
    """
    figure = Figure(figsize=(10.5 if measured else 6.4, 4.8), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    axes = panels[0]
    for curve in curves:
        colour, simulated = COLOURS(GAPS(curve["gap"])), curve["simulated"]
        axes.plot(curve["rivals"], curve["quadrature"], color=colour, linewidth=1.8)
        axes.errorbar(
            simulated["rivals"], simulated["probability"], 2 * np.array(simulated["standard_error"]), color=colour,
            fmt=".", markersize=5, elinewidth=1, capsize=2,
        )  # fmt: skip
        axes.plot(1, curve["one_rival"], "D", markersize=8, markerfacecolor="none", markeredgecolor=colour)
    for task in measured:
        _point(axes, task, task["rivals"])
    axes.set(xscale="log", ylim=(-0.03, 1.03))
    frame(axes, x="classes of other tasks, M", y="P(argmax within the task = argmax of all)", grid=True)
    bar = figure.colorbar(ScalarMappable(GAPS, COLOURS), ax=axes, pad=0.01, fraction=0.045)
    bar.set_label("gap of the means, in standard deviations", color=FAINT, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    if measured:
        panels[1].plot([0, 1], [0, 1], color=FAINT, linewidth=1)
        for task in measured:
            marker, x, y = MARKERS[task["method"]], task["predicted_by_class"], task["match"]
            panels[1].plot(x, y, marker, markersize=5, markerfacecolor="none", markeredgecolor=FAINT)
            _point(panels[1], task, task["predicted"])
        panels[1].set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        x = "predicted for rivals that are alike (hollow: class by class)"
        frame(panels[1], x=x, y="measured", grid=True)
    handles = [
        Line2D([], [], color=FAINT, linewidth=1.8, label="quadrature"),
        Line2D([], [], color=FAINT, marker=".", linestyle="none", label="simulation, ± 2 standard errors"),
        Line2D([], [], color=FAINT, marker="D", markerfacecolor="none", linestyle="none", label="closed form, M = 1"),
    ]
    for method in dict.fromkeys(task["method"] for task in measured):
        handles.append(
            Line2D([], [], color=FAINT, marker=MARKERS[method], linestyle="none", label=f"{METHODS[method]}, a task")
        )
    legend_below(figure, handles)
    figure.suptitle("How often the argmax within a task is the argmax of all", fontsize=12, color=INK)
    save(figure, file)


def margin_figure(found: Mapping[str, Sequence[Sequence[Margins]]], file: Path) -> None:
    """Best logit within the task minus best of all others: methods in rows, tasks in columns, all runs together."""
    tasks = [margins.task for margins in next(iter(found.values()))[0]]
    figure = Figure(figsize=(1.2 + 1.9 * len(tasks), 1.3 + 1.45 * len(found)), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(found), len(tasks), squeeze=False, sharex="row")
    for column, task in zip(panels.T, tasks, strict=True):
        for place, axes in enumerate(column):
            frame(axes, "" if place else task)
    for row, (method, runs) in zip(panels, found.items(), strict=True):
        row[0].set_ylabel(METHODS[method], color=INK)
        margins = np.concatenate([margins.margin for one in runs for margins in one])
        leads = np.linspace(margins.min(), margins.max(), 120)
        for axes, of_runs in zip(row, zip(*runs, strict=True), strict=True):
            _margins(axes, of_runs, leads)
    handles = [
        Line2D([], [], color=MISS, linewidth=6, label="another task's class wins"),
        Line2D([], [], color=HIT, linewidth=6, label="a class of the task wins (share in %)"),
        Line2D([], [], color=THEORY, linewidth=1.2, label="independent normal rivals"),
    ]
    legend_below(figure, handles)
    figure.suptitle("Best logit within the task minus best logit of all other classes", fontsize=12, color=INK)
    save(figure, file)


def _margins(axes: Axes, found: Sequence[Margins], leads: Float[np.ndarray, "N"]) -> None:
    margin = np.concatenate([margins.margin for margins in found])
    width = max(np.ptp(margin) / 30, 1e-9)
    # zero is an edge, so that no bar holds both kinds
    edges = width * np.arange(np.floor(margin.min() / width), np.ceil(margin.max() / width) + 1)
    heights, _ = np.histogram(margin, edges, density=True)
    axes.bar(edges[:-1], heights, width, align="edge", color=[MISS if edge < 0 else HIT for edge in edges[:-1]])
    fit, num_rivals = fit_of(found), found[0].num_rivals
    exceeds = np.array([fit.match(num_rivals, lead) for lead in leads])
    axes.plot((leads[1:] + leads[:-1]) / 2, -np.diff(exceeds) / np.diff(leads), color=THEORY, linewidth=1.2)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    share = 100 * float((margin >= 0).mean())
    axes.text(0.97, 0.93, f"{share:.0f}", ha="right", va="top", transform=axes.transAxes, color=HIT, fontsize=10)
    axes.set_yticks([])


def _point(axes: Axes, task: Numbers, x: float) -> None:
    colour = COLOURS(GAPS(task["scaled_gap"]))
    axes.plot(
        x, task["match"], MARKERS[task["method"]], color=colour, markersize=7, markeredgecolor=INK, markeredgewidth=0.6
    )
