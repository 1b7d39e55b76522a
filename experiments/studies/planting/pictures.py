"""Two figures of a planted experiment: the networks of all runs side by side, and whom kin and twin resemble."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import architecture_sheet, frame
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cheem_jax.cheem.hee import first_level
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.figures import DPI, FAINT, INK, save
from studies.planting.claims import KIN, TWIN, relative_and_rivals, similarity_of
from studies.planting.stream import NAMES, PLAN

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
LINES = ("-", "--", ":", "-.")


def architectures(runs: Runs, file: Path) -> None:
    """A row per seed, a column per sampling."""
    sheet = [
        {f"{sampling} sampling, seed {results['seed']}": results for results in found}
        for sampling, found in runs.items()
    ]
    architecture_sheet(file, sheet)


def similarity(runs: Runs, file: Path) -> None:
    """S and psi by block of kin and twin to every earlier network, the relative bold; means over the runs of HEE.

    Where only another way of sampling was run, of that.
    """
    sampling = "hee" if "hee" in runs else next(iter(runs))
    found = runs[sampling]
    figure = Figure(figsize=(10.5, 6.4), dpi=DPI, layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for row, task in enumerate((KIN, TWIN)):
        each = [similarity_of(results)[task] for results in found]
        psi = [_psi(one) for one in each]
        levels = np.mean([1 / (1 + (~np.isnan(one)).sum(axis=0)) for one in each], axis=0)
        _draw(axes[row, 0], task, each, f"{PLAN[task].role}: similarity S")
        _draw(axes[row, 1], task, psi, f"{PLAN[task].role}: first level ψ")
        axes[row, 1].plot(1 + np.arange(len(levels)), levels, color=FAINT, linestyle=(0, (1, 3)), label="equal share")
        axes[row, 1].legend(
            frameon=False, fontsize=8, labelcolor=INK, handlelength=3.5, loc="center left", bbox_to_anchor=(1, 0.5)
        )
    for panel in axes[1]:
        panel.set_xlabel("block", color=FAINT)
    runs_text = "1 run" if len(found) == 1 else f"mean of {len(found)} runs"
    title = f"Kin and twin beside the earlier networks: sampling {sampling}, {runs_text}"
    figure.suptitle(title, fontsize=12, color=INK)
    save(figure, file)


def _draw(axes: Axes, task: int, each: Sequence[Float[np.ndarray, "E L"]], title: str) -> None:
    own, compared = relative_and_rivals(task)
    styles = dict(zip(compared[1:], LINES, strict=False))
    blocks = 1 + np.arange(each[0].shape[1])
    means = np.ma.masked_invalid(np.stack(each)).mean(axis=0).filled(np.nan)  # where some run has the network
    for network, name in enumerate(("base", *NAMES[:task])):
        if network == own:
            style = {"label": f"{name} (relative)", "color": "#d7301f", "linewidth": 2.6, "markersize": 5}
        elif network in styles:
            style = {"label": name, "color": "#4d6a88", "linewidth": 1.2, "markersize": 3, "linestyle": styles[network]}
        else:
            style = {"label": f"{name} (family)", "color": COLOURS["adapt"], "linewidth": 1.6, "markersize": 4}
        axes.plot(blocks, means[network], marker="o", **style)
    frame(axes, title)
    axes.set_xticks(blocks)
    axes.tick_params(length=0)


def _psi(similarity: Float[np.ndarray, "E L"]) -> Float[np.ndarray, "E L"]:
    psi = np.stack([first_level(column)[0] for column in similarity.T], axis=-1)
    return np.where(np.isnan(similarity), np.nan, psi)
