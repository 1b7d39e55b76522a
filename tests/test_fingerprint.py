"""The fingerprint of a run: its contents, the changes that change it, and their description."""

import json
import os
import subprocess

import jax
import numpy as np
import pytest

from cheem_jax.run import fingerprint
from cheem_jax.run.differences import find_differences
from cheem_jax.run.record import to_json

IDENTITY = {
    "seed": 0,
    "rates": (1e-3, 2e-3),
    "data_sha256": {"a": "1", "b": "2"},
    "weights_sha256": "w",
}


def differences(there, here):
    return list(map(str, find_differences(there, here)))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if fingerprint.VARIABLES.fullmatch(name)]:
        monkeypatch.delenv(name)


def test_it_contains_settings_data_weights_code_versions_and_device_as_plain_json():
    identity = fingerprint.take(IDENTITY)
    assert list(identity) == [
        "config_sha256",
        "data_sha256",
        "weights_sha256",
        "code",
        "versions",
        "device",
    ]
    assert json.loads(json.dumps(identity)) == identity
    assert identity["weights_sha256"] == "w" and identity["versions"]["jax"] == jax.__version__
    assert all(identity["versions"].values())
    assert len(identity["versions"]) == 1 + len(fingerprint.PACKAGES)
    assert identity["device"]["platform"] == "cpu"
    assert identity["device"]["threads"] >= 1
    assert identity["device"]["processor"]
    assert identity["device"]["environment"] == {} and identity["device"]["used"] == 1
    assert fingerprint.take(IDENTITY) == identity


def test_options_of_jax_and_the_number_of_devices_change_it():
    before = fingerprint.take(IDENTITY)
    with jax.enable_x64(True), jax.default_matmul_precision("bfloat16"):
        after = fingerprint.take(IDENTITY, 2)
    assert [sentence.split()[0] for sentence in differences(before, after)] == [
        "device.options.default_matmul_precision",
        "device.options.enable_x64",
        "device.used",
    ]


def test_the_identity_of_settings_equals_that_of_their_file_in_any_order_of_keys():
    held = dict(reversed(json.loads(json.dumps(to_json(IDENTITY))).items()))
    assert fingerprint.digest(fingerprint.take(held)) == fingerprint.digest(
        fingerprint.take(IDENTITY)
    )


@pytest.mark.parametrize(
    "change, places",
    [
        ({"seed": np.int64(1)}, ["config_sha256"]),
        ({"data_sha256": {"a": "2", "b": "1"}}, ["config_sha256", "data_sha256"]),
        ({"weights_sha256": "v"}, ["config_sha256", "weights_sha256"]),
    ],
)
def test_another_setting_data_or_weights_change_their_hash(change, places):
    one, other = fingerprint.take(IDENTITY), fingerprint.take(IDENTITY | change)
    assert [sentence.split()[0] for sentence in differences(one, other)] == places
    assert fingerprint.digest(one) != fingerprint.digest(other)
    assert len(fingerprint.digest(one)) == 16 and int(fingerprint.digest(one), 16) >= 0


def test_variables_that_change_numbers_are_reported_and_caches_are_not(monkeypatch):
    before = fingerprint.take(IDENTITY)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert differences(before, fingerprint.take(IDENTITY)) == []
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert differences(before, fingerprint.take(IDENTITY)) == [
        'device.environment.JAX_ENABLE_X64 is missing there and "1" here',
        'device.environment.OMP_NUM_THREADS is missing there and "2" here',
    ]


def test_differences_are_reported_leaf_by_leaf_in_words():
    was = {
        "versions": {"jax": "0.10.1", "flax": "1"},
        "code": {"commit": None},
        "device": {"count": 1},
    }
    now = {
        "versions": {"jax": "0.10.2", "flax": "1"},
        "code": {"commit": 5 * "01234567" + "+"},
        "device": {"count": 2},
    }
    assert differences(was, now) == [
        'versions.jax is "0.10.1" there and "0.10.2" here',
        'code.commit is null there and "012345670123456701234567… here',
        "device.count is 1 there and 2 here",
    ]
    assert differences(now, was)[0] == 'versions.jax is "0.10.2" there and "0.10.1" here'
    assert differences(was, was) == []


def test_code_and_tables_decide_the_hash_of_the_code_and_nothing_else_does(tmp_path):
    def hashed(name: str, **files: str) -> str:
        package = tmp_path / name
        (package / "part").mkdir(parents=True)
        for file, text in {"a.py": "1", "part/b.py": "2", "part/c.json": "3"}.items():
            (package / file).write_text(files.get(file.replace("/", "_").replace(".", "_"), text))
        (package / "weights.safetensors").write_text(files.get("weights", ""))
        return fingerprint.code_hash(package)

    plain = hashed("plain")
    assert hashed("same", weights="others") == plain
    assert len({plain, hashed("code", part_b_py="4"), hashed("table", part_c_json="4")}) == 3


def git(folder, *arguments):
    name = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(
        ["git", *name, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_that_tracks_the_package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("one = 1\n")
    commit_of = fingerprint.commit_of.__wrapped__
    try:
        git(tmp_path, "init")
    except OSError:
        pytest.skip("there is no git")
    assert commit_of(package) is None  # below a checkout, but not of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert commit_of(package) == head
    (package / "__init__.py").write_text("one = 2\n")
    assert commit_of(package) == f"{head}+"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(package) is None
