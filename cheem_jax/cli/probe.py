"""What `cheem doctor` has a process of its own do, since it may crash or hang: JAX, its devices, a small network."""

import json
import time
from typing import Any


def probe(ask_the_hub: bool) -> None:
    """One line of JSON for each thing that works, and a last one for the first that does not."""
    try:
        _try_in_turn(ask_the_hub)
    except Exception as error:  # a broken installation raises anything
        _tell("failed", reason=f"{type(error).__name__}: {' '.join(str(error).split()):.300}")


def _try_in_turn(ask_the_hub: bool) -> None:
    # all imports stand where they are tried
    from cheem_jax.data.cache import default_directory
    from cheem_jax.data.sources import images_dir

    _tell("caches", **{"decoded pictures": str(default_directory()), "decoded benchmarks": str(images_dir(None))})

    start = time.perf_counter()
    import jax

    devices = jax.devices()
    device, seconds = devices[0], time.perf_counter() - start
    _tell("devices", platform=device.platform, kind=device.device_kind, count=len(devices), seconds=seconds)

    from cheem_jax.engine.compilation import compilations, keep_programs

    try:
        _tell("programs", place=str(keep_programs() or ""))
    except ValueError as error:
        _tell("programs", reason=str(error))

    import numpy as np

    start = time.perf_counter()
    if (total := float(jax.jit(lambda x: (x @ x).sum())(np.ones((8, 8), np.float32)))) != 512:
        raise ArithmeticError(f"8x8 ones times themselves sum to {total}, expected 512")
    _tell("jit", seconds=time.perf_counter() - start)

    from cheem_jax.backbone.config import BUNDLED, CONFIGS
    from cheem_jax.backbone.means import base_means
    from cheem_jax.backbone.params import build
    from cheem_jax.backbone.weights import load_pretrained

    start, before = time.perf_counter(), compilations()
    pretrained = load_pretrained("vit_micro")
    size = pretrained.config.image_size
    means = base_means(build(pretrained.config, pretrained.params), np.zeros((1, size, size, 3), np.uint8))
    if not all(np.isfinite(mean).all() for mean in means.values()):
        raise ArithmeticError("vit_micro answers a blank image with non-finite numbers")
    count = compilations().since(before)
    seconds = time.perf_counter() - start
    _tell("vit_micro", seconds=seconds, compiled=count.programs, read_from_cache=count.cached)

    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    from cheem_jax.backbone.hub import repository_of

    states = {name: "bundled" for name in BUNDLED}
    repositories = {name: repository_of(config.timm_name) for name, config in CONFIGS.items() if config.timm_name}
    for name, repository in repositories.items():
        kept = isinstance(try_to_load_from_cache(repository, "model.safetensors"), str)
        states[name] = "in the hub's cache" if kept else "not here: needs the network or --weights FILE"
    _tell("backbones", place=constants.HF_HUB_CACHE, **states)

    if ask_the_hub:
        try:
            get_hf_file_metadata(hf_hub_url(repositories["deit_tiny"], "model.safetensors"), timeout=10)
            _tell("hub", answers=True)
        except Exception as error:  # the client's error classes differ between its releases
            _tell("hub", answers=False, reason=f"{type(error).__name__}: {' '.join(str(error).split()):.300}")


def _tell(step: str, **found: Any) -> None:
    print(json.dumps({"step": step, **found}), flush=True)
