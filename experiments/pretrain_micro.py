"""Pretrain a bundled backbone on formula images.

    python experiments/pretrain_micro.py --backbone vit_micro

Classifying 480 classes of images made by formulas (`formula_images.py`) teaches a small ViT
features that transfer to digits, letters, shapes and textures, without photographs and their
licences. The classifier is dropped; weights (float16) and mean CLS tokens (float32) are written
into one converted file. An interrupted run resumes from its `--work-dir` and ends with the same
weights.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jaxtyping import Array, Float, Int32, UInt8
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from studies.pretraining.formula_images import NUM_CLASSES, formula_images

from cheem_jax.backbone.config import ViTConfig, config_of
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import Params, build, init_params, params_of
from cheem_jax.backbone.weights import Pretrained, save_converted
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.run.differences import find_differences, summary

_BICUBIC = Image.Resampling.BICUBIC
BUNDLED = Path(__file__).parents[1] / "cheem_jax" / "backbone" / "bundled"


@dataclasses.dataclass(frozen=True)
class Pretrain:
    """Formula-driven pretraining of one of the small backbones."""

    backbone: Literal["vit_micro", "vit_nano"] = "vit_micro"
    """Network to train."""
    output: Path | None = None
    """Converted file to write; default: the one inside the package."""
    work_dir: Path = Path("runs/pretrain")
    """Folder of the state for resuming, one file per backbone."""
    seed: int = 0
    """Root of all random numbers: images, initial weights, order, augmentation."""
    steps: int = 2500
    """Optimiser steps."""
    batch_size: int = 128
    """Images per step."""
    per_class: int = 125
    """Images per class."""
    learning_rate: float = 0.02
    """Peak learning rate of Muon's cosine schedule, for the matrices inside the blocks."""
    adam_learning_rate: float = 3e-3
    """Peak learning rate of AdamW, for embedding, norms, biases and classifier."""
    weight_decay: float = 0.01
    """Decoupled weight decay of both optimisers."""
    save_seconds: float = 120.0
    """Seconds between two saved states."""

    def check(self) -> None:
        """Raise ValueError for invalid numbers."""
        for name in ("steps", "batch_size", "per_class"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.batch_size > self.per_class * NUM_CLASSES:
            made = f"{self.per_class} images of each of {NUM_CLASSES} classes"
            raise ValueError(f"batch_size {self.batch_size} is more than {made}; raise --per-class")


class Learned(NamedTuple):
    """Learned parameters: the backbone's state and the classifier, which is dropped at the end."""

    vit: nnx.State
    weight: Float[Array, "D classes"]
    bias: Float[Array, "classes"]


class Trainer(NamedTuple):
    """The compiled step and the initial state."""

    step: "jax.stages.Wrapped"
    graphdef: nnx.GraphDef
    learned: Learned
    moments: optax.OptState


def make_trainer(config: Pretrain, num_classes: int = NUM_CLASSES) -> Trainer:
    """One jitted step `(learned, moments, step, images, labels) -> (learned, moments, loss,
    accuracy)`."""
    vit_config = config_of(config.backbone)
    init_key, augment_key = jax.random.split(jax.random.key(config.seed))
    graphdef, state = nnx.split(build(vit_config, wide_init(vit_config, init_key)))
    learned = Learned(state, jnp.zeros((vit_config.width, num_classes)), jnp.zeros(num_classes))
    # orthogonalised updates need about half of the steps of AdamW here
    names = jax.tree_util.tree_map_with_path(
        lambda place, leaf: (
            "muon" if "blocks" in jax.tree_util.keystr(place) and leaf.ndim == 2 else "adam"
        ),
        learned,
    )

    def rate(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, max(config.steps // 40, 1), config.steps
        )

    optimiser = optax.partition(
        {
            "muon": optax.contrib.muon(
                rate(config.learning_rate), weight_decay=config.weight_decay
            ),
            "adam": optax.adamw(
                rate(config.adam_learning_rate), b2=0.98, weight_decay=config.weight_decay
            ),
        },
        names,
    )

    def loss_fn(learned: Learned, images, labels):
        features = nnx.merge(graphdef, learned.vit)(images)
        logits = features @ learned.weight + learned.bias
        targets = optax.smooth_labels(jax.nn.one_hot(labels, num_classes), 0.1)
        return (
            optax.softmax_cross_entropy(logits, targets).mean(),
            (logits.argmax(-1) == labels).mean(),
        )

    @jax.jit
    def train_step(learned, moments, step, images, labels):
        images = augment(jax.random.fold_in(augment_key, step), images)
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(learned, images, labels)
        updates, moments = optimiser.update(grads, moments, learned)
        return optax.apply_updates(learned, updates), moments, loss, accuracy

    return Trainer(train_step, graphdef, learned, optimiser.init(learned))


def wide_init(config: ViTConfig, key: jax.Array) -> dict[str, np.ndarray]:
    """`init_params` with kernels of deviation 1/sqrt(inputs), half of it at the end of a branch,
    because 0.02 starts slowly."""
    params = init_params(config, key)
    for name, value in params.items():
        if name.endswith("kernel"):
            end = "proj" in name or "down" in name
            params[name] = value * np.float32(
                (0.5 if end else 1.0) / (0.02 * value.shape[0] ** 0.5)
            )
    return params


def augment(key: jax.Array, images: UInt8[Array, "B H W 3"]) -> Float[Array, "B H W 3"]:
    """Images in [-1, 1], shifted by at most 3 pixels, with random contrast, lightness and tint."""
    count, size = images.shape[:2]
    move_key, contrast_key, light_key = jax.random.split(key, 3)
    x = images.astype(jnp.float32) / 127.5 - 1.0
    x = jnp.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)), mode="edge")
    corners = jax.random.randint(move_key, (count, 2), 0, 7)
    x = jax.vmap(
        lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), (size, size, 3))
    )(x, corners)
    contrast = jax.random.uniform(contrast_key, (count, 1, 1, 1), minval=0.7, maxval=1.2)
    return x * contrast + 0.08 * jax.random.normal(light_key, (count, 1, 1, 3))


def batch_at(step: int, num_images: int, *, seed: int, batch_size: int) -> np.ndarray:
    """Indices of one batch: a new order per epoch, derived from the position alone."""
    epoch, place = divmod(step, num_images // batch_size)
    order = np.random.default_rng([seed, epoch]).permutation(num_images)
    return order[place * batch_size : (place + 1) * batch_size]


def save_state(file: Path, config: Pretrain, state, step: int) -> None:
    """Write the arrays of `state` in tree order, the step and the settings atomically."""
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        file, save(leaves, {"step": str(step), "settings": json.dumps(_settings(config))})
    )


def load_state(file: Path, config: Pretrain, state):
    """Read state and step; ValueError names every setting that differs."""
    with safe_open(file, framework="numpy") as saved:
        metadata = saved.metadata()
        if found := find_differences(json.loads(metadata["settings"]), _settings(config)):
            raise ValueError(
                f"{file} belongs to another run: {summary(found, 'settings')}; delete it or choose"
                " another --work-dir"
            )
        leaves = [jnp.asarray(saved.get_tensor(str(i))) for i in range(len(jax.tree.leaves(state)))]
        return jax.tree.unflatten(jax.tree.structure(state), leaves), int(metadata["step"])


def _settings(config: Pretrain) -> dict:
    """The settings that determine the weights, as JSON values."""
    settings = dataclasses.asdict(config)
    return {
        name: settings[name]
        for name in settings
        if name not in ("output", "work_dir", "save_seconds")
    }


def train(
    config: Pretrain,
    trainer: Trainer,
    images: UInt8[np.ndarray, "N H W 3"],
    labels: Int32[np.ndarray, "N"],
    *,
    until: int | None = None,
    on_save=lambda vit, step: None,
) -> nnx.Module:
    """The backbone after `config.steps` or `until` steps; resumes from the state in `work_dir`, if
    any."""
    file = config.work_dir / f"{config.backbone}.state.safetensors"
    state = (trainer.learned, trainer.moments)
    first = 0
    if file.exists():
        state, first = load_state(file, config, state)
        print(f"continuing {file} at step {first}")
    last = config.steps if until is None else min(until, config.steps)
    start = saved = time.monotonic()
    loss, accuracy = jnp.nan, jnp.nan
    for step in range(first, last):
        rows = batch_at(step, len(images), seed=config.seed, batch_size=config.batch_size)
        learned, moments, loss, accuracy = trainer.step(
            *state, np.uint32(step), images[rows], labels[rows]
        )
        state = (learned, moments)
        done = step + 1
        if done % 25 == 0 or done == last:
            loss.block_until_ready()
            seconds = time.monotonic() - start
            speed = (done - first) / seconds
            print(
                f"step {done}/{config.steps} loss {loss:.3f} accuracy {accuracy:.3f} "
                f"{speed * config.batch_size:.0f} images/s, {(last - done) / speed:.0f} s left",
                flush=True,
            )
        if time.monotonic() - saved > config.save_seconds or done == last:
            save_state(file, config, state, done)
            on_save(nnx.merge(trainer.graphdef, state[0].vit), done)
            saved = time.monotonic()
    return nnx.merge(trainer.graphdef, state[0].vit)


def digits_probe(params: Params, backbone: str) -> dict[str, float]:
    """Test accuracy of ridge classifiers on real digits, trained on 600 features or pixels; the
    best of four strengths."""
    scans, labels = load_digits(return_X_y=True)
    scans = (scans.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    digits = np.stack(
        [np.asarray(Image.fromarray(scan).resize((32, 32), _BICUBIC)) for scan in scans]
    )
    graphdef, state = nnx.split(build(config_of(backbone), params))
    images = np.repeat(digits[..., None], 3, axis=-1)
    features = jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))(state, images)
    order = np.random.default_rng(0).permutation(len(digits))
    fit, test = order[:600], order[600:1600]
    accuracies = {}
    for name, x in (
        ("features", np.asarray(features)),
        ("pixels", digits.reshape(len(digits), -1) / 255.0),
    ):
        ridges = (
            make_pipeline(StandardScaler(), RidgeClassifier(strength))
            for strength in (1, 10, 100, 1000)
        )
        accuracies[name] = max(
            ridge.fit(x[fit], labels[fit]).score(x[test], labels[test]) for ridge in ridges
        )
    return accuracies


def export(
    file: Path, config: Pretrain, vit, images: UInt8[np.ndarray, "N H W 3"], step: int
) -> None:
    """Write the converted file: float16 weights and mean CLS tokens of the network with these
    weights."""
    params = {name: value.astype(np.float16) for name, value in params_of(vit).items()}
    means = base_means(
        build(config_of(config.backbone), params), images[:: max(1, len(images) // 4800)]
    )
    source = (
        f"formula-driven pretraining, seed {config.seed}: {NUM_CLASSES} classes, "
        f"{config.per_class * NUM_CLASSES} images, {step * config.batch_size} seen in {step} steps"
    )
    sha256 = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_converted(file, Pretrained(config_of(config.backbone), params, source, sha256, means))


def main(config: Pretrain) -> None:
    config.check()
    start = time.monotonic()
    images, labels = formula_images(config.seed, config.per_class)
    print(
        f"{len(images)} images of {NUM_CLASSES} classes in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    file = config.output or BUNDLED / f"{config.backbone}.safetensors"
    vit_config = config_of(config.backbone)
    random = init_params(vit_config, jax.random.key(1))
    print("random features:", digits_probe(random, config.backbone), flush=True)

    def on_save(vit, step: int) -> None:
        print("pretrained features:", digits_probe(params_of(vit), config.backbone), flush=True)
        export(file, config, vit, images, step)

    train(config, make_trainer(config), images, labels, on_save=on_save)
    print(
        f"wrote {file} ({file.stat().st_size / 1e6:.2f} MB) after {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    run_command(main, parse(Pretrain, description=__doc__))
