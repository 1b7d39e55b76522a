"""SciPy reads MATLAB's files, and corrupted ones are refused, even if they would end SciPy's
process."""

import io
import struct
import zlib

import numpy as np
import official
import pytest
import scipy.io

from cheem_jax.data.benchmarks import builders
from cheem_jax.data.benchmarks.builders import read_variable


def saved(**options) -> bytes:
    buffer = io.BytesIO()
    names = np.array([["AM General Hummer SUV 2000", "Citroën C4"]], object)
    scipy.io.savemat(
        buffer,
        {"other": np.arange(5.0), "names": names, "numbers": np.array([[1, 2], [3, 4]], np.uint16)},
        **options,
    )
    return buffer.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
def test_cells_and_numbers_are_read_in_matlabs_order(compressed):
    data = saved(do_compression=compressed)
    assert read_variable(data, "names", "list.mat") == ["AM General Hummer SUV 2000", "Citroën C4"]
    assert read_variable(data, "numbers", "list.mat") == [1, 3, 2, 4]  # columns first


@pytest.mark.parametrize("num", [1, 2])
def test_a_struct_array_of_any_length_is_read_row_by_row(num):
    rows = [("00001.jpg", 2), ("00002.jpg", 196)][:num]
    annotations = read_variable(official.car_annotations(rows), "annotations", "list.mat")
    assert [(row["fname"], row["class"]) for row in annotations] == rows
    assert list(annotations[0]) == ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname"]


def test_a_variable_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="list.mat: variable 'x' cannot be read: KeyError"):
        read_variable(saved(), "x", "list.mat")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_is_refused(compressed):
    data = saved(do_compression=compressed)
    for length in (0, 140, len(data) - 8):
        with pytest.raises(ValueError, match="list.mat: variable 'numbers' cannot be read"):
            read_variable(data[:length], "numbers", "list.mat")


def test_a_file_that_ends_scipys_process_is_one_error():
    data = bytearray(official.car_annotations([("00001.jpg", 2), ("00002.jpg", 196)]))
    data[416] ^= 64  # a size that points out of the file
    with pytest.raises(ValueError, match="list.mat: variable 'annotations' cannot be read"):
        read_variable(bytes(data), "annotations", "list.mat")


def test_a_header_that_promises_too_much_allocates_nothing(monkeypatch):
    header = b"x" * 124 + b"\0\1IM"
    flags = struct.pack("<IIII", 6, 8, 1, 0)  # a cell
    size = struct.pack("<IIii", 5, 8, 2**31 - 1, 2**31 - 1)
    body = flags + size + struct.pack("<IHH", 1, 1, 0) + b"x"
    with pytest.raises(ValueError, match="list.mat: variable 'x' cannot be read"):
        read_variable(header + struct.pack("<II", 14, len(body)) + body, "x", "list.mat")
    bomb = zlib.compress(bytes(2**28))
    monkeypatch.setattr(builders, "MAX_BYTES", 2**30)
    with pytest.raises(ValueError, match="list.mat: variable 'x' cannot be read"):
        read_variable(header + struct.pack("<II", 15, len(bomb)) + bomb, "x", "list.mat")


def test_a_file_that_needs_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(builders, "SECONDS", 0.001)
    with pytest.raises(
        ValueError, match="list.mat: variable 'names' was not read within 0.001 seconds"
    ):
        read_variable(saved(), "names", "list.mat")
