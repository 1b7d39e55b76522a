"""No hostile file ends in a traceback, a hang or a full memory: thousands of corrupted ones of
every kind."""

import json
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheem_jax.core.architecture import from_strings, to_strings
from cheem_jax.data.decode import decode_image

FEW = {
    "images": 700,
    "zips": 150,
    "archives": 250,
    "stream_files": 60,
    "manifests": 150,
    "caches": 40,
    "records": 10,
    "weights": 8,
    "converted": 5,
    "hub_configs": 5,
    "run_configs": 200,
    "run_records": 100,
    "architectures": 150,
    "readers": 40,
    "downloads": 250,
}
"""Number of inputs per loader in `make test`: about two thousand, fewer of slow loaders."""
MANY = {
    "images": 9000,
    "zips": 2000,
    "archives": 2500,
    "stream_files": 1200,
    "manifests": 2500,
    "caches": 800,
    "records": 300,
    "weights": 300,
    "converted": 200,
    "hub_configs": 300,
    "checkpoints": 300,
    "run_configs": 2000,
    "run_records": 1500,
    "results": 1000,
    "architectures": 2000,
    "readers": 1200,
    "downloads": 2000,
}


@pytest.mark.parametrize(
    ("name", "num"),
    [
        pytest.param(*one, marks=pytest.mark.full if one[0] == "readers" else ())
        for one in FEW.items()
    ],
)
@pytest.mark.filterwarnings("ignore")  # libraries warn about corrupted files
def test_a_few_hostile_files_are_read_or_refused_by_name(name, num, tmp_path):
    tried = hostile.fuzz(name, range(num), tmp_path)
    assert not tried.bad, "\n".join(tried.bad)
    assert tried.refused and (tried.accepted or num < 20), "inputs that are all alike show nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num"), MANY.items())
def test_many_hostile_files_are_read_or_refused_by_name(name, num, tally):
    """In a separate process, which can crash, and without the type checks of the tests."""
    command = [sys.executable, hostile.__file__, name, str(num), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    tried = hostile.Tried(**json.loads(done.stdout.splitlines()[-1]))
    tally.add("fuzzed inputs", tried=num, bad=min(num, len(tried.bad)), phase=name)
    assert not tried.bad, "\n".join(tried.bad[:20])


def test_the_fuzzer_notices_every_kind_of_fault(tmp_path, monkeypatch):
    def faulty(folder: Path) -> hostile.Attempts:
        deeds = iter(
            [
                lambda: 1,
                lambda: {}["a"],
                lambda: int("x"),
                lambda: bytes(10**15),
                lambda: hog.append(b"x" * 2**26),
            ]
        )
        return lambda rng: ("file.txt", next(deeds))

    hog: list[bytes] = []
    monkeypatch.setitem(hostile.LOADERS, "faulty", (faulty, 40))
    tried = hostile.fuzz("faulty", range(5), tmp_path)
    kinds = (
        "KeyError",
        "'file.txt' is not named by ValueError",
        "MemoryError",
        "MB more than before",
    )
    assert len(tried.bad) == 4
    assert all(kind in bad for kind, bad in zip(kinds, tried.bad, strict=True))
    assert (tried.num, tried.accepted, tried.refused) == (5, 2, 3)


def test_the_fuzzer_ends_a_call_that_hangs(tmp_path, monkeypatch):
    def endless() -> None:
        while True:
            pass

    monkeypatch.setattr(hostile, "SECONDS", 0.05)
    monkeypatch.setitem(hostile.LOADERS, "endless", (lambda folder: lambda rng: ("x", endless), 40))
    [hang, late] = hostile.fuzz("endless", range(1), tmp_path).bad
    assert "no answer within 0.05 seconds" in hang and late.endswith("seconds")


@settings(max_examples=100)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0"]),
)
def test_arbitrary_bytes_decode_to_an_image_or_are_refused(data, magic):
    try:
        pixels = decode_image(magic + data, 4, name="x.img")
    except ValueError as error:
        assert str(error).startswith("x.img: ")
    else:
        assert pixels.shape == (4, 4, 3)


@settings(max_examples=100)
@given(st.lists(st.text(st.sampled_from("reuseadaptnwskip:0123²٣ "), max_size=9), max_size=4))
def test_arbitrary_texts_parse_to_an_architecture_or_are_refused(texts):
    try:
        architecture = from_strings(texts)
    except ValueError as error:
        assert str(error)
    else:
        assert from_strings(to_strings(architecture)) == architecture
