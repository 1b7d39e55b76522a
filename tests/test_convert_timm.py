import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from commands import status_of
from flax import nnx
from PIL import Image

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.means import base_means, pooled_means
from cheem_jax.backbone.params import build, shapes_of
from cheem_jax.backbone.timm_names import from_timm, infer_config, to_timm_name
from cheem_jax.backbone.weights import (
    Pretrained,
    load_pretrained,
    resample_position,
    resize,
    save_converted,
)
from cheem_jax.cli import convert
from cheem_jax.cli import main as cli
from cheem_jax.core.ops import Reuse
from cheem_jax.data.load import load_task
from cheem_jax.export import timm_weights
from convert import timm_vit

NANO = CONFIGS["vit_nano"]
FROM_NANO = ["--output", "x.safetensors", "--backbone", "vit_nano", "--weights", "NANO"]
FROM_TIMM = [config for config in CONFIGS.values() if config.timm_name]


@pytest.fixture
def nano_file(tmp_path) -> Path:
    """A converted file of random nano weights, with means at 32 pixels."""
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes_of(NANO).items()
    }
    file = tmp_path / "nano.safetensors"
    means = {"32/mlp_down/block": np.zeros((NANO.depth, NANO.width), np.float32)}
    save_converted(file, Pretrained(NANO, params, "origin.npz", "cd" * 32, means))
    return file


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Two classes of five images for each split."""
    rng = np.random.default_rng(1)
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for index in range(5):
                pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "pictures"


@pytest.mark.full
def test_the_command_line_adds_base_means_of_the_training_images_and_keeps_the_rest(
    tmp_path, nano_file, pictures
):
    output = tmp_path / "new" / "out.safetensors"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "convert/timm_vit.py",
                "--backbone",
                "vit_nano",
                "--weights",
                nano_file,
            ),
            *("--output", output, "--base-data", pictures, "--image-size", "40"),
        ],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": "", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    before = load_pretrained("vit_nano", weights=nano_file)
    after = load_pretrained("vit_nano", weights=output)
    assert (after.config, after.source, after.sha256) == (
        before.config,
        before.source,
        before.sha256,
    )
    for name, value in before.params.items():
        np.testing.assert_array_equal(after.params[name], value)
    sized = resize(before, 40)
    expected = base_means(
        build(sized.config, sized.params), load_task(pictures, image_size=40).train.images
    )
    assert after.base_means.keys() == before.base_means.keys() | expected.keys()
    for key, value in expected.items():
        # relative to the largest mean, because sums of large terms can cancel
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(after.base_means[key], value, rtol=1e-5, atol=atol)


def test_cheem_convert_writes_the_same_file_as_the_script(tmp_path, nano_file, monkeypatch, capsys):
    arguments = ["--backbone", "vit_nano", "--weights", str(nano_file), "--output"]
    monkeypatch.setattr(
        "sys.argv", ["cheem", "convert", *arguments, str(tmp_path / "a.safetensors")]
    )
    cli.main()
    printed = capsys.readouterr().out
    assert status_of(timm_vit, [*arguments, str(tmp_path / "b.safetensors")]) == 0
    assert capsys.readouterr().out == printed.replace("a.safetensors", "b.safetensors")
    a, b = (
        load_pretrained("vit_nano", weights=tmp_path / name)
        for name in ("a.safetensors", "b.safetensors")
    )
    assert (a.config, a.source, a.sha256) == (
        b.config,
        b.source,
        b.sha256,
    )
    assert a.base_means.keys() == {*b.base_means}
    assert all(np.array_equal(value, b.params[name]) for name, value in a.params.items())
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "add --overwrite" in capsys.readouterr().err


def test_means_over_chunks_weigh_each_image_alike(nano_file):
    pretrained = load_pretrained("vit_nano", weights=nano_file)
    vit = build(pretrained.config, pretrained.params)
    images = np.random.default_rng(2).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    whole = base_means(vit, images)
    for key, mean in pooled_means(vit, iter([images[:2], images[2:]])).items():
        np.testing.assert_allclose(mean, whole[key], rtol=1e-5, atol=1e-4)


def test_an_existing_output_stays_unless_overwriting_is_asked_for(tmp_path, nano_file, capsys):
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"precious")
    arguments = ["--backbone", "vit_nano", "--weights", str(nano_file), "--output", str(output)]
    assert status_of(timm_vit, arguments) == 2
    assert (
        "out.safetensors exists; choose another --output or add --overwrite"
        in capsys.readouterr().err
    )
    assert output.read_bytes() == b"precious"
    assert status_of(timm_vit, [*arguments, "--overwrite"]) == 0
    assert load_pretrained("vit_nano", weights=output).source == "origin.npz"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "--output"),
        (["--output", "x.safetensors", "--wieghts", "y"], "--weights"),
        (["--output", "x.bin"], "must end in .safetensors, got 'x.bin'"),
        (["--output", "x.safetensors", "--backbone", "deit_tinny"], "most similar: deit_tiny"),
        (
            ["--output", "x.safetensors", "--weights", "none.npz"],
            "weights file 'none.npz' does not exist",
        ),
        (["--output", "x.safetensors", "--weights", "none.npz", "--from-timm"], "two sources"),
        (["--output", "x.safetensors", "--image-size", "96"], "give both or neither"),
        (
            ["--output", "x.safetensors", "--backbone", "vit_nano", "--from-timm"],
            "'vit_nano' is not timm's",
        ),
        ([*FROM_NANO, "--base-data", "tfds:x"], "expected tfds:NAME:SPLIT"),
        ([*FROM_NANO, "--base-data", "none"], "none: no such"),
        (
            [*FROM_NANO, "--base-data", "none", "--image-size", "33"],
            "33 is not a multiple of vit_nano's patch size 8",
        ),
        ([*FROM_NANO, "--base-data", "none", "--image-size", "0"], "image size 0 is not a mul"),
    ],
)
def test_wrong_arguments_end_in_one_line_and_status_two(
    tmp_path, nano_file, monkeypatch, capsys, arguments, shown
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert (
        status_of(timm_vit, [str(nano_file) if value == "NANO" else value for value in arguments])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert shown in error.replace(f"{tmp_path}/", "")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("extra", "module", "arguments"),
    [
        ("convert", "timm", ["--output", "x.safetensors", "--from-timm"]),
        ("datasets", "tensorflow_datasets", [*FROM_NANO, "--base-data", "tfds:imagenet_v2:test"]),
    ],
)
def test_a_missing_extra_is_named(
    tmp_path, nano_file, monkeypatch, capsys, extra, module, arguments
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert (
        status_of(timm_vit, [str(nano_file) if value == "NANO" else value for value in arguments])
        == 2
    )
    assert f"cheem_jax[{extra}]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spelled", "name", "split"),
    [
        ("tfds:imagenet_v2:test", "imagenet_v2", "test"),
        ("tfds:cmaterdb/devanagari:1.0.0:train", "cmaterdb/devanagari:1.0.0", "train"),
        ("tfds:imagenet2012:train[:1000]", "imagenet2012", "train[:1000]"),
    ],
)
def test_tfds_sources_are_spelled_name_and_split(spelled, name, split):
    assert convert.parse_tfds(spelled) == (name, split)


def _random_model(name: str, **options):
    """A timm model for inference in which no parameter keeps a value that could hide a mistake."""
    import timm
    import torch

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **options).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(
                1.0 if "norm" in key and key.endswith("weight") else 0.0,
                0.1 if value.ndim == 1 else 0.04,
            )
    return model


def _numpy(model) -> dict[str, np.ndarray]:
    return {key: value.detach().numpy() for key, value in model.state_dict().items()}


def _timm_outputs(model, images: np.ndarray) -> dict[str, np.ndarray]:
    import torch

    tokens = []
    hooks = [
        block.register_forward_hook(lambda *args: tokens.append(args[2][:, 0]))
        for block in model.blocks
    ]
    with torch.no_grad():
        normed = model.forward_features(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
        logits = model.forward_head(normed)
    for hook in hooks:
        hook.remove()
    blocks = torch.stack(tokens, dim=1)
    features = logits if model.cls_token is None and not model.num_classes else normed[:, 0]
    return {"blocks": blocks.numpy(), "features": features.numpy(), "logits": logits.numpy()}


def _our_outputs(config, params, images: np.ndarray) -> dict[str, np.ndarray]:
    graphdef, state = nnx.split(build(config, params))

    @jax.jit
    def outputs(state, images):
        vit = nnx.merge(graphdef, state)
        x = vit.embed(images)
        tokens = []
        for block in vit.blocks:
            x, _ = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
            tokens.append(x[:, 0])
        features = vit.features(x)
        result = {"blocks": jnp.stack(tokens, axis=1), "features": features}
        return result | ({"logits": vit.logits(features)} if vit.head is not None else {})

    return {name: np.asarray(value) for name, value in outputs(state, images).items()}


def _assert_parity(config, params, model) -> None:
    size = config.image_size
    images = np.random.default_rng(3).standard_normal((2, size, size, 3)).astype(np.float32)
    ours = _our_outputs(config, params, images)
    timms = _timm_outputs(model, images)
    for name, value in ours.items():
        # 1e-5 of the largest entry: random weights make larger numbers than trained ones
        scale = max(1.0, float(np.abs(timms[name]).max()))
        np.testing.assert_allclose(value, timms[name], rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.convert
@pytest.mark.parametrize("config", FROM_TIMM, ids=lambda config: config.name)
def test_named_backbones_compute_the_same_as_timm(config):
    config = dataclasses.replace(config, depth=12 if config.width < 384 else 3)
    model = _random_model(config.timm_name, depth=config.depth)
    tensors = _numpy(model)
    assert ("head.weight" in tensors and config.num_classes == 0) == (
        config.name == "clip_vit_base"
    )
    _assert_parity(config, from_timm(tensors, config), model)


@pytest.mark.convert
@pytest.mark.parametrize(
    "name",
    [
        *("vit_small_patch16_224.dino", "deit_small_patch16_224.fb_in1k", "vit_tiny_patch16_384"),
        *("vit_small_patch14_reg4_dinov2.lvd142m", "deit_tiny_distilled_patch16_224.fb_in1k"),
        *("vit_small_patch16_224.augreg_in21k_ft_in1k", "deit3_medium_patch16_224.fb_in1k"),
        *("vit_base_patch16_224.augreg_in21k", "vit_large_patch16_224.augreg_in21k_ft_in1k"),
        *("vit_large_patch14_clip_224.openai", "vit_large_patch14_clip_quickgelu_224.openai"),
    ],
)
def test_other_plain_vits_compute_the_same_as_timm_from_an_inferred_config_and_load_in_timm(name):
    import torch

    model = _random_model(name, depth=3)
    config = infer_config(name, _numpy(model), {"pretrained_cfg": model.pretrained_cfg})
    assert config.depth == 3 and config.mean == tuple(model.pretrained_cfg["mean"])
    params = from_timm(_numpy(model), config)
    _assert_parity(config, params, model)

    exported = _random_model(
        timm_weights._architecture(config), depth=3, **timm_weights._arguments(config)
    )
    tensors = timm_weights.to_timm(params, config)
    exported.load_state_dict({key: torch.tensor(value) for key, value in tensors.items()})
    _assert_parity(config, params, exported)


SWIGLU = {"embed_dim": 128, "num_heads": 2}


@pytest.mark.convert
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[
            (f"vit_small_{kind}.lvd1689m", {})
            for kind in ("patch16_dinov3_qkvb", "plus_patch16_dinov3")
        ],
        *[(f"vit_{size}_patch16_dinov3.lvd1689m", SWIGLU) for size in ("large", "huge_plus")],
        *[
            (f"vit_giant_patch14_{kind}.lvd142m", SWIGLU | {"img_size": 70})
            for kind in ("dinov2", "reg4_dinov2")
        ],
    ],
)
def test_rotary_and_gated_models_compute_the_same_as_timm_at_two_image_sizes(name, options):
    model = _random_model(name, depth=2, dynamic_img_size=True, **options)
    hub_config = {"global_pool": "avg"} if "dinov3" in name else {}
    config = infer_config(
        name, _numpy(model), hub_config | {"pretrained_cfg": model.pretrained_cfg}
    )
    assert (config.rotary is not None, config.gated) == (
        "dinov3" in name,
        "plus" in name or "giant" in name,
    )
    pretrained = Pretrained(config, from_timm(_numpy(model), config), "", "")
    for size in (config.image_size, 8 * config.patch_size):
        sized = resize(pretrained, size)
        _assert_parity(sized.config, sized.params, model)


@pytest.mark.convert
@pytest.mark.parametrize(
    "name",
    [
        *("vit_base_patch16_siglip_256.webli", "vit_base_patch32_siglip_256.v2_webli"),
        *("vit_so400m_patch14_siglip_224.webli", "vit_base_patch16_siglip_gap_224.webli"),
    ],
)
def test_models_without_a_class_token_compute_the_same_as_timm_at_two_image_sizes(name):
    model = _random_model(name, depth=2, dynamic_img_size=True)
    config = infer_config(name, _numpy(model), {"pretrained_cfg": model.pretrained_cfg})
    assert config.pool == ("mean" if "_gap_" in name else "attention")
    assert config.num_tokens == config.num_patches
    pretrained = Pretrained(config, from_timm(_numpy(model), config), "", "")
    for size in (config.image_size, 8 * config.patch_size):
        sized = resize(pretrained, size)
        _assert_parity(sized.config, sized.params, model)


@pytest.mark.convert
def test_every_siglip_of_timm_is_known_by_its_tensors():
    import timm

    names = timm.list_models(
        "vit_*siglip*", exclude_filters="*_gap_*"
    )  # which are the same but for the pool
    assert len(names) >= 16
    for name in names:
        _assert_inferred(name, depth=2)


@pytest.mark.convert
@pytest.mark.parametrize("size", [96, 384])
def test_a_network_at_another_image_size_computes_the_same_as_timm(size):
    config = dataclasses.replace(CONFIGS["deit_tiny"], depth=2)
    model = _random_model("deit_tiny_patch16_224", depth=2)
    sized = resize(Pretrained(config, from_timm(_numpy(model), config), "", ""), size)
    model.set_input_size(img_size=size)
    _assert_parity(sized.config, sized.params, model)


@pytest.mark.convert
@pytest.mark.parametrize(
    ("before", "after"), [(14, 6), (14, 7), (14, 24), (4, 14), (16, 37), (14, 1)]
)
def test_position_embeddings_are_resampled_as_timm_does(before, after):
    import torch
    from timm.layers import resample_abs_pos_embed

    position = np.random.default_rng(4).standard_normal((before**2 + 1, 32)).astype(np.float32)
    timms = resample_abs_pos_embed(
        torch.from_numpy(position)[None], new_size=[after, after], num_prefix_tokens=1
    )
    np.testing.assert_allclose(
        resample_position(position, after**2), timms[0].numpy(), rtol=0, atol=1e-5
    )


@pytest.mark.convert
@pytest.mark.parametrize("config", FROM_TIMM, ids=lambda config: config.name)
def test_constants_of_known_backbones_are_timms(config):
    import timm

    pretrained = timm.get_pretrained_cfg(config.timm_name)
    assert pretrained is not None
    assert (config.mean, config.std) == (pretrained.mean, pretrained.std)
    assert pretrained.input_size == (3, config.image_size, config.image_size)


@pytest.mark.convert
@pytest.mark.parametrize(
    "name",
    [
        *("vit_small_patch8_224", "vit_base_patch32_384", "vit_large_patch14_clip_quickgelu_336"),
        *("vit_huge_patch14_clip_224", "vit_giant_patch14_clip_224", "vit_gigantic_patch14_224"),
        *("vit_xsmall_patch16_clip_224", "vit_medium_patch32_clip_224", "deit_base_patch16_384"),
        *("vit_large_patch14_reg4_dinov2", "vit_large_patch16_224", "deit3_huge_patch14_224"),
        *("vit_large_patch16_dinov3.lvd1689m", "vit_huge_plus_patch16_dinov3.lvd1689m"),
        *("vit_giant_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"),
    ],
)
def test_sizes_heads_and_norms_are_inferred_as_timm_builds_them(name):
    _assert_inferred(name)


def _assert_inferred(name: str, **options: int) -> None:
    model = _on_meta(name, **options)
    config = infer_config(
        name, _shapes_only(model), {"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 1, 1]}}
    )
    block = model.blocks[0]
    assert (config.depth, config.width) == (len(model.blocks), model.embed_dim)
    assert (config.num_heads, config.mlp_width) == (block.attn.num_heads, block.mlp.fc2.in_features)
    patch_size = model.patch_embed.patch_size[0]
    image_size = model.patch_embed.img_size[0]
    assert (config.image_size, config.patch_size) == (
        image_size // patch_size * patch_size,
        patch_size,
    )
    assert config.layer_norm_eps == model.norm.eps == block.norm1.eps
    names = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
    assert config.activation == names[type(block.mlp.act).__name__]
    if config.gated or config.rotary is not None:
        return  # other names of tensors, which the comparison of outputs covers
    theirs = {key for key in model.state_dict() if not key.endswith(".gamma")}
    assert {to_timm_name(key) for key in shapes_of(config)} == theirs - _unused(config)


@pytest.mark.convert
@pytest.mark.parametrize(
    "name",
    [
        *("vit_base_patch16_gap_224", "vit_small_patch16_18x2_224", "vit_intern300m_patch14_448"),
        *("vit_base_patch16_224_miil", "vit_small_patch16_lingbot", "eva02_tiny_patch14_224"),
    ],
)
def test_timm_models_that_are_not_plain_are_refused(name):
    tensors = _shapes_only(_on_meta(name))
    with pytest.raises(ValueError, match="not a plain timm ViT|missing: (blocks|norm)"):
        config = infer_config(
            name, tensors, {"pretrained_cfg": {"mean": [0, 0, 0], "std": [1, 1, 1]}}
        )
        from_timm(tensors, config)


def _on_meta(name: str, **options: int):
    import timm
    import torch

    with torch.device("meta"):
        return timm.create_model(name, **options)


def _shapes_only(model) -> dict[str, np.ndarray]:
    """Arrays of the right shapes that take no memory."""
    return {
        key: np.broadcast_to(np.float32(0), value.shape)
        for key, value in model.state_dict().items()
    }


def _unused(config) -> set[str]:
    return {"head.weight", "head.bias"} if config.num_classes == 0 else set()


@pytest.mark.convert
@pytest.mark.parametrize("backbone", ["deit_tiny", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"])
def test_the_installed_timm_is_a_source_of_weights(tmp_path, backbone):
    pretrained = timm_vit.read_timm(backbone, pretrained=False)
    assert pretrained.source.startswith("timm:") and len(pretrained.sha256) == 64
    save_converted(tmp_path / "out.safetensors", pretrained)
    loaded = load_pretrained(backbone, weights=tmp_path / "out.safetensors", image_size=96)
    assert loaded.params["position"].shape == (37, 192) and loaded.sha256 == pretrained.sha256


@pytest.mark.convert
def test_a_file_that_timm_saved_is_read_with_its_own_weights(tmp_path):
    model = _random_model("vit_small_patch16_224.dino", depth=2)
    safetensors.numpy.save_file(_numpy(model), tmp_path / "model.safetensors")
    loaded = load_pretrained("vit_small_patch16_224.dino", weights=tmp_path / "model.safetensors")
    _assert_parity(loaded.config, loaded.params, model)
