"""The headers of an npz file are checked against its data."""

import io
import zipfile

import numpy as np
import pytest

from cheem_jax.core import npz
from cheem_jax.core.npz import read_npz, read_tensors


def write(file, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file


def npy(header: str, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + body


def test_arrays_are_restored_as_they_were_saved(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.array([b"x", b"yz"]),
        "c": np.asfortranarray(np.eye(3)),
        "d": np.int8(3),
        "e": np.zeros((0, 3), np.float32),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", allow_pickle=False, **arrays)
        result = read_npz(tmp_path / "x.npz")
        assert list(result) == list(arrays)
        for name, value in arrays.items():
            np.testing.assert_array_equal(result[name], value)
            assert result[name].dtype == value.dtype


def test_an_archive_can_be_packed_but_not_a_hundred_times(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "SMALL_BYTES", 100)
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(4000) // 10)
    assert len(read_npz(tmp_path / "x.npz")["a"]) == 4000
    np.savez_compressed(tmp_path / "y.npz", a=np.zeros(4_000_000))
    with pytest.raises(ValueError, match="times as many"):
        read_npz(tmp_path / "y.npz")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
            "by its header, but has 8 bytes",
        ),
        (
            "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,), }",
            "must contain plain numbers or text",
        ),
        (
            "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
            "must contain plain numbers or text",
        ),
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }",
            "must contain plain numbers or text",
        ),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (2,", "not a readable npz"),
        ("[" * 3000, "not a readable npz"),
        ("__import__('os').abort()", "not a readable npz"),
    ],
)
def test_a_header_is_not_believed(tmp_path, header, message):
    file = write(tmp_path / "x.npz", {"w.npy": npy(header, bytes(8))})
    with pytest.raises(
        ValueError, match=f"x.npz is not a readable npz file .*{message}|x.npz is {message}"
    ):
        read_npz(file)


def test_bombs_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "SMALL_BYTES", 2**20)
    np.savez_compressed(tmp_path / "x.npz", w=np.zeros(2**22, np.uint8))
    with pytest.raises(ValueError, match=r"x\.npz .* bytes unpack to \d+, over 100 times as many"):
        read_npz(tmp_path / "x.npz")
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(4))
    with pytest.raises(ValueError, match="compressed with method 12"):
        read_npz(write(tmp_path / "y.npz", {"w.npy": buffer.getvalue()}, zipfile.ZIP_BZIP2))


def test_a_member_that_is_no_array_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.npz is not a readable npz file"):
        read_npz(write(tmp_path / "x.npz", {"readme.txt": b"hello, this is text"}))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_headers_of_the_versions_that_savez_writes_are_read(tmp_path, version):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(3), version=version)
    file = write(tmp_path / "x.npz", {"w.npy": buffer.getvalue()})
    if version == (3, 0):
        with pytest.raises(ValueError, match="format version"):
            read_npz(file)
    else:
        assert read_npz(file)["w"].tolist() == [0, 1, 2]


def test_an_archive_of_the_largest_size_is_read(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(40))
    file = write(tmp_path / "x.npz", {"w.npy": buffer.getvalue()})
    monkeypatch.setattr(npz, "MAX_RATIO", 0)
    monkeypatch.setattr(npz, "SMALL_BYTES", len(buffer.getvalue()))
    assert list(read_npz(file)) == ["w"]
    monkeypatch.setattr(npz, "SMALL_BYTES", len(buffer.getvalue()) - 1)
    with pytest.raises(ValueError, match="over 0 times as many"):
        read_npz(file)


def test_repeated_names_are_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        with zipfile.ZipFile(tmp_path / "y.npz", "w") as archive:
            archive.writestr("w.npy", b"")
            archive.writestr("w.npy", b"")
    with pytest.raises(ValueError, match="member names are repeated"):
        read_npz(tmp_path / "y.npz")


def test_tensors_can_have_the_largest_finite_value_and_one_larger_value_is_refused(tmp_path):
    largest = float(np.finfo(np.float32).max)
    np.savez(tmp_path / "x.npz", w=np.array([largest, -largest, 0.0]))
    tensors, metadata = read_tensors(tmp_path / "x.npz")
    assert tensors["w"].tolist() == [largest, -largest, 0.0] and metadata == {}
    np.savez(tmp_path / "x.npz", v=np.zeros(2), w=np.array([0.0, -1e39]))
    with pytest.raises(ValueError, match=r"\['w'\] contain values that are non-finite"):
        read_tensors(tmp_path / "x.npz")
