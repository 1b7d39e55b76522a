"""One way to choose the settings of every method: by accuracy on validation images of a few of the
stream's tasks.

The rate comes first, with everything else as the preset has it, then further settings one after the
other. Of a grid, the two values in the middle are tried, then the next ones on the side of the
better, as long as they are better still. A candidate learns the given tasks as a stream, is
measured on their validation images, and the highest average accuracy wins (task-agnostic; with the
task ID given for upper bounds; of equal ones the first). Every method has as many passes over the
training images as CHEEM has in both phases together, half of them for a choice, and the cosine
schedule.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import write_page
from study import Study, Variant, changed, run_all

from cheem_jax.baselines.catalogue import preset_of
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.report.table import UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
LOWER_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
"""Of methods that train the whole backbone."""
FURTHER: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "cheem": {"ops.rank": (4, 16, 64)},
    "cheem_lite": {"ops.rank": (4, 16, 64)},
    "lora_cl": {"rank": (4, 16, 64)},
    "lora_finetune": {"rank": (4, 16, 64)},
    "s_prompts": {"length": (5, 10, 20)},
    "l2p": {"length": (6, 10, 20), "top_k": (1, 5)},
    "dualprompt": {"expert_length": (10, 20, 40), "general_length": (6, 12)},
    "coda_prompt": {"length": (4, 8, 16)},
    "diki": {"layers": ("last3", "first8"), "cov_shrinkage": (0.0, 0.01, 0.1, 0.5)},
    "ewc": {"penalties": ((1.0,), (1e2,), (1e4,), (1e6,), (1e8,))},
    "tuna": {"bottleneck": (8, 16, 64)},
    "moal": {"bottleneck": (16, 64), "hidden": (1000, 5000)},
    "moe_adapters": {"bottleneck": (8, 64)},
}
"""At most two settings per method besides the rate: those that its own paper varies, and the rank
of LoRA for all that have it, CHEEM among them: to choose it for one of them only would be
unfair."""


def grids_of(method: str) -> dict[str, tuple[Any, ...]]:
    """The values of each setting that is chosen, in the order of choosing; none for a method that
    trains no network."""
    if method == "frozen_linear":
        return {}
    rates = LOWER_RATES if method in ("ewc", "full_finetune") else RATES
    return {"rate": rates, **FURTHER.get(method, {})}


def change(method: str, setting: str, value: Any) -> dict[str, Any]:
    """The fields of a method's settings that one choice changes."""
    if setting != "rate":
        return {setting: value}
    if method == "full_finetune":
        return {"learning_rates": (value,)}
    phases = ("supernet", "finetune") if method.startswith("cheem") else ("fit",)
    return {f"{phase}.learning_rate": value for phase in phases}


def budget(method: str, preset: Any) -> dict[str, Any]:
    """The fields that give a method CHEEM's passes over the training images, and the cosine
    schedule."""
    config = preset_of(method, preset)
    cheem = PRESETS[preset]
    epochs = cheem.supernet.epochs + cheem.finetune.epochs
    if isinstance(config, CheemConfig) or method == "frozen_linear":
        return {}
    own = (
        {"epochs": epochs}
        if method == "full_finetune"
        else {"fit.epochs": epochs, "fit.schedule": "cosine"}
    )
    # one penalty at a time: a choice within the method would take passes that others do not have
    return own | ({"penalties": FURTHER["ewc"]["penalties"][1]} if method == "ewc" else {})


def choose(
    study: Study, tasks: str, variants: Sequence[Variant], progress: Progress
) -> list[Variant]:
    """The variants with the settings that win on `tasks`; `chosen.md` and `chosen.json` say what
    was tried.

    `tasks` are names of the stream's tasks, separated by commas. What was run before is not run
    again.
    """
    for variant in variants:
        if variant.settings_of:
            raise ValueError(
                f"--choose names tasks, but {variant.name} has the settings of"
                f" {variant.settings_of}; choose those first, then give --choose their chosen.json"
            )
    trying = dataclasses.replace(study, seeds="0", run_dir=study.run_dir / "choice")
    chosen, rows = [], []
    for variant in variants:
        config = {**budget(variant.method, study.chosen_preset), **variant.config}
        usual = preset_of(variant.method, study.chosen_preset)
        reached = dict[Any, float]()
        for setting, values in grids_of(variant.method).items():
            shorter = half_as_long(changed(usual, config))
            candidates = [
                Variant(
                    f"{variant.name}-{setting}-{number}",
                    f"{variant.title}, {setting} {_told(value)}",
                    variant.method,
                    {**config, **change(variant.method, setting, value), **shorter},
                    {**variant.run, "tasks": tasks, "measured_on": "validation"},
                )
                for number, value in enumerate(values)
            ]
            accuracy = functools.partial(_accuracy, trying, progress, candidates, usual, reached)
            tried = climbed(accuracy, len(values))
            best = max(tried, key=lambda number: (tried[number], -number))
            config |= change(variant.method, setting, values[best])
            rows.append(
                {
                    "method": variant.name,
                    "title": variant.title,
                    "setting": setting,
                    "values": list(values),
                    "accuracies": [tried.get(number) for number in range(len(values))],
                    "chosen": values[best],
                    "at_the_end": best in (0, len(values) - 1),
                }
            )
            write_page(study.run_dir / "chosen", _page(tasks, rows), rows)
        chosen.append(variant._replace(config=config))
    return chosen


def chosen_before(file: Path, variants: Sequence[Variant], preset: Any) -> list[Variant]:
    """The variants with the settings of an earlier choice, which its `chosen.json` records."""
    try:
        rows = json.loads(file.read_text())
        found = {(row["method"], row["setting"]): row["chosen"] for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--choose is {file}; expected the chosen.json of an earlier choice ({error!r})"
        ) from error
    chosen = []
    for variant in variants:
        settings = grids_of(variant.method)
        owner = variant.settings_of or variant.name
        if missing := [name for name in settings if (owner, name) not in found]:
            raise ValueError(
                f"--choose: {file} has no {missing[0]} of {owner}; name tasks instead, to choose on"
                " their images"
            )
        config = {**budget(variant.method, preset), **variant.config}
        for setting in settings:
            value = found[owner, setting]
            config |= change(
                variant.method, setting, tuple(value) if isinstance(value, list) else value
            )
        chosen.append(variant._replace(config=config))
    return chosen


def half_as_long(config: Any) -> dict[str, int]:
    """The fields that train for half of the epochs: a choice need not take as long as the run that
    it is made for."""
    phases = [name for name in ("supernet", "finetune", "fit") if hasattr(config, name)]
    epochs = {f"{name}.epochs": getattr(config, name).epochs for name in phases}
    return {name: max(one // 2, 1) for name, one in (epochs or {"epochs": config.epochs}).items()}


def climbed(accuracy: Callable[[int], float], num: int) -> dict[int, float]:
    """Accuracies of the values that are tried: the two in the middle, then outwards from the better
    while it rises.

    The values outside have neighbours that were better, so trying them costs passes and would
    hardly win.
    """
    low = (num - 1) // 2
    tried = {low: accuracy(low), low + 1: accuracy(low + 1)}
    step = 1 if tried[low + 1] > tried[low] else -1
    best = low + max(step, 0)
    while 0 <= best + step < num:
        tried[best + step] = accuracy(best + step)
        if tried[best + step] <= tried[best]:
            break
        best += step
    return tried


def _accuracy(
    study: Study,
    progress: Progress,
    candidates: Sequence[Variant],
    usual: Any,
    reached: dict[Any, float],
    number: int,
) -> float:
    """What a candidate reaches; the one chosen before is among those of the next setting and is not
    run again."""
    own = candidates[number]
    settings = changed(usual, own.config)
    key = "average_accuracy"
    if own.method in UPPER_BOUNDS:
        key = "local_average_accuracy"
    if settings not in reached:
        reached[settings] = run_all(study, [own], progress, lambda _: None)[own.name][0][key]
    return reached[settings]


def _told(value: Any) -> str:
    return (
        f"{value[0]:g}"
        if isinstance(value, tuple)
        else value
        if isinstance(value, str)
        else f"{value:g}"
    )


def _page(tasks: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = tuple(
        (
            row["title"],
            row["setting"],
            ", ".join(
                f"{_told(value)}: {'–' if reached is None else f'{100 * reached:.1f}'}"
                for value, reached in zip(row["values"], row["accuracies"], strict=True)
            ),
            _told(row["chosen"]) + (" (an end)" if row["at_the_end"] else ""),
        )
        for row in rows
    )
    grid = Grid("", ("method", "setting", "accuracy % on validation images", "chosen"), lines, 2)
    return f"# Settings chosen on {tasks.replace(',', ', ')}\n\n{grid.to_markdown()}\n"
