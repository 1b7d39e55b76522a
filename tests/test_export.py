"""Exported files predict as the memory does, without the library; refusals leave nothing
half-done."""

import dataclasses
import errno
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import exporting as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import small
from safetensors.numpy import load_file

from cheem_jax.backbone.config import CONFIGS, ViTConfig
from cheem_jax.backbone.params import build, get_params, init_params, shapes_of
from cheem_jax.backbone.timm_names import from_timm
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import Head, StoredExpert, TaskMemory, base_pool
from cheem_jax.core.routing import Router, RouterConfig, centroid_distances, normalise, packed
from cheem_jax.export import Subject, export, exporting, timm_weights
from cheem_jax.export.exporting import check, random_images
from cheem_jax.export.programs import (
    memory_function,
    num_bytes,
    stablehlo,
    task_function,
    to_centroids,
)

PICTURES = example.PICTURES


@pytest.fixture(autouse=True)
def quick_compiler():
    """Compiled functions run a few times on a few pixels here: optimising them is the slow part."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# loads StableHLO files and runs them in batches of 1, 3 and 5, where this library cannot be
# imported
RUNNER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cheem_jax", "flax"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import jax, numpy as np
from pathlib import Path

pictures, found = np.load("pictures.npy"), {}
for file in sys.argv[1:]:
    call = jax.jit(jax.export.deserialize(bytearray(Path(file).read_bytes())).call)
    for num in (1, 3, 5) if "memory" in file else (5,):
        for name, value in call(pictures[:num]).items():
            found[f"{Path(file).stem} {num} {name}"] = np.asarray(value)
np.savez("found.npz", **found)
"""


def check_memory(subject: Subject, result: dict[str, np.ndarray], tasks: list[int]) -> None:
    """Check the answers to the first images, which belong to these tasks."""
    num = len(tasks)
    np.testing.assert_array_equal(result["task"], tasks)
    assert result["task"].dtype == np.int32 and result["logits"].shape == (num, 5)
    centroids = [task.centroids for task in subject.tasks]
    wanted = centroid_distances(example.FEATURES[:num], centroids)
    np.testing.assert_allclose(result["distance"], wanted, atol=1e-5)
    for row, task in enumerate(tasks):
        logits = example.logits(subject.placement, task)[row] if task >= 0 else np.zeros(0)
        np.testing.assert_allclose(result["logits"][row, : len(logits)], logits, atol=1e-4)
        assert (result["logits"][row, len(logits) :] < -1e29).all()


@pytest.mark.full
def test_stablehlo_answers_in_a_process_without_the_library(tmp_path):
    subject = example.subject("attn_proj")
    memory = export(subject, tmp_path / "memory.stablehlo", "stablehlo")
    task = export(subject, tmp_path / "chained.stablehlo", "stablehlo", task="chained")
    assert memory.largest_difference < 1e-4 and task.largest_difference < 1e-4
    assert memory.num_bytes == memory.file.stat().st_size and (memory.seconds_per_image or 0) > 0
    np.save(tmp_path / "pictures.npy", PICTURES)
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-I", "-c", RUNNER, memory.file, task.file]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as loaded:
        result = dict(loaded)
    tasks = [0, 1, 2, 3, int(result["memory 5 task"][4])]
    names = ("task", "logits", "distance")
    for num in (1, 3, 5):
        check_memory(subject, {name: result[f"memory {num} {name}"] for name in names}, tasks[:num])
    np.testing.assert_allclose(
        result["chained 5 logits"], example.logits("attn_proj", 2), atol=1e-4
    )

    description = json.loads((tmp_path / "memory.stablehlo.json").read_text())
    assert [entry["name"] for entry in description["tasks"]] == list(example.NUM_CLASSES)
    assert description["tasks"][2]["architecture"] == ["reuse:0", "reuse:0", "adapt:1", "skip"]
    assert [entry["temperature"] for entry in description["tasks"]] == [1, 1, 1, 1]
    assert description["tasks"][1]["classes"][3] == "grown 3"
    assert description["outputs"].keys() == set(names)
    # the file reveals nothing of the folders that it was made in
    assert str(Path(exporting.__file__).parents[2]).encode() not in memory.file.read_bytes()
    assert jax.config.jax_traceback_in_locations_limit != 0


@pytest.mark.parametrize(
    ("placement", "kind", "features", "is_open"),
    [
        pytest.param("mlp_down", "kmeans", "early", True, marks=pytest.mark.full),
        pytest.param("mlp_down", "lda", "early", True, marks=pytest.mark.full),
        pytest.param("attn_proj", "lda", "levels", False, marks=pytest.mark.full),
    ],
)
def test_every_router_is_part_of_the_exported_function(
    tmp_path, placement, kind, features, is_open
):
    router = RouterConfig(kind, features, num_centroids=2)
    # no distance is small enough for the last task
    subject = example.routed(placement, router, (9.0, 9.0, 9.0, -1.0) if is_open else None)
    file = export(subject, tmp_path / "memory.stablehlo", "stablehlo").file
    result = jax.device_get(
        jax.jit(jax.export.deserialize(bytearray(file.read_bytes())).call)(PICTURES)
    )
    tasks = [0, 1, 2, -1 if is_open else 3]
    np.testing.assert_array_equal(result["task"][:4], tasks)
    inputs = example.encoder(placement, features).features(PICTURES, batch_size=5)
    statistics = tuple(task.router_statistics for task in subject.tasks)
    wanted = Router(router, statistics).distances(inputs)
    np.testing.assert_allclose(result["distance"], wanted, atol=1e-4 * max(1, np.abs(wanted).max()))
    for row, task in enumerate(tasks):
        logits = example.logits(placement, task)[row] if task >= 0 else np.zeros(0)
        np.testing.assert_allclose(result["logits"][row, : len(logits)], logits, atol=1e-4)
        assert (result["logits"][row, len(logits) :] < -1e29).all()
    router_fields = json.loads((tmp_path / "memory.stablehlo.json").read_text())["router"]
    assert (router_fields["kind"], router_fields["features"]) == (kind, features)
    assert (router_fields["thresholds"] is not None) == is_open


whole_memories = pytest.mark.xfail(
    jax.__version_info__ >= (0, 11),
    raises=ValueError,
    reason="jax2onnx 0.13 gets branches inside loops of JAX 0.11 wrong",
)


@pytest.mark.full
@whole_memories
def test_onnx_contains_the_lda_router(tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    subject = example.routed("mlp_down", RouterConfig("lda", "early"))
    file = export(subject, tmp_path / "memory.onnx", "onnx").file
    session = runtime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    result = dict(zip(names, session.run(None, {"images": PICTURES}), strict=True))
    np.testing.assert_array_equal(result["task"][:4], [0, 1, 2, 3])
    features = example.encoder("mlp_down", "early").features(PICTURES, batch_size=5)
    statistics = tuple(task.router_statistics for task in subject.tasks)
    wanted = Router(subject.router, statistics).distances(features)
    np.testing.assert_allclose(result["distance"], wanted, atol=1e-4 * max(1, np.abs(wanted).max()))


@pytest.mark.full
@whole_memories
def test_onnx_answers_in_onnxruntime_and_says_which_images_belong_to_no_task(tmp_path):
    pytest.importorskip("jax2onnx")
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    # no distance is small enough for the last task
    subject = example.subject(thresholds=(0.05, 0.05, 0.05, -1.0))
    done = export(subject, tmp_path / "memory.onnx", "onnx")
    assert done.largest_difference < 1e-4 and "early" in done.notes[-1]
    session = runtime.InferenceSession(done.file)
    names = [output.name for output in session.get_outputs()]
    for num in (1, 3, 5):
        result = dict(zip(names, session.run(None, {"images": PICTURES[:num]}), strict=True))
        check_memory(subject, result, [0, 1, 2, -1, -1][:num])
    description = json.loads(session.get_modelmeta().custom_metadata_map["cheem_jax"])
    assert description["router"] == {
        **dataclasses.asdict(subject.router),
        "thresholds": [0.05, 0.05, 0.05, -1.0],
    }

    model = onnx.load(done.file)
    onnx.checker.check_model(model)
    # weights that several networks use are stored once: no branch and no loop has separate weights
    inner = [a.g for node in model.graph.node for a in node.attribute if a.HasField("g")]
    assert inner and not any(graph.initializer for graph in inner)
    contents = [
        (weight.data_type, tuple(weight.dims), weight.raw_data)
        for weight in model.graph.initializer
    ]
    assert len(set(contents)) == len(contents)
    [loop] = [node for node in model.graph.node if node.op_type == "Loop"]
    assert len(loop.input) == 2  # nothing is carried from image to image


@pytest.mark.full
def test_onnx_of_one_task_accepts_any_batch_size(tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    subject = example.subject("attn_proj")
    done = export(subject, tmp_path / "early.onnx", "onnx", task="early")
    assert done.largest_difference < 1e-4
    session = runtime.InferenceSession(done.file)
    for num in (1, 3, 5):
        (logits,) = session.run(["logits"], {"images": PICTURES[:num]})
        np.testing.assert_allclose(logits, example.logits("attn_proj", 3)[:num], atol=1e-4)


def test_the_distances_of_a_file_are_the_routers():
    subject = example.subject()
    features = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    features[4] = 0.0
    centroids = [task.centroids for task in subject.tasks]
    result = jax.jit(to_centroids(subject))(features)
    np.testing.assert_allclose(result, centroid_distances(features, centroids), atol=1e-5)


def test_the_version_of_a_package_with_another_name_than_its_module_is_known(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert exporting._version("jax") == jax.__version__
    monkeypatch.setattr(importlib.metadata, "version", unknown)  # as with onnxruntime-gpu
    assert exporting._version("jax") == jax.__version__


@pytest.mark.full
def test_weights_that_tasks_share_are_in_the_file_once():
    config = ViTConfig("wide", 128, 2, 2, image_size=8, patch_size=4, num_classes=0)
    rng = np.random.default_rng(0)
    vit = build(
        config, {name: rng.standard_normal(shape) for name, shape in shapes_of(config).items()}
    )
    first, second = base_pool(vit.experts("mlp_down"))
    new = Expert(jnp.asarray(rng.standard_normal((512, 128)), jnp.float32), jnp.zeros(128))
    pool = ((*first, StoredExpert(new, None, 0)), second)

    def subject(
        *experts: tuple[int | None, ...],
        kind: Literal["kmeans", "lda"] = "kmeans",
        rows: int = 1,
        **settings: Any,
    ) -> Subject:
        tasks = tuple(
            TaskMemory(
                f"task{i}",
                ("a", "b") if i or rows == 1 else tuple(map(str, range(rows))),
                from_strings(["reuse:0"] * 2),
                used,
                # equal numbers would be written as a single one
                Head(rng.standard_normal((128, num := 2 if i else max(2, rows))), np.ones(num)),
                np.zeros((2, 128), np.float32),
                rng.standard_normal((2 if i else rows, 128)).astype(np.float32),
                moments={"scatter": packed(np.eye(128))} if kind == "lda" else {},
            )
            for i, used in enumerate(experts)
        )
        return Subject(vit, "mlp_down", pool, tasks, RouterConfig(kind=kind), **settings)

    def size(*experts: tuple[int | None, ...], **settings: Any) -> int:
        made = subject(*experts, **settings)
        written = len(stablehlo(memory_function(made), 8).content)
        assert 0 <= written - num_bytes(made, None) < 100_000
        return written

    one_expert = new.weight.nbytes
    alone, together = size((0, 0)), size((1, 0), (1, None), (1, 0), (None, 0))
    assert one_expert < together - alone < 1.5 * one_expert
    for kind in ("kmeans", "lda"):
        for thresholds in (None, (1.0, 1.0)):
            size((1, 0), (0, 0), kind=kind, rows=500, thresholds=thresholds)
    made = subject((0, 0), rows=500)
    written = len(stablehlo(task_function(made, 0), 8).content)
    assert 0 <= written - num_bytes(made, 0) < 100_000


@pytest.mark.full
def test_a_state_dict_for_timm_contains_the_merged_expert_and_exact_zeros_where_a_branch_is_skipped(
    tmp_path,
):
    subject = example.subject()
    file = tmp_path / "chained.safetensors"
    file.write_text("an older one")
    with pytest.raises(ValueError, match="exists; choose another file, or add --overwrite"):
        export(subject, file, "timm", task="chained")
    done = export(subject, file, "timm", task="chained", overwrite=True)
    assert done.largest_difference < 1e-4 and done.seconds_per_image is None
    assert done.notes == ("blocks.3.mlp.fc2 is zero: the task skips this branch",)
    tensors = load_file(done.file)
    assert not tensors["blocks.3.mlp.fc2.weight"].any()
    assert not tensors["blocks.3.mlp.fc2.bias"].any()
    base, first, second = (stored.params for stored in subject.pool[2])
    merged = base.weight + first.down @ first.up + second.down @ second.up
    np.testing.assert_allclose(tensors["blocks.2.mlp.fc2.weight"], merged.T, atol=1e-5)
    np.testing.assert_array_equal(tensors["head.weight"], subject.tasks[2].head.weight.T)
    with safetensors.safe_open(done.file, "numpy") as opened:
        description = json.loads(opened.metadata()["cheem_jax"])
    assert description["timm"] == {
        "architecture": "vit_tiny_patch16_224",
        "arguments": {
            "num_classes": 2,
            "img_size": 8,
            "patch_size": 4,
            "embed_dim": 16,
            "depth": 4,
            "num_heads": 2,
            "mlp_ratio": 4.0,
        },
        "zeroed": ["blocks.3.mlp.fc2"],
        "merged": ["blocks.2.mlp.fc2"],
    }
    assert description["tasks"][0]["classes"] == ["chained 0", "chained 1"]
    assert description["mean"][0] == 0.485


def test_names_and_layout_of_timm_go_back_to_ours():
    nano = load_pretrained("vit_nano")
    again = from_timm(timm_weights.to_timm(nano.params, nano.config), nano.config)
    assert again.keys() == nano.params.keys()
    for name, value in nano.params.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.full
def test_a_file_that_would_answer_otherwise_is_not_written(tmp_path, monkeypatch):
    subject = example.subject()
    other = exporting._program(subject, 3)
    monkeypatch.setattr(exporting, "_program", lambda subject, index: other)
    pretended = dataclasses.replace(
        subject, tasks=(dataclasses.replace(subject.tasks[3], experts=(0, 0, 0, 0)),)
    )
    with pytest.raises(
        ValueError, match="differs from the network by .*; nothing was written: repeat"
    ):
        export(pretended, tmp_path / "early.stablehlo", "stablehlo", task="early")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_large_distances_excuse_no_wrong_logit():
    subject = example.routed("mlp_down", RouterConfig("lda", shrinkage=1e-4))
    heads = [task.head._replace(bias=task.head.bias + 0.005) for task in subject.tasks]
    wrong = [
        dataclasses.replace(task, head=head)
        for task, head in zip(subject.tasks, heads, strict=True)
    ]
    program = jax.jit(memory_function(dataclasses.replace(subject, tasks=tuple(wrong))))
    assert np.asarray(program(random_images(8, 6))["distance"]).max() > 100
    with pytest.raises(ValueError, match="differs from the network by 0.005"):
        check(subject, None, lambda images: jax.device_get(program(images)))


@pytest.mark.full
@pytest.mark.parametrize("is_open", [False, True])
def test_every_task_is_compared_although_random_images_reach_few_of_them(is_open):
    memory = example.subject()
    rng = np.random.default_rng(3)
    pictures = rng.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    features = normalise(np.asarray(jax.jit(lambda images: example.VIT(images))(pictures)))
    tasks = [
        dataclasses.replace(memory.tasks[i % 4], name=f"task {i}", centroids=features[i : i + 1])
        for i in range(8)
    ]
    subject = dataclasses.replace(
        memory, tasks=tuple(tasks), thresholds=(1.0,) * 8 if is_open else None
    )
    program = jax.jit(memory_function(subject))
    led = {int(task) for task in np.asarray(program(random_images(8, 24))["task"])}
    assert not led >= set(range(8))
    _, compared = check(subject, None, lambda images: jax.device_get(program(images)))
    assert compared == set(range(8))

    def wrong(images):
        result = jax.device_get(program(images))
        return {**result, "logits": result["logits"] + 0.05 * (result["task"] == missed)[:, None]}

    missed = min(set(range(8)) - led)
    with pytest.raises(ValueError, match="differs from the network by 0.05"):
        check(subject, None, wrong)


@pytest.mark.full
def test_a_file_without_its_description_is_not_left_behind(tmp_path):
    # names have 255 bytes at most: the temporary file's has as many, the one for the description
    # five more
    place = tmp_path / ("x" * (255 - len(f"..stablehlo.{os.getpid()}.tmp")) + ".stablehlo")
    with pytest.raises(OSError, match="File name too long.*stablehlo.json"):
        export(example.subject(), place, "stablehlo", task="plain")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_an_export_that_fails_keeps_the_earlier_file_and_its_description(tmp_path, monkeypatch):
    def full(file, content):
        if file.suffix == ".stablehlo":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write_atomically(file, content)

    monkeypatch.setattr(exporting, "write_atomically", full)
    place = tmp_path / "memory.stablehlo"
    with pytest.raises(OSError, match="No space left"):
        export(example.subject(), place, "stablehlo", task="plain")
    assert not list(tmp_path.iterdir())
    before = {place: b"the earlier network", tmp_path / "memory.stablehlo.json": b"{}"}
    for file, content in before.items():
        file.write_bytes(content)
    with pytest.raises(OSError, match="No space left"):
        export(example.subject(), place, "stablehlo", task="plain", overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_places_and_tasks_that_do_not_fit_are_refused_before_any_work(tmp_path):
    subject = example.subject()
    with pytest.raises(ValueError, match=r"'onnx' ends with '\.onnx', not '\.pb'"):
        export(subject, tmp_path / "memory.pb", "onnx")
    with pytest.raises(ValueError, match="unknown kind 'foo'; expected one of stablehlo, onnx"):
        inspect.unwrap(export)(subject, tmp_path / "memory.onnx", "foo")  # without type checks
    with pytest.raises(ValueError, match="no task 'grow'; did you mean grown"):
        export(subject, tmp_path / "grown.onnx", "onnx", task="grow")
    with pytest.raises(ValueError, match="choose one of plain, grown, chained, early"):
        export(subject, tmp_path / "memory.safetensors", "timm")
    (tmp_path / "memory.stablehlo.json").write_text("{}")
    with pytest.raises(ValueError, match=r"memory\.stablehlo\.json exists; choose another file"):
        export(subject, tmp_path / "memory.stablehlo", "stablehlo")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        export(subject, tmp_path / "folder.onnx", "onnx", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"memory.stablehlo.json", "folder.onnx"}


@pytest.mark.parametrize(
    ("kind", "package"), [("onnx", "onnxruntime"), ("stablehlo", "flatbuffers")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path, monkeypatch, kind, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package}.*pip install 'cheem_jax\[export\]'"):
        export(example.subject(), tmp_path / f"memory.{kind}", kind)


def test_a_memory_in_bfloat16_is_refused():
    nano = load_pretrained("vit_nano")
    vit = build(dataclasses.replace(nano.config, precision="bfloat16"), nano.params)
    with pytest.raises(ValueError, match="computes in bfloat16; open the memory with float32"):
        dataclasses.replace(example.subject(), vit=vit)


@pytest.mark.full
def test_a_rotary_gated_backbone_is_exported_as_a_function_and_refused_for_timm(tmp_path):
    config = dataclasses.replace(small.CONFIG, rotary=100.0, gated=True, activation="silu")
    params = init_params(config, jax.random.key(0)) | get_params(
        example.VIT
    )  # whose experts the example's pool contains
    del params["position"]
    subject = dataclasses.replace(example.subject(), vit=build(config, params))
    done = export(subject, tmp_path / "task.stablehlo", "stablehlo", task="chained")
    assert done.largest_difference < 1e-4
    with pytest.raises(
        ValueError,
        match="rotary positions, a gated MLP or no class token.*export it as stablehlo or onnx",
    ):
        export(subject, tmp_path / "task.safetensors", "timm", task="chained")


def test_a_backbone_that_timm_does_not_build_is_refused(tmp_path):
    clip = dataclasses.replace(CONFIGS["clip_vit_base"], name="own", timm_name=None)
    with pytest.raises(
        ValueError,
        match="does not support .*activation='quick_gelu'.* of backbone 'own'.*stablehlo or onnx",
    ):
        timm_weights._arguments(clip)
    arguments = timm_weights._arguments(
        dataclasses.replace(CONFIGS["clip_vit_base"], num_classes=7)
    )
    assert arguments == {"num_classes": 7, "img_size": 224}
