"""How far CHEEM or LoRA-CL has come with a task: what a rolling checkpoint holds, and what resuming begins with."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from cheem_jax.cheem.evolution import Scored, Searched
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import FitState, SupernetFit
from cheem_jax.run.method import Clock
from cheem_jax.run.rolling import Saved

FitName = Literal["supernet", "finetune"]
"""The phases that train a network."""


@dataclasses.dataclass
class Underway:
    """Each phase resumes from what it finds here; at the end of one the next has not begun."""

    clock: Clock
    similarity: np.ndarray | None = None
    supernet: FitState = dataclasses.field(default_factory=FitState)
    searched: Searched | None = None
    finetune: FitState = dataclasses.field(default_factory=FitState)
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays of the network that was being trained, by the phase that trains it."""

    @classmethod
    def begun(cls, saved: Saved | None) -> "Underway":
        """What an earlier process left, or nothing."""
        if saved is None:
            return cls(Clock())
        arrays, meta = saved
        searched = None
        if "searched" in arrays:
            searched = Searched(meta["generations"], Scored(**arrays["searched"]))
        fits = {name: _fit_state(arrays, meta, name) for name in ("supernet", "finetune")}
        learned = {name: arrays[name] for name in fits if name in arrays}
        return cls(Clock(meta["seconds"]), arrays.get("similarity"), **fits, searched=searched, learned=learned)

    @property
    def skipped(self) -> int:
        """Steps that reached no parameter because their loss or gradient was non-finite."""
        return self.supernet.skipped + self.finetune.skipped

    def fitting(self, name: FitName, supernet: Supernet) -> SupernetFit:
        """The training of this phase, from where it was saved or from its start."""
        arrays = self.learned.pop(name, None)
        state = supernet.init() if arrays is None else supernet.from_arrays(arrays)
        return SupernetFit(supernet, state, getattr(self, name))

    def saved(self, name: FitName, fitting: SupernetFit) -> Saved:
        """Everything so far; `fitting` is what this phase trains, or what the search scores."""
        arrays: dict[str, Any] = {name: fitting.supernet.arrays(fitting.state)}
        if self.similarity is not None:
            arrays["similarity"] = self.similarity
        if self.searched is not None:
            arrays["searched"] = self.searched.scored._asdict()
        meta: dict[str, Any] = {
            "generations": 0 if self.searched is None else self.searched.generations,
            "seconds": self.clock.so_far(),
        }
        for fit, state in (("supernet", self.supernet), ("finetune", self.finetune)):
            meta[fit] = {"step": state.step, "losses": state.losses, "skipped": state.skipped}
            if state.running:
                arrays[f"{fit}_running"] = np.array(jax.device_get(state.running), np.float64)
        return Saved(arrays, meta)


def _fit_state(arrays: dict[str, Any], meta: dict[str, Any], name: str) -> FitState:
    state, running = meta[name], arrays.get(f"{name}_running", ())
    return FitState(state["step"], list(state["losses"]), [float(loss) for loss in running], state["skipped"])
