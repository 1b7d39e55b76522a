"""MATLAB's files are read as SciPy reads them, and damaged ones refused."""

import io
import struct
import zlib

import numpy as np
import official
import pytest
import scipy.io

from cheem_jax.data.benchmarks import matlab
from cheem_jax.data.benchmarks.matlab import read_variable


def saved(**options) -> bytes:
    buffer = io.BytesIO()
    names = np.array([["AM General Hummer SUV 2000", "Citroën C4"]], object)
    scipy.io.savemat(
        buffer, {"other": np.arange(5.0), "names": names, "numbers": np.array([[1, 2], [3, 4]], np.uint16)}, **options
    )
    return buffer.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_variables_are_read_as_scipy_reads_them(compressed):
    data = saved(do_compression=compressed)
    assert read_variable(data, "names") == ["AM General Hummer SUV 2000", "Citroën C4"]
    assert read_variable(data, "numbers") == [1, 3, 2, 4]  # columns first
    rows = [("00001.jpg", 2), ("00002.jpg", 196)]
    data = official.car_annotations(rows)
    annotations = read_variable(data, "annotations")
    assert [(row["fname"], row["class"]) for row in annotations] == rows
    want = scipy.io.loadmat(io.BytesIO(data), squeeze_me=True)["annotations"]
    assert list(annotations[0]) == list(want.dtype.names)
    assert [row["fname"] for row in annotations] == want["fname"].tolist()


def test_a_variable_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"no variable 'x', only \['other', 'names', 'numbers'\]"):
        read_variable(saved(), "x")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_cut_off_anywhere_is_refused(compressed):
    data = saved(do_compression=compressed)
    for length in range(0, len(data) - 1, 3):
        with pytest.raises(ValueError):
            read_variable(data[:length], "numbers")


def test_what_promises_more_than_there_is_takes_no_memory(monkeypatch):
    header = b"x" * 124 + b"\0\1IM"
    flags = struct.pack("<IIII", 6, 8, 1, 0)  # a cell
    size = struct.pack("<IIii", 5, 8, 2**31 - 1, 2**31 - 1)
    body = flags + size + struct.pack("<II", 1, 0)
    with pytest.raises(ValueError, match="4611686014132420609 elements in 40 bytes"):
        read_variable(header + struct.pack("<II", 14, len(body)) + body, "x")
    monkeypatch.setattr(matlab, "MAX_BYTES", 1000)
    bomb = zlib.compress(bytes(10_000))
    with pytest.raises(ValueError, match="unpacks to more than 1000 bytes"):
        read_variable(header + struct.pack("<II", 15, len(bomb)) + bomb, "x")
