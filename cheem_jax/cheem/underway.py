"""How far CHEEM or LoRA-CL has come with a task: what a rolling checkpoint holds, and what resuming begins with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cheem_jax.cheem.evolution import Scored, Searched
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import FitState, SupernetFit
from cheem_jax.run.method import Clock
from cheem_jax.run.rolling import Saved

FINALIST = "finalist_"
"""What the fine-tuning of each finalist is called, before its number."""


@dataclasses.dataclass
class Underway:
    """Each phase resumes from what it finds here; at the end of one the next has not begun."""

    clock: Clock
    similarity: np.ndarray | None = None
    searched: Searched | None = None
    fits: dict[str, FitState] = dataclasses.field(default_factory=dict)
    """How far each training is: `supernet`, `finetune`, or one per finalist."""
    finals: list[int] = dataclasses.field(default_factory=list)
    """Right answers of each finalist on validation images; -1 where its training failed."""
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays of networks that were being trained and have not gone on yet, by the name of the training."""

    @classmethod
    def begun(cls, saved: Saved | None) -> "Underway":
        """What an earlier process left, or nothing."""
        if saved is None:
            return cls(Clock())
        arrays, meta = saved
        searched = None
        if "searched" in arrays:
            searched = Searched(meta["generations"], Scored(**arrays["searched"]))
        fits = {name: _fit_state(arrays, meta["fits"][name], name) for name in meta["fits"]}
        learned = {name: arrays[name] for name in fits if name in arrays}
        return cls(Clock(meta["seconds"]), arrays.get("similarity"), searched, fits, meta["finals"], learned)

    @property
    def skipped(self) -> int:
        """Steps that reached no parameter because their loss or gradient was non-finite."""
        return sum(fit.skipped for fit in self.fits.values())

    def fitting(self, name: str, supernet: Supernet) -> SupernetFit:
        """The training of this name, from where it was saved or from its start."""
        arrays = self.learned.pop(name, None)
        state = supernet.init() if arrays is None else supernet.from_arrays(arrays)
        return SupernetFit(supernet, state, self.fits.setdefault(name, FitState()))

    def saved(self, fittings: Mapping[str, SupernetFit]) -> Saved:
        """Everything so far; `fittings` are what this phase trains, or what the search scores."""
        arrays: dict[str, Any] = self.learned | {name: one.supernet.arrays(one.state) for name, one in fittings.items()}
        if self.similarity is not None:
            arrays["similarity"] = self.similarity
        if self.searched is not None:
            arrays["searched"] = self.searched.scored._asdict()
        meta: dict[str, Any] = {
            "generations": 0 if self.searched is None else self.searched.generations,
            "seconds": self.clock.so_far(),
            "finals": self.finals,
            "fits": {
                name: {"step": fit.step, "losses": fit.losses, "skipped": fit.skipped}
                for name, fit in self.fits.items()
            },
        }  # fmt: skip
        for name, fit in self.fits.items():
            if fit.running:
                arrays[f"{name}_running"] = np.array(jax.device_get(fit.running), np.float64)
        return Saved(arrays, meta)


def _fit_state(arrays: dict[str, Any], state: dict[str, Any], name: str) -> FitState:
    running = arrays.get(f"{name}_running", ())
    return FitState(state["step"], list(state["losses"]), [float(loss) for loss in running], state["skipped"])
