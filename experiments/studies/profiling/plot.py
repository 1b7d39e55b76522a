"""The table and the figure of `jit_profile.py`, made from its numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from charts import frame, legend_below
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cheem_jax.report.figures import DPI, FAINT, INK, save

LOOKS = {"stages": ("#1b6ca8", "o"), "whole": ("#c8553d", "s"), "scan": ("#3a7d44", "^")}
"""Colour and marker of an executor."""
Results = Mapping[str, Any]

_HEADER = (
    "backbone", "px", "batch", "precision", "executor", "functions", "compile s", "cold step s", "step s",
    "images/s", "GFLOP/s", "peak", "of peak", "memory MB",
)  # fmt: skip


def profile_table(results: Results) -> str:
    """The Markdown table, with what it was measured on and what its columns mean."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "jax", "jaxlib", "flax"))
    rows: list[tuple[Any, ...]] = [_HEADER]
    for case in results["configurations"]:
        for name, entry in case["executors"].items():
            rows.append((
                case["backbone"], case["image_size"], case["batch_size"], case["precision"], name, entry["programs"],
                f"{entry['compile_seconds']:.1f}", f"{entry['first_step_seconds']:.3g}",
                f"{entry['step_seconds']:.3g}", f"{entry['images_per_second']:.4g}",
                f"{entry['flops_per_second'] / 1e9:.3g}", f"{case['peak_flops_per_second'] / 1e9:.4g}",
                f"{100 * entry['share_of_peak']:.0f} %", f"{entry['memory_bytes'] / 1e6:.0f}",
            ))  # fmt: skip
    head, *body = ("| " + " | ".join(map(str, cells)) + " |" for cells in rows)
    table = "\n".join([head, "|---|" + "---:|" * 2 + "---|---|" + "---:|" * (len(_HEADER) - 5), *body])
    signatures = {
        case["backbone"]: f"{case['num_signatures']} of {case['num_draws']}" for case in results["configurations"]
    }
    where = "of the process, the compiler's own memory included." if machine["platform"] == "cpu" else "on the device."
    return f"""# Executors compared

{machine["device"]} ({machine["platform"]}; {machine["system"]}); {versions}; {machine["date"]}.

{table}

- Every executor runs the same architectures, sampled uniformly over the candidates of a first task. Distinct
  signatures: {", ".join(f"{name} {number}" for name, number in signatures.items())}.
- functions, compile s: what XLA compiled in the cold pass, without a persistent cache.
- cold step s: mean over the cold pass, in which every architecture is new. If samples rarely repeat, every
  step of `whole` costs this much; the others compile before the first step only.
- step s: median over {results["repeats"]} more passes with everything compiled, from uint8 images to
  updated parameters. `scan` runs several steps per call; its time is divided.
- GFLOP/s: FLOPs that these architectures need at least (`step_flops`) over the time taken; peak: of one
  large matrix product, measured after every pass.
- memory MB: growth of the peak during the cold pass, {where}
"""


def cold_start_figure(results: Results, file: Path) -> None:
    """Wall time over the steps of the cold pass, with and without XLA's compiler, one panel per configuration."""
    cases = results["configurations"]
    num_columns = min(2, len(cases))
    num_rows = -(-len(cases) // num_columns)
    figure = Figure(figsize=(8, 3.3 * num_rows + 0.9), dpi=DPI, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes, case in zip(panels.flat, cases, strict=False):
        _panel(axes, case)
    for axes in panels.flat[len(cases) :]:
        axes.axis("off")
    names = list(dict.fromkeys(name for case in cases for name in case["executors"]))
    looks = {name: dict(zip(("color", "marker"), LOOKS[name], strict=True)) for name in names}
    handles = [Line2D([], [], markersize=5, label=name, **look) for name, look in looks.items()]
    label = "the same without the compiler"
    handles.append(Line2D([], [], color=FAINT, linestyle=(0, (1, 1.2)), linewidth=1.8, label=label))
    legend_below(figure, handles)
    figure.suptitle("A fresh architecture at every step, from a cold start", fontsize=12, color=INK)
    save(figure, file)


def _panel(axes: Axes, case: Results) -> None:
    for name, entry in case["executors"].items():
        colour, marker = LOOKS[name]
        seconds, compiling = np.array(entry["cold_seconds"]), np.array(entry["cold_compile_seconds"])
        steps = np.arange(1, len(seconds) + 1)
        # the steps of one call are done when the call is
        done = np.minimum(-(-steps // entry["steps_per_call"]) * entry["steps_per_call"], len(steps)) - 1
        axes.plot(steps, np.cumsum(seconds)[done], color=colour, marker=marker, markersize=4, linewidth=1.8)
        without = np.cumsum(seconds - compiling)[done]
        axes.plot(steps, without, color=colour, linestyle=(0, (1, 1.2)), linewidth=1.8)
    frame(axes, case["name"], "supernet steps", "wall time, s", grid=True)
    axes.set(xlim=(0.5, None), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
