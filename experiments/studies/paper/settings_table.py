"""Settings of the preset `paper` next to those that the paper states."""

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study import Study

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.baselines.catalogue import make_preset
from cheem_jax.report.grid import Grid
from cheem_jax.report.table import METHODS
from studies.paper.printed import Cell, printed

STATED: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "settings.toml").read_text(encoding="utf-8")
)
"""For CHEEM, the value that the paper states for each setting (`paper`), or the `reason` of our
value. For each baseline, the reason of its settings; the paper states only Adam without weight
decay."""
NOT_STATED = "not stated"


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a dataclass by dotted name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{name}.")
        else:
            yield name, list(value) if isinstance(value, tuple) else value


def table() -> Grid:
    """Make the table: method, setting, value of the preset, statement of the paper, and reason."""
    backbones = [CONFIGS[name] for name in ("vit_base", "deit_tiny")]
    rows = [
        (
            "all",
            "backbones",
            "; ".join(f"{one.name}, patches of {one.patch_size}" for one in backbones),
            "ViT-B/16 and DeiT-Tiny/16 of timm",
            "",
        ),
        ("all", "image size", f"{backbones[0].image_size}", "224, resized, no augmentation", ""),
        ("all", "seeds", f"{len(Study(preset='paper').chosen_seeds)}", "3", ""),
        ("all", "optimizer", "Adam without weight decay", "Adam without weight decay", ""),
    ]
    for name, value in flat(make_preset("cheem", "paper")):
        stated = STATED["cheem"][name]
        text = _text(stated["paper"]) if "paper" in stated else NOT_STATED
        rows.append((METHODS["cheem"], f"`{name}`", _text(value), text, stated.get("reason", "")))
    for method, reason in STATED["baselines"].items():
        values = ", ".join(
            f"{name.removeprefix('fit.')} {_text(value)}"
            for name, value in flat(make_preset(method, "paper"))
            if name not in ("fit.non_finite", "router.shrinkage")  # those of CHEEM
        )
        rows.append((METHODS[method], "all", values, _numbers(method), reason))
    return Grid("", ("method", "setting", "here", "paper", "reason"), tuple(rows), 5)


def _numbers(method: str) -> str:
    """Return the printed numbers that depend on a method's settings, for ViT-Base on MTIL."""
    cells = {
        "GFLOPs": ("breakdown", "upper_bounds", "lite"),
        "hours per task": ("training_time",),
    }
    texts = []
    for unit, tables in cells.items():
        measure = "flops" if unit == "GFLOPs" else "hours"
        for name in tables:
            for variant in ("", "alexnet"):
                cell = Cell("mtil", "vit_base", method, measure, variant)
                if (number := printed()[name].get(cell)) is not None:
                    texts.append(f"{number.text} {unit}")
    return ", ".join(["settings not stated", *texts])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
