"""Whole networks as one program each: a finished architecture is a static pytree, compiled once per
signature.

The signature is the tuple of op kinds, not which experts it holds: experts are arguments, so Reuse
of any expert and New share programs wherever only values differ. Good where one architecture runs
for long (fine-tuning, serving); in the supernet nearly every draw is a new signature, and the
counters show it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.ops import Reuse, Skip, learned_of, with_learned
from cheem_jax.core.settings import Placement
from cheem_jax.engine.executor import (
    Executor,
    Learners,
    Mask,
    Network,
    Setup,
    Step,
    Update,
    guard,
    ops_of,
)


class ProgramCache:
    """Compiled functions by key; the least recently used are evicted above `capacity`, or above
    `max_maps`.

    A function compiled for a CPU takes hundreds of memory maps, a large network over a thousand.
    Linux ends a process that asks for more than `vm.max_map_count` of them, so at most half of that
    is used (`max_maps` None).
    """

    def __init__(self, capacity: int, *, max_maps: int | None = None):
        self.capacity = capacity
        self.max_maps = memory_map_limit() // 2 if max_maps is None else max_maps
        self.hits = self.misses = self.evictions = 0
        self.compile_seconds = 0.0
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()  # the search has a thread per device

    def call(self, key: Hashable, function: Callable, *arguments: Any) -> Any:
        """Run the program of `key` and the arguments' shapes, compiling `function` if there is
        none."""
        leaves, structure = jax.tree.flatten(arguments)
        key = (key, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                self.hits += 1
                self._programs.move_to_end(key)
        if program is None:
            start = time.perf_counter()
            program = function.lower(*arguments).compile()
            with self._lock:
                self._programs[key] = program
                self.misses += 1
                self.compile_seconds += time.perf_counter() - start
                while len(self._programs) > self.capacity or (
                    len(self._programs) > 1 and memory_maps() > self.max_maps
                ):
                    self._programs.popitem(last=False)
                    self.evictions += 1
        return program(*arguments)


def memory_maps() -> int:
    """Memory maps that this process has now; 0 where the system does not report them."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


def memory_map_limit() -> int:
    """Memory maps that Linux allows a process; its default where the system does not report it."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:
        return 65_530


class Whole(Executor):
    """One program per signature, in a bounded cache."""

    name = "whole"

    def __init__(self, vit: ViT, placement: Placement, *, programs: int = 64, **settings: Any):
        super().__init__(vit, placement, **settings)
        self.programs = ProgramCache(programs)

    def _train_step(
        self,
        learners: Learners,
        head: Any,
        architecture: Architecture,
        step: Step,
        rate: np.float32,
        setup: Setup,
    ) -> tuple[Learners, Any, jax.Array]:
        (batch,) = step
        begin, values = self.resolve(batch.tokens)
        ops = ops_of(architecture, setup.experts, learners)
        places = list(enumerate(architecture))[begin:]
        loss, updated, head = self.programs.call(
            ("step", begin, self.layout.place, setup.update),
            self.jit(self._step_of(begin, setup.update)),
            self._frozen(begin),
            tuple(ops[begin:]),
            tuple(learners.get(place) for place in places),
            head,
            values,
            batch.labels,
            batch.weights,
            np.int32(setup.num_classes),
            rate,
        )
        changed = {
            place: learner
            for place, learner in zip(places, updated, strict=True)
            if learner is not None
        }
        return changed, head, loss

    def programs_of(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """See `Executor.programs_of`: one for all blocks together."""
        return {(begin, *skipped)}

    def counters(self) -> dict[str, Any]:
        """Hits, misses and evictions of the cache, and the seconds its misses took."""
        cache = self.programs
        return {
            "executor": self.name,
            "hits": cache.hits,
            "misses": cache.misses,
            "evictions": cache.evictions,
            "compile_seconds": cache.compile_seconds,
        }

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        def forward(frozen, experts, values, mask):
            ops = [Skip() if expert is None else Reuse(expert) for expert in experts]
            last, seen = self._composed(frozen[1], ops, values, begin, until)
            return last, self._sums(seen, mask)

        return self.programs.call(
            ("forward", begin, until, self.layout.place),
            self.jit(forward),
            self._frozen(begin),
            tuple(step.expert for step in network),
            values,
            mask,
        )

    def _frozen(self, begin: int) -> tuple:
        return self.leaves, tuple(self.blocks[begin:])

    def _step_of(self, begin: int, update: Update):
        def step(
            frozen, ops, learners: tuple[Any, ...], head, values, labels, weights, num_classes, rate
        ):
            def loss_of(learned, params):
                own = [with_learned(op, new) for op, new in zip(ops, learned, strict=True)]
                last, _ = self._composed(frozen[1], own, values, begin, self.num_blocks)
                return self.mean_loss(frozen[0], params, last, labels, weights, num_classes)

            own = tuple(learned_of(op) for op in ops)
            loss, (grads, head_grad) = jax.value_and_grad(loss_of, argnums=(0, 1))(own, head.params)
            loss = guard(loss, (grads, head_grad))
            updated = tuple(
                None if learner is None else update(learner, grad, rate, loss)
                for learner, grad in zip(learners, grads, strict=True)
            )
            return loss, updated, update(head, head_grad, rate, loss)

        return step
