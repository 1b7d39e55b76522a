"""Jobs of tests with several devices and processes, each in a separate interpreter.

    python tests/spmd.py TASK OUT JSON-SETTINGS

The number of a CPU's devices (JAX_NUM_CPU_DEVICES) and the job are fixed before JAX computes.
"""

import atexit
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 50
BATCH = 10
NUM = 50
"""BATCH is not a multiple of 4 or 8 devices, so that every batch is padded."""


@functools.cache
def _programs() -> str:
    """Folder of the compiled functions that all these processes share."""
    folder = tempfile.mkdtemp(prefix="cheem-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def start(task: str, out: Path, *, devices: int, **settings: Any) -> subprocess.Popen[str]:
    """Start a process with this number of CPU devices; it writes JSON to `out`."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": _programs(),
        # with a limit, JAX locks the folder: these processes compile the same at the same time
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.Popen(
        [sys.executable, __file__, task, str(out), json.dumps(settings)],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def start_job(
    task: str, folder: Path, *, processes: int = 2, devices: int = 2, **settings: Any
) -> list:
    """Start all processes of one job over loopback; `each` contains the settings that differ by
    process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    each = settings.pop("each", [{}] * processes)
    hosts = {"coordinator": f"127.0.0.1:{port}", "num_processes": processes}
    return [
        start(
            task,
            folder / f"{number}.json",
            hosts={**hosts, "process_id": number},
            **{"devices": devices, **settings, **each[number]},
        )
        for number in range(processes)
    ]


def finish(processes: list, seconds: float = 500) -> list[tuple[int, str]]:
    """Wait for the processes, and return exit status and output of each."""
    result = []
    try:
        for process in processes:
            said, _ = process.communicate(timeout=seconds)
            result.append((process.returncode, said))
        return result
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# ---- functions that run there


def devices(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, search and predict on one device and on several layouts of all devices, with every
    executor."""
    import jax
    import small

    from cheem_jax.backbone.params import build
    from cheem_jax.engine.layout import ONE, Layout

    layouts = {"one": ONE, "all": Layout(jax.devices())}
    vit = build(small.CONFIG, small.pretrained().params)
    return {
        executor: {name: _work(executor, vit, layouts[name]) for name in settings["layouts"]}
        for executor in settings["executors"]
    }


def _work(name: str, vit, layout) -> dict[str, Any]:
    import jax
    import numpy as np

    from cheem_jax.cheem.hee import uniform_table
    from cheem_jax.cheem.supernet import OpSettings, Supernet
    from cheem_jax.cheem.training import (
        FitConfig,
        SupernetFit,
        constant_draws,
        fit,
        head_losses,
        supernet_draws,
        supernet_score,
    )
    from cheem_jax.core.pool import Head, dense_expert, dense_experts, pool_sizes
    from cheem_jax.engine.choice import EngineConfig, make_executor
    from cheem_jax.engine.executor import Dense
    from cheem_jax.engine.feed import Budget, cache_tokens, feed_images
    from cheem_jax.engine.passes import classes_and_features, token_means

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(0, 3, NUM).astype(np.int32)
    executor = make_executor(
        vit,
        "mlp_down",
        EngineConfig(name, steps_per_call=5),
        batch_size=BATCH,
        layout=layout,  # pyright: ignore
    )
    network = Supernet(jax.random.key(1), dense_experts(executor.base_pool), 3, OpSettings(rank=2))
    table = uniform_table(pool_sizes(executor.base_pool))
    draws = supernet_draws(
        jax.random.key(2), jax.random.key(3), exploit=table, uniform=table, epsilon=0.3
    )
    samples = np.concatenate([draws(epoch, NUM // BATCH) for epoch in range(STEPS * BATCH // NUM)])
    # `whole` compiles every signature again, so it repeats one
    followed = constant_draws(samples[0]) if name == "whole" else draws
    losses: list[float] = []
    train = executor.train

    def noted(*arguments, **named):
        result = train(*arguments, **named)
        losses.extend(float(loss) for loss in result.losses)
        return result

    executor.train = noted  # pyright: ignore[reportAttributeAccessIssue]
    quiet = lambda num_images, note="", /: None  # noqa: E731
    budget = Budget(2**30)
    plain = feed_images(executor, images, budget)
    feed = cache_tokens("images", executor, plain, NUM, (), batch_size=BATCH, budget=budget)
    state = fit(
        executor,
        SupernetFit(network, network.init()),
        feed,
        labels,
        draws=followed,
        config=FitConfig(epochs=STEPS * BATCH // NUM),
        batch_size=BATCH,
        order_key=jax.random.key(4),
        advance=quiet,
    ).state
    genomes = np.unique(samples, axis=0)[: 3 if name == "whole" else 12]
    score = supernet_score(executor, network, state, feed, labels, batch_size=BATCH, advance=quiet)(
        genomes
    )
    head = Head(state.head.params.weight[:, :3], state.head.params.bias[:3])
    untrained = head_losses(
        executor, network, state, head, feed, labels, batch_size=BATCH, advance=quiet
    )(genomes)
    base = [Dense(0, dense_expert(block, 0)) for block in executor.base_pool]
    means = token_means(executor, [base], plain, NUM, batch_size=BATCH, advance=quiet)
    [chosen] = classes_and_features(
        executor, [base], state.head.params, plain, num=NUM, num_classes=3, batch_size=BATCH
    )
    return {
        "drawn": samples.tolist(),
        "losses": losses,
        "score": score.tolist(),
        "losses_of_candidates": untrained.values.tolist(),
        "answers": chosen.tolist(),
        "means": means.means.tolist(),
        "features": means.features.tolist(),
        "weight_bytes": sum(leaf.addressable_shards[0].data.nbytes for leaf in executor.leaves),
    }


def stream(settings: dict[str, Any]) -> dict[str, Any]:
    """Run a small stream by one method, as one process of a job or alone."""
    import dataclasses

    import small
    from rich.console import Console

    from cheem_jax.baselines.catalogue import NEED_A_ROUTER, make_preset
    from cheem_jax.cheem.config import CheemConfig, auto
    from cheem_jax.continual import RunConfig, run_stream
    from cheem_jax.engine import hosts
    from cheem_jax.engine.hosts import HostsConfig
    from cheem_jax.engine.layout import MeshConfig
    from cheem_jax.run.progress import Progress

    hosts.connect(
        HostsConfig(**settings.get("hosts", {}), timeout=settings.get("hosts_timeout", 30))
    )
    method = make_preset(settings["method"], "demo")
    if isinstance(method, CheemConfig):
        config = {
            field.name: getattr(small.QUICK, field.name)
            for field in dataclasses.fields(small.QUICK)
        }
        method = type(method)(**config)
        method = dataclasses.replace(
            method, supernet=dataclasses.replace(method.supernet, **settings.get("supernet", {}))
        )
        if settings.get("auto"):
            method = auto(method, 1000)
    elif method.name in ("dualprompt", "coda_prompt"):  # as few blocks as the network has
        layers = (
            {"general_layers": (0,), "expert_layers": (1,)}
            if method.name == "dualprompt"
            else {"layers": (0, 1)}
        )
        method = dataclasses.replace(method, **layers)
    router = small.pretrained(1) if settings["method"] in NEED_A_ROUTER else None
    progress = Progress(
        Console(file=sys.stdout if hosts.is_first() else open(os.devnull, "w"), width=200)
    )
    result = run_stream(
        small.stream(settings.get("tasks", 2)),
        small.pretrained(),
        RunConfig(method, "demo", settings.get("seed", 0), mesh=MeshConfig("all")),
        Path(settings["run_dir"]),
        progress,
        save_every=settings.get("save_every"),
        router=router,
    )
    return {"accuracy": result["accuracy"], "process": hosts.index(), "count": hosts.count()}


if __name__ == "__main__":
    from cheem_jax.cli.running import run_command

    name, out, text = sys.argv[1:]

    def main(settings: dict[str, Any]) -> None:
        result = {"devices": devices, "stream": stream}[name](settings)
        Path(out).write_text(json.dumps(result))

    run_command(main, json.loads(text), computes=False)
