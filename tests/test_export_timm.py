"""timm loads an exported task's network, strictly, and computes the same logits."""

import json
from pathlib import Path

import exporting as example
import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import Head, StoredExpert, TaskMemory, base_pool
from cheem_jax.core.routing import RouterConfig
from cheem_jax.export import Subject, export

pytestmark = pytest.mark.convert


def timm_logits(file: Path, images: np.ndarray) -> np.ndarray:
    """Load the file as its description says."""
    import safetensors
    import timm
    import torch
    from safetensors.torch import load_file

    with safetensors.safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["cheem_jax"])
    model = timm.create_model(described["timm"]["architecture"], **described["timm"]["arguments"])
    model.load_state_dict(load_file(file), strict=True)
    values = (images / 255 - np.array(described["mean"])) / np.array(described["std"])
    with torch.no_grad():
        return model.eval()(torch.tensor(values.transpose(0, 3, 1, 2), dtype=torch.float32)).numpy()


@pytest.mark.parametrize(
    ("placement", "name", "index"), [("mlp_down", "chained", 2), ("attn_proj", "early", 3)]
)
def test_timm_computes_the_logits_of_chained_and_skipped_blocks(tmp_path, placement, name, index):
    done = export(example.subject(placement), tmp_path / "task.safetensors", "timm", task=name)
    np.testing.assert_allclose(
        timm_logits(done.file, example.PICTURES), example.logits(placement, index), atol=1e-4
    )


def test_timm_builds_a_backbone_that_it_knows_by_its_name(tmp_path, shared):
    weights = shared / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    pretrained = load_pretrained("deit_tiny", weights=weights, image_size=64)
    vit = build(pretrained.config, pretrained.params)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32)

    pool = [list(block) for block in base_pool(vit.experts("mlp_down"))]
    pool[3].append(StoredExpert(Expert(normal(768, 192), normal(192)), None, 0))
    pool[5].append(StoredExpert(LowRank(normal(768, 8), normal(8, 192)), 0, 0))
    strings, experts = ["reuse:0"] * 12, [0] * 12
    strings[3], strings[5], strings[11] = "new", "adapt:0", "skip"
    experts[3:6:2], experts[11] = [1, 1], None
    task = TaskMemory(
        "birds",
        ("wren", "robin", "owl"),
        from_strings(strings),
        tuple(experts),
        Head(normal(192, 3), normal(3)),
        np.zeros((12, 192), np.float32),
        np.zeros((1, 192), np.float32),
    )
    subject = Subject(vit, "mlp_down", tuple(map(tuple, pool)), (task,), RouterConfig())
    done = export(subject, tmp_path / "birds.safetensors", "timm")
    assert done.largest_difference < 1e-4
    assert done.notes == ("blocks.11.mlp.fc2 is zero: the task skips this branch",)
    images = rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    wanted = example.plain_logits(subject, 0, images)
    np.testing.assert_allclose(timm_logits(done.file, images), wanted, atol=1e-4)
