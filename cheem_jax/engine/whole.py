"""One compiled function per network signature, in a cache.

The signature is the tuple of op kinds. Experts are arguments, so architectures that differ only in
their experts share a function. This executor suits fine-tuning, which runs one architecture for
many steps. In a supernet, nearly every sampled architecture has a new signature; the counters
report the resulting compilations.
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
from cheem_jax.core.ops import trained_params, with_learned
from cheem_jax.core.settings import Placement
from cheem_jax.engine.executor import (
    Executor,
    Learners,
    Mask,
    Network,
    Planned,
    Setup,
    Trained,
    Update,
    guard,
    make_ops,
)


class ProgramCache:
    """Cache of compiled functions. The least recently used functions are evicted if there are more
    than `capacity` functions, or if the process has more than `max_maps` memory maps.

    A function compiled for a CPU uses hundreds of memory maps, and over a thousand for a large
    network. Linux kills a process with more than `vm.max_map_count` maps, so `max_maps` is half of
    that limit by default.
    """

    def __init__(self, capacity: int, *, max_maps: int | None = None):
        self.capacity = capacity
        self.max_maps = memory_map_limit() // 2 if max_maps is None else max_maps
        self.hits = self.misses = self.evictions = 0
        self.compile_seconds = 0.0
        self._functions: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()  # the search has a thread per device

    def call(self, key: Hashable, function: Any, *arguments: Any) -> Any:
        """Call `function`, which is compiled once for each key and each combination of argument
        shapes."""
        leaves, structure = jax.tree.flatten(arguments)
        key = (key, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        with self._lock:
            compiled = self._functions.get(key)
            if compiled is not None:
                self.hits += 1
                self._functions.move_to_end(key)
        if compiled is None:
            start = time.perf_counter()
            compiled = function.lower(*arguments).compile()
            with self._lock:
                self._functions[key] = compiled
                self.misses += 1
                self.compile_seconds += time.perf_counter() - start
                while len(self._functions) > self.capacity or (
                    len(self._functions) > 1 and memory_maps() > self.max_maps
                ):
                    self._functions.popitem(last=False)
                    self.evictions += 1
        return compiled(*arguments)


def memory_maps() -> int:
    """Return the number of memory maps of this process; 0 if unknown."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


def memory_map_limit() -> int:
    """Return the maximum number of memory maps per process; Linux's default if unknown."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:
        return 65_530


class Whole(Executor):
    """Executor with one compiled function per signature, in a bounded cache."""

    name = "whole"

    def __init__(self, vit: ViT, placement: Placement, *, programs: int = 64, **settings: Any):
        super().__init__(vit, placement, **settings)
        self.cache = ProgramCache(programs)

    def _train_call(
        self, learners: Learners, head: Any, plan: Sequence[Planned], setup: Setup
    ) -> Trained:
        ((architecture, (batch,), rate),) = plan
        begin, values = self.resolve(batch.tokens)
        places = list(enumerate(architecture))[begin:]
        loss, updated, head = self.cache.call(
            ("step", begin, self.layout.place, setup.update),
            self.jit(self._make_step(begin, setup.update)),
            self.leaves,
            self.blocks[begin:],
            make_ops(architecture, setup.experts, learners)[begin:],
            [learners.get(place) for place in places],
            head,
            values,
            batch.labels,
            batch.weights,
            np.int32(setup.num_classes),
            np.float32(rate),
        )
        pairs = zip(places, updated, strict=True)
        changed = {place: new for place, new in pairs if new is not None}
        return Trained(changed, head, [loss])

    def _make_step(self, begin: int, update: Update) -> Callable[..., Any]:
        def step(leaves, blocks, ops, learners, head, values, labels, weights, num_classes, rate):
            def compute_loss(learned, params):
                trained = [with_learned(op, new) for op, new in zip(ops, learned, strict=True)]
                last, _ = self._compose(blocks, trained, values, begin, self.num_blocks)
                return self.mean_loss(leaves, params, last, labels, weights, num_classes)

            loss, (grads, head_grad) = jax.value_and_grad(compute_loss, argnums=(0, 1))(
                [trained_params(op) for op in ops], head.params
            )
            loss = guard(loss, (grads, head_grad))
            updated = [
                None if learner is None else update(learner, grad, rate, loss)
                for learner, grad in zip(learners, grads, strict=True)
            ]
            return loss, updated, update(head, head_grad, rate, loss)

        return step

    def _forward(
        self, network: Network, begin: int, until: int, values: jax.Array, mask: Mask
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        def forward(blocks, experts, values, mask):
            return self._compose_forward(blocks, experts, values, mask, begin, until)

        return self.cache.call(
            ("forward", begin, until, self.layout.place),
            self.jit(forward),
            self.blocks[begin:],
            [step.expert for step in network],
            values,
            mask,
        )

    def function_keys(self, begin: int, skipped: Sequence[bool]) -> set[Hashable]:
        """Return a single key, because one function runs all blocks."""
        return {(begin, *skipped)}

    def counters(self) -> dict[str, Any]:
        """Return the numbers of cache hits, misses and evictions, and the total compile time in
        seconds, since the executor was made; runs of one process can share it."""
        cache = self.cache
        return {
            "executor": self.name,
            "hits": cache.hits,
            "misses": cache.misses,
            "evictions": cache.evictions,
            "compile_seconds": cache.compile_seconds,
        }
