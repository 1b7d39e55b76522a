import sys
import urllib.error
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from commands import status_of
from flax import nnx

from cheem_jax.backbone.alexnet import AlexNetConfig, build_alexnet, from_torchvision, load_alexnet
from cheem_jax.backbone.weights import hash_file
from convert import torchvision_alexnet


@pytest.fixture(scope="module")
def model():
    """torchvision's AlexNet for inference, with random weights."""
    import torch
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.alexnet(weights=None).eval()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    """Its state dict in torchvision's download folder."""
    import torch

    file = tmp_path_factory.mktemp("torch") / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    file.parent.mkdir(parents=True)
    torch.save(model.state_dict(), file)
    return file


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "--output"),
        (["--output", "x.safetensors", "--chekpoint", "y"], "--checkpoint"),
        (["--output", "x.pth"], "must end in .safetensors, got 'x.pth'"),
        (["--output", "x.safetensors", "--checkpoint", "none.pth"], "no checkpoint 'none.pth'"),
        (
            ["--output", "there.safetensors"],
            "there.safetensors exists; choose another --output or add --overwrite",
        ),
    ],
)
def test_wrong_arguments_end_in_one_line_and_status_two(
    tmp_path, monkeypatch, capsys, arguments, shown
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").write_bytes(b"precious")
    assert status_of(torchvision_alexnet, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert shown in error.replace(f"{tmp_path}/", "")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("there.safetensors", b"precious")
    ]


@pytest.mark.parametrize("module", ["torch", "torchvision"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert status_of(torchvision_alexnet, ["--output", str(tmp_path / "x.safetensors")]) == 2
    assert "cheem_jax[convert]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _torch_features(model, images: np.ndarray) -> dict[str, np.ndarray]:
    import torch

    with torch.no_grad():
        x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        conv5 = model.features[:11](x)
        pooled = torch.flatten(model.avgpool(model.features(x)), 1)
        result = {"conv5": conv5.flatten(1), "pooled_conv": pooled}
    return {name: value.numpy() for name, value in result.items()}


@pytest.mark.convert
@pytest.mark.parametrize("size", [224, 96, 63])
def test_every_feature_is_torchvisions(model, size):
    images = np.random.default_rng(3).standard_normal((2, size, size, 3)).astype(np.float32)
    expected = _torch_features(model, images)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    for feature in ("conv5", "pooled_conv"):
        config = AlexNetConfig(size, feature)
        built = build_alexnet(config, from_torchvision(tensors, config))
        graphdef, state = nnx.split(built)
        result = jax.jit(
            lambda state, images, graphdef=graphdef: nnx.merge(graphdef, state)(images)
        )(state, images)
        np.testing.assert_allclose(result, expected[feature], rtol=0, atol=1e-4, err_msg=feature)
        # random weights make numbers so small that 1e-4 alone would say little
        np.testing.assert_allclose(
            result, expected[feature], rtol=0, atol=1e-4 * np.abs(expected[feature]).max()
        )


@pytest.mark.convert
def test_preprocessing_is_torchvisions():
    from torchvision.models import AlexNet_Weights

    transforms = AlexNet_Weights.IMAGENET1K_V1.transforms()
    config = AlexNetConfig()
    assert (config.mean, config.std) == (tuple(transforms.mean), tuple(transforms.std))
    assert transforms.crop_size == [config.image_size]
    assert AlexNet_Weights.IMAGENET1K_V1.meta["min_size"] == (63, 63)


@pytest.mark.convert
@pytest.mark.parametrize("source", ["given", "downloaded"])
def test_a_converted_checkpoint_loads_with_the_numbers_and_hash_of_its_origin(
    tmp_path, monkeypatch, model, checkpoint, source
):
    monkeypatch.setenv("TORCH_HOME", str(checkpoint.parent.parent.parent))
    output = tmp_path / "new" / "alexnet.safetensors"
    given = ["--checkpoint", str(checkpoint)] if source == "given" else []
    assert status_of(torchvision_alexnet, [*given, "--output", str(output)]) == 0
    loaded = load_alexnet(output, image_size=96)
    assert (loaded.source, loaded.sha256) == (checkpoint.name, hash_file(checkpoint))
    np.testing.assert_array_equal(
        loaded.params["conv1.kernel"],
        model.features[0].weight.detach().numpy().transpose(2, 3, 1, 0),
    )
    assert [file.name for file in output.parent.iterdir()] == ["alexnet.safetensors"]


@pytest.mark.convert
def test_a_checkpoint_without_classifier_is_enough_for_the_convolutions(tmp_path, model):
    import torch

    state = {
        name: value.half()
        for name, value in model.state_dict().items()
        if name.startswith("features.")
    }
    torch.save(state, tmp_path / "convs.pth")
    output = tmp_path / "convs.safetensors"
    assert (
        status_of(
            torchvision_alexnet,
            ["--checkpoint", str(tmp_path / "convs.pth"), "--output", str(output)],
        )
        == 0
    )
    assert safetensors.numpy.load_file(output).keys() == state.keys()
    assert load_alexnet(output, feature="conv5").params["conv5.bias"].dtype == np.float32


@pytest.mark.convert
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "is not a readable state dict"),
        (b"\x01garbage" * 99, "is not a readable state dict"),
        (["a list"], "is not a readable state dict"),
        ({"epoch": 3}, "is not a readable state dict"),
        ({"fc.weight": (2, 3)}, "bad.pth: .*missing: .*features.0.weight.*unexpected: fc.weight"),
        ({"classifier.6.bias": (10,)}, "missing: features.0.bias"),
    ],
    ids=["empty", "garbage", "list", "number", "foreign", "head"],
)
def test_bad_checkpoints_end_in_one_line_and_leave_the_old_output(tmp_path, capsys, content, shown):
    import re

    import torch

    file, output = tmp_path / "bad.pth", tmp_path / "old.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, dict):
        torch.save(
            {k: torch.zeros(v) if isinstance(v, tuple) else v for k, v in content.items()}, file
        )
    else:
        torch.save(content, file)
    output.write_bytes(b"precious")
    assert (
        status_of(
            torchvision_alexnet, ["--checkpoint", str(file), "--output", str(output), "--overwrite"]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(shown, error)
    assert output.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.convert
def test_without_a_network_the_way_out_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    import torch

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    assert status_of(torchvision_alexnet, ["--output", str(tmp_path / "x.safetensors")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "alexnet-owt-7be5be79.pth" in error
    assert "pass --checkpoint FILE" in error
    assert not (tmp_path / "x.safetensors").exists()
