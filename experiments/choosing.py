"""Settings of every method, chosen by accuracy on validation images of a few tasks of the stream.

The learning rate is chosen first, with all other settings as in the preset, then at most two
further settings one after the other. The two middle values of each grid are tried first, then the
next values on the side of the better one while accuracy rises. A candidate learns the tasks as a
stream. The highest average accuracy on validation images wins: task-agnostic accuracy, or accuracy
with the task ID given for upper bounds; the first of equally good candidates. Every method has as
many epochs as both phases of CHEEM together, or half of them for a choice, and the cosine schedule.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import read_chosen, write_page
from study import Study, Variant, changed, run_all

from cheem_jax.baselines.catalogue import make_preset
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.report.table import NONE, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
LOWER_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
"""Learning rates of methods that train the whole backbone."""
SGD_RATES = (3e-3, 1e-2, 5e-2, 1e-1)
"""Learning rates of methods that train by SGD."""
RANKS = (4, 16, 64)
FURTHER: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "cheem": {"ops.rank": RANKS},
    "cheem_lite": {"ops.rank": RANKS},
    "lora_cl": {"rank": RANKS},
    "lora_finetune": {"rank": RANKS},
    "s_prompts": {"length": (5, 10, 20)},
    "l2p": {"length": (6, 10, 20), "top_k": (1, 5)},
    "dualprompt": {"expert_length": (10, 20, 40), "general_length": (6, 12)},
    "coda_prompt": {"length": (4, 8, 16)},
    "diki": {"layers": ("last3", "first8"), "cov_shrinkage": (0.0, 0.01, 0.1, 0.5)},
    "ewc": {"penalties": ((1.0,), (1e2,), (1e4,), (1e6,), (1e8,))},
    "tuna": {"bottleneck": (8, 16, 64)},
    "moal": {"bottleneck": (16, 64), "hidden": (1000, 5000)},
    "ranpac": {"hidden": (1000, 2000, 5000)},
    "ease": {"bottleneck": (16, 64)},
    "moe_adapters": {"bottleneck": (8, 64)},
}
"""Settings, in addition to the learning rate, that each method's paper varies. The rank of LoRA is
chosen for every method that has it, because choosing it for one method only would be unfair."""


def grids_of(method: str, fixed: Collection[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Return the candidate values of each setting, in the order in which the settings are chosen.
    Settings in `fixed` are left out, because a variant sets them. The result is empty if the method
    trains no network."""
    if method == "frozen_linear":
        return {}
    rates = LOWER_RATES if method in ("ewc", "full_finetune") else RATES
    if method in ("ranpac", "ease"):
        rates = SGD_RATES
    grids = {"rate": rates, **FURTHER.get(method, {})}
    return {setting: values for setting, values in grids.items() if setting not in fixed}


def change(method: str, setting: str, value: Any) -> dict[str, Any]:
    """Return the fields of a method's settings that one choice changes."""
    if setting != "rate":
        return {setting: value}
    if method == "full_finetune":
        return {"learning_rates": (value,)}
    phases = ("supernet", "finetune") if method.startswith("cheem") else ("fit",)
    return {f"{phase}.learning_rate": value for phase in phases}


def num_epochs(config: CheemConfig) -> int:
    """Count CHEEM's epochs in all phases."""
    supernet = 0 if config.sampling == "anchored" else config.supernet.epochs
    return supernet + config.finetune.epochs


def budget(method: str, preset: Any) -> dict[str, Any]:
    """Return the fields that set CHEEM's number of epochs and the cosine schedule."""
    epochs = num_epochs(PRESETS[preset])
    if isinstance(make_preset(method, preset), CheemConfig) or method == "frozen_linear":
        return {}
    if method == "full_finetune":
        return {"epochs": epochs}
    fields: dict[str, Any] = {"fit.epochs": epochs, "fit.schedule": "cosine"}
    if method == "ewc":  # one penalty, because a choice within the method would need further epochs
        fields["penalties"] = FURTHER["ewc"]["penalties"][1]
    return fields


def choose(
    study: Study, tasks: str, variants: Sequence[Variant], progress: Progress
) -> list[Variant]:
    """Return the variants with the settings that win on `tasks`, names that are separated by
    commas.

    `chosen.md` and `chosen.json` record every try, also of methods that were chosen for earlier.
    Earlier tries are not repeated. Raises ValueError if the earlier settings were chosen on other
    tasks.
    """
    for variant in variants:
        if variant.settings_of:
            raise ValueError(
                f"--choose names tasks, but {variant.name} has the settings of"
                f" {variant.settings_of}; choose those first, then give --choose their chosen.json"
            )
    trials = dataclasses.replace(study, seeds="0", run_dir=study.run_dir / "choice")
    names = [name.strip() for name in tasks.split(",")]
    rows = dict[tuple[str, str], dict[str, Any]]()
    if (file := study.run_dir / "chosen.json").exists():
        rows = {(row["method"], row["setting"]): row for row in read_chosen(file)}
        if others := [row["tasks"] for row in rows.values() if row.get("tasks", names) != names]:
            raise ValueError(
                f"--choose is {tasks}, but the settings in {file} were chosen on"
                f" {','.join(others[0])}; choose another --run-dir"
            )
    chosen = []
    for variant in variants:
        config = {**budget(variant.method, study.chosen_preset), **variant.config}
        # the winner of one setting is a candidate for the next setting
        accuracies = dict[Any, float]()
        for setting, values in grids_of(variant.method, variant.config).items():
            candidates = _candidates(study, variant._replace(config=config), setting, values, tasks)

            def accuracy(number: int, candidates=candidates, accuracies=accuracies) -> float:
                settings, candidate = candidates[number]
                if settings not in accuracies:
                    (run,) = run_all(trials, [candidate], progress)[candidate.name]
                    is_bound = candidate.method in UPPER_BOUNDS
                    accuracies[settings] = run[
                        "local_average_accuracy" if is_bound else "average_accuracy"
                    ]
                return accuracies[settings]

            tried = climb(accuracy, len(values))
            best = max(tried, key=lambda number: (tried[number], -number))
            config |= change(variant.method, setting, values[best])
            rows[variant.name, setting] = {
                "method": variant.name,
                "title": variant.title,
                "tasks": names,
                "setting": setting,
                "values": list(values),
                "accuracies": [tried.get(number) for number in range(len(values))],
                "chosen": values[best],
                "at_the_end": best in (0, len(values) - 1),
            }
            every = list(rows.values())
            write_page(study.run_dir / "chosen", _page(names, every), every)
        chosen.append(variant._replace(config=config))
    return chosen


def _candidates(
    study: Study, variant: Variant, setting: str, values: Sequence[Any], tasks: str
) -> list[tuple[Any, Variant]]:
    """Return the method's settings and the variant to run for each value of one setting."""
    preset = make_preset(variant.method, study.chosen_preset)
    shorter = half_as_long(changed(preset, variant.config))
    candidates = []
    for number, value in enumerate(values):
        config = {**variant.config, **change(variant.method, setting, value), **shorter}
        candidate = Variant(
            f"{variant.name}-{setting}-{number}",
            f"{variant.title}, {setting} {_text(value)}",
            variant.method,
            config,
            {**variant.run, "tasks": tasks, "measured_on": "validation"},
        )
        candidates.append((changed(preset, config), candidate))
    return candidates


def chosen_before(file: Path, variants: Sequence[Variant], preset: Any) -> list[Variant]:
    """Return the variants with the settings of an earlier choice, read from its `chosen.json`."""
    values = {(row["method"], row["setting"]): row["chosen"] for row in read_chosen(file, ())}
    chosen = []
    for variant in variants:
        owner = variant.settings_of or variant.name
        config = {**budget(variant.method, preset), **variant.config}
        for setting in grids_of(variant.method, variant.config):
            if (owner, setting) not in values:
                raise ValueError(
                    f"--choose: {file} has no {setting} of {owner}; name tasks instead, to choose"
                    " on their images"
                )
            value = values[owner, setting]
            value = tuple(value) if isinstance(value, list) else value
            config |= change(variant.method, setting, value)
        chosen.append(variant._replace(config=config))
    return chosen


def half_as_long(config: Any) -> dict[str, int]:
    """Return the fields that halve the epochs for a choice."""
    phases = [name for name in ("supernet", "finetune", "fit") if hasattr(config, name)]
    epochs = {f"{name}.epochs": getattr(config, name).epochs for name in phases}
    return {name: max(one // 2, 1) for name, one in (epochs or {"epochs": config.epochs}).items()}


def climb(accuracy: Callable[[int], float], num: int) -> dict[int, float]:
    """Return the accuracies of the values that are tried, keyed by index: the two middle values,
    then the next values on the side of the better one while accuracy rises.

    The other values have better neighbours, so that they would cost training and hardly win.
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


def _text(value: Any) -> str:
    value = value[0] if isinstance(value, tuple) else value
    return value if isinstance(value, str) else f"{value:g}"


def _page(tasks: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        tries = (
            f"{_text(value)}: {NONE if accuracy is None else f'{100 * accuracy:.1f}'}"
            for value, accuracy in zip(row["values"], row["accuracies"], strict=True)
        )
        chosen = _text(row["chosen"]) + (" (an end)" if row["at_the_end"] else "")
        lines.append((row["title"], row["setting"], ", ".join(tries), chosen))
    columns = ("method", "setting", "accuracy % on validation images", "chosen")
    table = Grid("", columns, tuple(lines), 2).to_markdown()
    return f"# Settings chosen on {', '.join(tasks)}\n\n{table}\n"
