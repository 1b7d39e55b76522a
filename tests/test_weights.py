import dataclasses
import functools
import hashlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import small
from timm_files import TINY, timm_tensors

from cheem_jax.backbone.config import CONFIGS, ViTConfig
from cheem_jax.backbone.params import build, get_params, shapes_of
from cheem_jax.backbone.timm_names import from_timm, infer_config
from cheem_jax.backbone.weights import (
    Pretrained,
    bicubic_matrix,
    hub_repository,
    load_pretrained,
    resample_position,
    resize,
    save_converted,
)
from cheem_jax.core import atomic


@pytest.fixture
def nano() -> Pretrained:
    config = CONFIGS["vit_nano"]
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes_of(config).items()
    }
    means = {"32/mlp_down/component": rng.standard_normal((6, 48)).astype(np.float32)}
    return Pretrained(config, params, "some.safetensors", "ab" * 32, means)


def test_timm_layout_becomes_ours():
    tensors = timm_tensors(classes=5)
    params = from_timm(tensors, infer_config(TINY, tensors, None))
    kernel = tensors["patch_embed.proj.weight"]
    row = 1
    column = 3
    channel = 2
    np.testing.assert_array_equal(
        params["patch.kernel"][(row * 4 + column) * 3 + channel], kernel[:, channel, row, column]
    )
    np.testing.assert_array_equal(
        params["blocks.1.up.kernel"], tensors["blocks.1.mlp.fc1.weight"].T
    )
    np.testing.assert_array_equal(params["blocks.0.norm2.scale"], tensors["blocks.0.norm2.weight"])
    np.testing.assert_array_equal(params["class_token"], tensors["cls_token"][0, 0])
    np.testing.assert_array_equal(params["position"], tensors["pos_embed"][0])
    np.testing.assert_array_equal(params["head.kernel"], tensors["head.weight"].T)


def test_a_config_is_read_off_the_tensors_and_the_hub_config():
    hub_config = {
        "global_pool": "token",
        "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]},
    }
    config = infer_config("vit_odd_patch4_12", timm_tensors(width=128, classes=5), hub_config)
    assert config == ViTConfig(
        "vit_odd_patch4_12",
        128,
        2,
        2,
        image_size=12,
        patch_size=4,
        mlp_ratio=3.0,
        num_classes=5,
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 2.0, 3.0),
        timm_name="vit_odd_patch4_12",
    )


def test_clip_configs_have_a_norm_before_the_blocks_and_no_use_for_the_projection():
    tensors = timm_tensors(classes=7, clip=True)
    config = infer_config("vit_tiny_patch4_clip_quickgelu_12.openai", tensors, None)
    assert config.norm_before_blocks and not config.patch_bias and config.num_classes == 0
    assert config.activation == "quick_gelu" and config.layer_norm_eps == 1e-5
    assert config.mean == CONFIGS["clip_vit_base"].mean
    params = from_timm(tensors, config)
    assert "head.kernel" not in params and "patch.bias" not in params
    np.testing.assert_array_equal(params["norm_before.scale"], tensors["norm_pre.weight"])


@pytest.mark.parametrize(
    ("extra", "shape", "shown"),
    [
        ("blocks.1.attn.q_norm.weight", (64,), r"blocks.\*.attn.q_norm.weight"),
        ("reg_token", (1, 4, 64), "pos_embed"),
        ("attn_pool.latent", (1, 1, 64), "attn_pool.latent.*; supported: plain ViTs"),
        ("fc_norm.weight", (64,), "fc_norm.weight"),
        ("rope.freqs", (3,), "rope.freqs"),
        ("blocks.0.mlp.fc2.weight", (64, 96), "gated MLP"),
        ("pos_embed", (1, 11, 64), "pos_embed .* is not a square grid"),
    ],
)
def test_other_models_than_plain_vits_are_refused_by_the_tensors_that_show_it(extra, shape, shown):
    tensors = timm_tensors() | {extra: np.zeros(shape, np.float32)}
    with pytest.raises(ValueError, match=f"not a plain timm ViT.*{shown}"):
        infer_config(TINY, tensors, None)


def scaled(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add LayerScale and registers, and remove the class token's position, as in DINOv2 with
    registers."""
    rng = np.random.default_rng(1)
    scales = {
        f"blocks.{block}.{name}.gamma": rng.standard_normal(64)
        for block in range(2)
        for name in ("ls1", "ls2")
    }
    registers = rng.standard_normal((1, 4, 64)).astype(np.float32)
    return tensors | scales | {"reg_token": registers, "pos_embed": tensors["pos_embed"][:, 1:]}


def test_layer_scale_is_folded_and_registers_follow_the_class_token():
    tensors = scaled(timm_tensors())
    config = infer_config("vit_tiny_patch4_reg4_dinov2", tensors, None)
    assert (config.num_registers, config.num_tokens, config.image_size) == (4, 14, 12)
    params = from_timm(tensors, config)
    weight, gamma = tensors["blocks.1.mlp.fc2.weight"], tensors["blocks.1.ls2.gamma"]
    np.testing.assert_allclose(params["blocks.1.down.kernel"], weight.T * gamma, rtol=1e-6)
    bias, gamma = tensors["blocks.0.attn.proj.bias"], tensors["blocks.0.ls1.gamma"]
    np.testing.assert_allclose(params["blocks.0.proj.bias"], bias * gamma, rtol=1e-6)
    assert not params["position"][:5].any() and params["registers"].shape == (4, 64)
    sized = resize(Pretrained(config, params, "", ""), 24)
    assert sized.params["position"].shape == (41, 64) and not sized.params["position"][:5].any()
    embedded = build(sized.config, sized.params).embed(jnp.zeros((1, 24, 24, 3)))
    np.testing.assert_array_equal(embedded[0, 1:5], params["registers"])


def pooled(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove the class token, and add attention pooling, as in SigLIP."""
    rng = np.random.default_rng(1)
    shapes = {
        "latent": (1, 1, 64),
        **{
            f"{layer}.weight": (rows, 64)
            for layer, rows in (("q", 64), ("kv", 128), ("proj", 64), ("mlp.fc1", 192))
        },
        **{
            f"{layer}.bias": (rows,)
            for layer, rows in (("q", 64), ("kv", 128), ("proj", 64), ("mlp.fc1", 192))
        },
        **{
            "mlp.fc2.weight": (64, 192),
            "mlp.fc2.bias": (64,),
            "norm.weight": (64,),
            "norm.bias": (64,),
        },
    }
    result = {name: value for name, value in tensors.items() if name != "cls_token"}
    result |= {
        f"attn_pool.{name}": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return result | {"pos_embed": result["pos_embed"][:, 1:]}


def test_a_model_without_class_token_pools_its_tokens():
    tensors = pooled(timm_tensors())
    name = "vit_tiny_patch4_siglip_12.webli"
    config = infer_config(name, tensors, {"global_pool": "map"})
    assert (config.pool, config.num_tokens, config.num_prefix, config.mean) == (
        "attention",
        9,
        0,
        (0.5, 0.5, 0.5),
    )
    params = from_timm(tensors, config)
    np.testing.assert_array_equal(params["pool.latent"], tensors["attn_pool.latent"][0, 0])
    np.testing.assert_array_equal(params["pool.key_value.kernel"], tensors["attn_pool.kv.weight"].T)
    assert resize(Pretrained(config, params, "", ""), 24).params["position"].shape == (36, 64)
    for wrong, shown in (
        ({"cls_token": np.zeros((1, 1, 64))}, "has cls_token"),
        ({"attn_pool.latent": None}, "lacks"),
    ):
        result = {key: value for key, value in (tensors | wrong).items() if value is not None}
        with pytest.raises(ValueError, match=f"not a plain timm ViT: {shown}"):
            infer_config(name, result, None)
    with pytest.raises(ValueError, match="pools with 'map', expected 'avg'"):
        infer_config("vit_tiny_patch4_siglip_gap_12.webli", tensors, {"global_pool": "map"})


@pytest.mark.parametrize("damage", [None, np.zeros(3), np.zeros(())])
def test_corrupted_layer_scale_is_refused(damage):
    tensors = scaled(timm_tensors()) | {"blocks.1.ls2.gamma": damage}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    config = infer_config("vit_tiny_patch4_reg4_dinov2", tensors, None)
    with pytest.raises(ValueError, match=r"(missing|misshapen): blocks\.1\.ls2\.gamma"):
        from_timm(tensors, config)


@pytest.mark.parametrize(
    "name",
    [
        "vit_7b_patch16_dinov3.lvd1689m",
        "vit_base_patch16_gap_224",
        "swin_tiny_patch4_window7_224",
        "resnet50",
    ],
)
def test_other_architectures_are_refused_by_name_before_any_download(name, hub):
    with pytest.raises(ValueError, match="supported: plain ViTs: ViT, DeiT"):
        load_pretrained(name)
    assert not hub


def test_a_pool_in_the_hubs_config_is_refused_before_the_weights_are_downloaded(hub):
    with pytest.raises(
        ValueError, match="pools with 'avg', expected 'token'; supported: plain ViTs"
    ):
        load_pretrained("vit_tiny_patch4_12.pooled")
    assert hub and not any("safetensors" in request for request in hub)


def test_unknown_preprocessing_is_asked_for_and_never_guessed():
    with pytest.raises(
        ValueError, match=r"mean and std .* unknown; put the model's config.json .* next to"
    ):
        infer_config("vit_tiny_patch4_12.mystery", timm_tensors(), None)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_local_files_under_timms_names_are_read_in_float32_with_their_hash(tmp_path, suffix):
    file = tmp_path / f"model.{suffix}"
    tensors = {name: value.astype(np.float16) for name, value in timm_tensors().items()}
    if suffix == "npz":
        np.savez(file, allow_pickle=False, **tensors)
    else:
        safetensors.numpy.save_file(tensors, file)
    pretrained = load_pretrained(TINY, weights=file)
    assert pretrained.source == file.name
    assert pretrained.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert {value.dtype for value in pretrained.params.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        pretrained.params["norm.bias"], tensors["norm.bias"].astype(np.float32)
    )


def test_the_config_next_to_local_weights_brings_the_preprocessing(tmp_path, monkeypatch):
    safetensors.numpy.save_file(timm_tensors(), tmp_path / "model.safetensors")
    config = {"pretrained_cfg": {"mean": [0, 0, 0], "std": [2, 2, 2]}, "author": "Zoë"}
    text = json.dumps(config, ensure_ascii=False)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    small.assume_ascii(monkeypatch)  # the encoding of the locale does not matter
    pretrained = load_pretrained(
        "vit_tiny_patch4_12.mystery", weights=tmp_path / "model.safetensors"
    )
    assert pretrained.config.std == (2.0, 2.0, 2.0)


def test_weights_of_another_architecture_are_refused_in_one_message_under_timms_names(tmp_path):
    file = tmp_path / "other.safetensors"
    safetensors.numpy.save_file(
        timm_tensors() | {"dist_token": np.zeros((1, 1, 64), np.float32)}, file
    )
    with pytest.raises(ValueError) as error:
        load_pretrained("deit_tiny", weights=file)
    message = str(error.value)
    assert "other.safetensors" in message
    assert "\n" not in message
    assert "supported: plain ViTs: ViT, DeiT" in message
    assert "missing: blocks.*.attn.proj.bias (of 10 blocks)" in message
    assert "unexpected: dist_token;" in message
    assert "misshapen: cls_token is (1, 1, 64), expected (1, 1, 192), " in message
    assert " and 14 more" in message


def test_a_converted_file_restores_everything_that_was_saved(tmp_path, nano):
    file = tmp_path / "nano.safetensors"
    save_converted(file, nano)
    loaded = load_pretrained("vit_nano", weights=file)
    assert (loaded.config, loaded.source, loaded.sha256) == (nano.config, nano.source, nano.sha256)
    for saved, read in ((nano.params, loaded.params), (nano.base_means, loaded.base_means)):
        assert saved.keys() == read.keys()
        for name, value in saved.items():
            np.testing.assert_array_equal(read[name], value)
    assert [path.name for path in tmp_path.iterdir()] == ["nano.safetensors"]


def test_half_precision_params_are_stored_as_they_are_and_loaded_in_float32(tmp_path, nano):
    halves = {name: value.astype(np.float16) for name, value in nano.params.items()}
    save_converted(tmp_path / "whole.safetensors", nano)
    save_converted(tmp_path / "half.safetensors", dataclasses.replace(nano, params=halves))
    loaded = load_pretrained("vit_nano", weights=tmp_path / "half.safetensors")
    np.testing.assert_array_equal(loaded.params["position"], halves["position"].astype(np.float32))
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.55 * sizes[1]


def test_converted_weights_of_a_named_backbone_keep_their_pixel_scale(tmp_path, nano):
    unit = dataclasses.replace(nano.config, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    save_converted(tmp_path / "unit.safetensors", dataclasses.replace(nano, config=unit))
    assert load_pretrained("vit_nano", weights=tmp_path / "unit.safetensors").config == unit


def test_base_means_keep_their_size_when_the_network_changes_its_own(tmp_path, nano):
    save_converted(tmp_path / "nano.safetensors", nano)
    loaded = load_pretrained("vit_nano", weights=tmp_path / "nano.safetensors", image_size=48)
    assert loaded.config.image_size == 48
    assert loaded.params["position"].shape == (37, 48)
    assert list(loaded.base_means) == ["32/mlp_down/component"]


def test_a_converted_file_of_another_backbone_is_refused(tmp_path, nano):
    converted = dataclasses.replace(CONFIGS["vit_base"], name="x")
    save_converted(tmp_path / "nano.safetensors", nano)
    with pytest.raises(ValueError, match="misshapen.*class_token is .48,., expected .96,."):
        load_pretrained("vit_micro", weights=tmp_path / "nano.safetensors")
    other_mean = dataclasses.replace(
        nano, config=dataclasses.replace(nano.config, mean=converted.std, name="vit_n")
    )
    save_converted(tmp_path / "other.safetensors", other_mean)
    with pytest.raises(ValueError, match="converted for backbone 'vit_n'.* not for 'vit_nano'"):
        load_pretrained("vit_nano", weights=tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ({"format": "cheem_jax.vit.1", "config": "{}"}, r"lacks \['sha256', 'source'\]"),
        (
            {"format": "cheem_jax.vit.9", "config": "{}", "source": "", "sha256": ""},
            "format 'cheem_jax.vit.9'",
        ),
        (
            {"format": "cheem_jax.vit.1", "config": "{", "source": "", "sha256": ""},
            "config .*is invalid",
        ),
        (
            {"format": "cheem_jax.vit.1", "config": '{"a": 1}', "source": "", "sha256": ""},
            "config .*is invalid",
        ),
    ],
)
def test_a_converted_file_with_a_broken_header_is_refused(tmp_path, nano, metadata, shown):
    safetensors.numpy.save_file(nano.params, tmp_path / "nano.safetensors", metadata)
    with pytest.raises(ValueError, match=f"nano.safetensors: .*{shown}"):
        load_pretrained("vit_nano", weights=tmp_path / "nano.safetensors")


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_broken_files_are_named(tmp_path, nano, suffix, damage):
    file = tmp_path / f"broken.{suffix}"
    save_converted(tmp_path / "whole", nano)
    np.savez(tmp_path / "whole.npz", **nano.params)
    whole = (tmp_path / ("whole" if suffix == "safetensors" else "whole.npz")).read_bytes()
    file.write_bytes(
        {"truncated": whole[: len(whole) // 2], "garbage": b"\x01garbage" * 99, "empty": b""}[
            damage
        ]
    )
    with pytest.raises(ValueError, match=rf"broken.{suffix} is not a readable {suffix} file"):
        load_pretrained("vit_nano", weights=file)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "model.pth").write_bytes(b"")
    with pytest.raises(ValueError, match="expected a .safetensors or .npz file"):
        load_pretrained("deit_tiny", weights=tmp_path / "model.pth")
    np.savez(tmp_path / "model.npz", cls_token=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="model.npz is not a readable npz file"):
        load_pretrained("deit_tiny", weights=tmp_path / "model.npz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.safetensors. does not exist"):
        load_pretrained("deit_tiny", weights=tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("deit_tinny", "most similar: .*deit_tiny"),
        ("vit_micr", "most similar: .*vit_micro"),
        ("resnet50", "expected one of .*deit_tiny.*vit_nano"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest_or_with_all(name, hint):
    with pytest.raises(ValueError, match=f"unknown backbone '{name}'; {hint}.*or a timm name"):
        load_pretrained(name)


@pytest.mark.parametrize("name", ["vit_micro", "vit_nano"])
def test_the_package_contains_bundled_weights_and_their_base_means(name):
    pretrained = load_pretrained(name)
    assert pretrained.config == CONFIGS[name] and pretrained.source == "bundled"
    assert all(np.isfinite(value).all() for value in pretrained.params.values())
    shapes = {key: value.shape for key, value in pretrained.base_means.items()}
    expected = (CONFIGS[name].depth, CONFIGS[name].width)
    keys = [
        f"32/{placement}/{token}"
        for placement in ("mlp_down", "attn_proj")
        for token in ("component", "block")
    ]
    assert shapes == dict.fromkeys(keys, expected)


def test_resampling_keeps_the_class_token_and_constant_and_linear_grids():
    position = np.ones((10, 2), np.float32)
    position[0] = 7
    resampled = resample_position(position, 25)
    np.testing.assert_array_equal(resampled[0], [7, 7])
    np.testing.assert_allclose(resampled[1:], 1, rtol=1e-6)
    # Keys' kernel reproduces straight lines away from the edges
    middle = bicubic_matrix(14, 28)[8:20] @ (np.arange(14) + 0.5)
    np.testing.assert_allclose(middle, (np.arange(8, 20) + 0.5) / 2, rtol=1e-12)


def test_shrinking_by_three_weighs_nine_samples_by_the_widened_kernel():
    # Keys' kernel with a = -1/2 at 0, 1/3, 2/3, 1, 4/3 is 1, 7/9, 1/3, 0, -2/27
    expected = np.array([-2, 0, 9, 21, 27, 21, 9, 0, -2]) / 83
    np.testing.assert_allclose(bicubic_matrix(9, 3)[1], expected, rtol=0, atol=1e-12)


def test_quickgelu_names_share_the_hubs_plain_repository():
    name = CONFIGS["clip_vit_base"].timm_name
    assert name is not None
    assert hub_repository(name) == "timm/vit_base_patch16_clip_224.openai"


class _Hub(http.server.BaseHTTPRequestHandler):
    """The two answers of the hub that a download needs: a file with its commit and etag, or no
    repository."""

    def __init__(self, files: dict[str, bytes], asked: list[str], *args):
        self.files, self.asked = files, asked
        super().__init__(*args)

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        body = self.files.get(self.path, b"")
        self.send_response(200 if body else 404)
        if body:
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache and a hub on this machine with one small model; yields the requests to it."""
    import huggingface_hub.constants as constants

    config = {
        "global_pool": "token",
        "pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
    }
    prefix = "/timm/vit_tiny_patch4_12.ours/resolve/main"
    files = {
        f"{prefix}/model.safetensors": safetensors.numpy.save(timm_tensors()),
        f"{prefix}/config.json": json.dumps(config).encode(),
        "/timm/vit_tiny_patch4_12.pooled/resolve/main/config.json": b'{"global_pool": "avg"}',
    }
    asked: list[str] = []
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Hub, files, asked)
    ) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield asked
        server.shutdown()
        thread.join()


def test_weights_and_preprocessing_are_downloaded_once_from_the_hub(hub):
    pretrained = load_pretrained("vit_tiny_patch4_12.ours")
    assert pretrained.source == "hub:timm/vit_tiny_patch4_12.ours"
    assert pretrained.config.std == (0.25, 0.25, 0.25)
    np.testing.assert_array_equal(
        pretrained.params["class_token"], timm_tensors()["cls_token"][0, 0]
    )
    assert hub
    hub.clear()
    again = load_pretrained("timm/vit_tiny_patch4_12.ours", image_size=24)
    assert not hub, "the cache was not used"
    assert again.config.name == "vit_tiny_patch4_12.ours" and again.sha256 == pretrained.sha256
    assert again.params["position"].shape == (37, 64)


def test_a_model_that_the_hub_does_not_hold_is_named(hub):
    with pytest.raises(
        FileNotFoundError,
        match="hub does not have the model 'timm/vit_tiny_patch4_12.theirs'; check the name",
    ):
        load_pretrained("vit_tiny_patch4_12.theirs")


def test_without_network_the_error_says_how_to_continue(hub, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(
        constants, "ENDPOINT", "http://127.0.0.1:9"
    )  # the discard port: nobody answers
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(FileNotFoundError) as error:
        load_pretrained("deit_tiny")
    message = str(error.value)
    assert message.startswith("cannot download 'timm/deit_tiny_patch16_224.fb_in1k'")
    assert "\n" not in message
    assert "--weights FILE" in message
    assert "https://huggingface.co/timm/deit_tiny_patch16_224.fb_in1k" in message


def test_an_interrupted_save_leaves_the_old_file(tmp_path, nano, monkeypatch):
    file = tmp_path / "nano.safetensors"
    save_converted(file, nano)
    before = file.read_bytes()

    def no_space(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(atomic.os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        save_converted(file, dataclasses.replace(nano, source="another"))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["nano.safetensors"]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("patch_embed.proj.weight", (0, 3, 4, 4), "has 3 channels and the width 0"),
        (
            "patch_embed.proj.weight",
            (64, 3, 0, 0),
            "patch_size is 0, expected an integer in 1..65536",
        ),
        ("head.weight", (), r"head\.weight \(\) is not a matrix"),
        (
            "blocks.99999999999.norm1.weight",
            (64,),
            r"unexpected: blocks\.99999999999\.norm1\.weight",
        ),
    ],
)
def test_odd_shapes_and_block_numbers_are_refused_and_not_computed_with(
    tmp_path, name, shape, message
):
    file = tmp_path / "model.safetensors"
    tensors = timm_tensors() | {name: np.zeros(shape, np.float32)}
    safetensors.numpy.save_file(tensors, file)
    backbone = "vit_huge_patch4_12.dino" if name.startswith("patch") else TINY
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        load_pretrained(backbone, weights=file)


@pytest.mark.parametrize(
    "value", ["text", 1j, np.float32("nan"), np.float16("inf"), np.float64(1e39)]
)
def test_non_finite_tensors_are_refused(tmp_path, value):
    np.savez(
        tmp_path / "model.npz",
        allow_pickle=False,
        **timm_tensors() | {"cls_token": np.array([[[value]]])},
    )
    message = (
        "contain values that are non-finite"
        if isinstance(value, np.floating)
        else "are .*, expected float32"
    )
    with pytest.raises(ValueError, match=rf"model\.npz: \['cls_token'\] {message}"):
        load_pretrained(TINY, weights=tmp_path / "model.npz")


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.float16, np.float64], ids=lambda dtype: np.dtype(dtype).name
)
def test_weights_of_other_real_types_are_the_same_numbers_in_float32(tmp_path, dtype):
    tensors = {name: value.astype(dtype) for name, value in timm_tensors().items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    result = load_pretrained(TINY, weights=tmp_path / "model.safetensors").params
    wanted = from_timm(
        {name: value.astype(np.float32) for name, value in tensors.items()},
        infer_config(TINY, tensors, None),
    )
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        assert result[name].dtype == np.float32
        np.testing.assert_array_equal(result[name], value)


@pytest.mark.parametrize(
    ("change", "classes"),
    [
        (lambda tensors: tensors, 1000),
        (
            lambda tensors: (
                tensors | {"head.weight": np.ones((10, 192), "f"), "head.bias": np.ones(10, "f")}
            ),
            10,
        ),
        (
            lambda tensors: {
                name: value for name, value in tensors.items() if not name.startswith("head")
            },
            0,
        ),
        (lambda tensors: tensors | {"head.bias": np.ones(3, "f")}, 0),
        (lambda tensors: tensors | {"mask_token": np.ones((1, 192), "f")}, 1000),
        (lambda tensors: {f"module.{name}": value for name, value in tensors.items()}, 1000),
        (
            lambda tensors: {
                f"a.b.{name}": value
                for name, value in {**tensors, "mask_token": np.ones(1)}.items()
            },
            1000,
        ),
    ],
    ids=["as it is", "ten classes", "no head", "torn head", "mask token", "prefix", "two prefixes"],
)
def test_tensors_that_no_answer_depends_on_need_not_fit(tmp_path, change, classes):
    tensors = timm_tensors(width=192, depth=12, patch=16, grid=14, classes=1000, ratio=4)
    safetensors.numpy.save_file(change(tensors), tmp_path / "model.safetensors")
    result = load_pretrained("deit_tiny", weights=tmp_path / "model.safetensors")
    wanted = from_timm(tensors, CONFIGS["deit_tiny"])
    assert result.config == dataclasses.replace(CONFIGS["deit_tiny"], num_classes=classes)
    for name in wanted.keys() - {"head.kernel", "head.bias"}:
        np.testing.assert_array_equal(result.params[name], wanted[name])
    save_converted(tmp_path / "ours.safetensors", result)
    again = load_pretrained("deit_tiny", weights=tmp_path / "ours.safetensors")
    assert again.config == result.config and again.params.keys() == result.params.keys()


def test_a_mismatch_is_reported_in_a_few_words_for_any_contents_of_the_file(tmp_path):
    names = [
        f"vit.encoder.layer.{block}.part{part}.weight" for block in range(12) for part in range(30)
    ]
    safetensors.numpy.save_file(
        {name: np.ones(1, np.float32) for name in names}, tmp_path / "model.safetensors"
    )
    for backbone in ("deit_tiny", TINY):
        with pytest.raises(ValueError, match=r"and \d+ more") as error:
            load_pretrained(backbone, weights=tmp_path / "model.safetensors")
        assert len(str(error.value)) < 900


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            '{"pretrained_cfg": 3}',
            "pretrained_cfg in the config.json of .* is 3, expected an object",
        ),
        ('{"pretrained_cfg": {"mean": [0, 0], "std": [1, 1, 1]}}', "are not three numbers each"),
        (
            '{"pretrained_cfg": {"mean": [[], 0, 0], "std": [1, 1, 1]}}',
            "are not three numbers each",
        ),
        (
            '{"pretrained_cfg": {"mean": [0, 0, 1' + "0" * 400 + '], "std": [1, 1, 1]}}',
            "are not three numbers each",
        ),
        (
            '{"pretrained_cfg": {"mean": [0, 0, NaN], "std": [1, 1, 1]}}',
            "expected three finite numbers",
        ),
        (
            '{"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 0, 1]}}',
            "expected three finite numbers, all positive",
        ),
        ("[" * 100_000, "config.json is not readable JSON"),
    ],
)
def test_a_config_next_to_the_weights_that_makes_no_sense_is_reported(tmp_path, config, message):
    safetensors.numpy.save_file(timm_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        load_pretrained("vit_tiny_patch4_12.mystery", weights=tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": "48"}, "width is '48', expected an integer in 1..65536"),
        ({"depth": 10**9}, "depth is 1000000000, expected an integer in 1..1000"),
        ({"image_size": -8}, "image_size is -8"),
        ({"num_heads": 5}, "num_heads does not divide the width"),
        (
            {"num_heads": 8, "rotary": 100.0},
            "rotary positions need a head width that is a multiple of 4, got 6",
        ),
        ({"rotary": 0.0}, "rotary is 0.0, expected a number in 0..1000000000.0"),
        ({"gated": 1}, "patch_bias and gated must be true or false"),
        ({"mean": ["../x"] * 3}, "expected three finite numbers"),
        ({"activation": "os.system"}, "activation is 'os.system', expected one of"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio is inf"),
    ],
)
def test_a_converted_files_config_is_checked_value_by_value(tmp_path, nano, changed, message):
    file = tmp_path / "own.safetensors"
    save_converted(file, nano)
    with safetensors.safe_open(file, "numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        metadata = opened.metadata()
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), **changed})
    safetensors.numpy.save_file(tensors, file, metadata)
    with pytest.raises(
        ValueError,
        match=rf"own\.safetensors: the config of the converted file is invalid \(.*{message}",
    ):
        load_pretrained("vit_nano", weights=file)


def test_base_means_of_another_shape_are_refused(tmp_path, nano):
    base_means = {"32/mlp_down/block": np.zeros((2, 48), np.float32)}
    save_converted(tmp_path / "own.safetensors", dataclasses.replace(nano, base_means=base_means))
    message = r"own\.safetensors: base means \['32/mlp_down/block'\] are not float32 \(6, 48\)"
    with pytest.raises(ValueError, match=message):
        load_pretrained("vit_nano", weights=tmp_path / "own.safetensors")


def test_a_network_on_a_cpu_shares_the_loaded_weights_and_copies_the_values_that_could_change(
    tmp_path, nano
):
    file = tmp_path / "random.safetensors"
    save_converted(file, nano)
    loaded = load_pretrained("vit_nano", weights=file)
    vit = build(loaded.config, loaded.params)
    changeable = {k: np.array(v) for k, v in loaded.params.items()}
    copied = build(loaded.config, changeable)
    for name, values in get_params(vit).items():
        assert np.shares_memory(values, loaded.params[name])
        assert not loaded.params[name].flags.writeable
        assert not np.shares_memory(get_params(copied)[name], changeable[name])


PEAK = """
import re, sys
from pathlib import Path
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import load_pretrained
def peak():  # unlike ru_maxrss without the memory of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
build((small := load_pretrained("vit_nano")).config, small.params)
before = peak()
build((large := load_pretrained("vit_large_patch14_224.random", weights=sys.argv[1])).config, large.params)
print(peak() - before)
"""  # noqa: E501


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux tells a process's peak of memory"
)
def test_a_network_is_loaded_in_little_more_memory_than_its_weights_take(tmp_path):
    config = ViTConfig("vit_large_patch14_224.random", 1024, 4, 16, patch_size=14, num_classes=0)
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(config).items()}
    save_converted(tmp_path / "large.safetensors", Pretrained(config, params, "random", "ab" * 32))
    result = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "large.safetensors"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < 1.4 * sum(values.nbytes for values in params.values())
