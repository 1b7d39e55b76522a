import gzip
import io
import itertools
import struct
import tarfile
from pathlib import Path

import official
import pytest

from cheem_jax.data.benchmarks.archives import members

FILES = {"top/a.txt": b"a" * 700, "top/deep/er/b.txt": b"", "top/c.bin": bytes(range(256)) * 40}


def contents(path: Path) -> dict[str, bytes]:
    return {name: read() for name, read in members(path)}


def tar_of(*headers: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for header in headers:
            archive.addfile(header, io.BytesIO(bytes(header.size)))
    return buffer.getvalue()


def header(name: str, type: bytes = tarfile.REGTYPE, **fields: str | int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = type
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def with_file(tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def test_a_folder_and_every_archive_of_it_hold_the_same(tmp_path):
    folder = official.write(tmp_path, FILES) / "top"
    assert contents(folder) == FILES
    for name, data in {
        "a.zip": official.zipped(FILES),
        "a.tgz": official.tar(FILES),
        "a.tar": official.tar(FILES, "w"),
        "zip under a wrong name.tar.gz": official.zipped(FILES),
        "dots.tgz": official.tar({f"./{name}": data for name, data in FILES.items()}),
    }.items():
        before = sorted(tmp_path.rglob("*"))
        assert contents(with_file(tmp_path, name, data)) == FILES, name
        assert sorted(tmp_path.rglob("*")) == sorted(
            [*before, tmp_path / name]
        )  # nothing was unpacked


def test_files_that_macos_adds_to_an_archive_are_left_out(tmp_path):
    extra = {"__MACOSX/top/._a.txt": b"x", "top/._a.txt": b"x", "top/.DS_Store": b"x"}
    for name, data in {
        "a.zip": official.zipped(FILES | extra),
        "a.tgz": official.tar(FILES | extra),
    }.items():
        assert contents(with_file(tmp_path, name, data)) == FILES


def test_only_the_files_of_a_tar_are_read_and_nothing_is_written(tmp_path):
    others = [
        header("evil", tarfile.SYMTYPE, linkname="/etc/passwd"),
        header("evil", tarfile.LNKTYPE, linkname="good"),
        header("evil", tarfile.FIFOTYPE),
        header("evil", tarfile.CHRTYPE),
    ]
    path = with_file(
        tmp_path, "a.tgz", tar_of(header("good", size=5), *others, header("../up", size=1))
    )
    assert contents(path) == {"good": bytes(5)}
    assert list(tmp_path.iterdir()) == [path] and not (tmp_path.parent / "up").exists()


def test_a_tar_member_of_absurd_size_is_refused_before_it_is_read(tmp_path):
    huge = header("huge.jpg", size=2**40).tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(
        ValueError, match=r"a\.tgz.*'huge\.jpg': it unpacks to 1099511627776 bytes, expected"
    ):
        contents(with_file(tmp_path, "a.tgz", gzip.compress(huge + bytes(1024))))
    long_name = header("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=2**30).tobuf(
        tarfile.GNU_FORMAT
    )
    with pytest.raises(ValueError, match=r"a\.tgz.*it unpacks to 1073741824 bytes"):
        contents(with_file(tmp_path, "a.tgz", gzip.compress(long_name + bytes(1024))))


def test_zip_members_that_no_image_set_has_are_refused(tmp_path):
    for name in ("../evil", "/evil", "top/../../evil"):
        with pytest.raises(
            ValueError, match=r"a\.zip: refused because of member .*not a plain relative name"
        ):
            contents(with_file(tmp_path, "a.zip", official.zipped({name: b"x"})))
    data = bytearray(official.zipped({"secret.jpg": b"x"}))
    data[6] |= 1  # the flags of the file and of its entry in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(
        ValueError, match=r"a\.zip: refused because of member 'secret\.jpg': it is encrypted"
    ):
        contents(with_file(tmp_path, "a.zip", bytes(data)))
    data = bytearray(official.zipped({"huge.jpg": b"x"}))
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 2**30)
    with pytest.raises(
        ValueError, match=r"a\.zip: refused .*'huge\.jpg': it unpacks to 1073741824 bytes"
    ):
        contents(with_file(tmp_path, "a.zip", bytes(data)))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
def test_an_archive_cut_off_anywhere_is_refused(tmp_path, name):
    whole = official.tar(FILES, "w" if name == "a.tar" else "w:gz")
    if name == "a.zip":
        whole = official.zipped(FILES)
    if name == "a.tar":
        whole = whole.rstrip(b"\0")  # the rest is padding
    for length in itertools.chain(range(0, len(whole), 97), range(len(whole) - 20, len(whole) - 1)):
        with pytest.raises(ValueError, match=rf"{name}.*download it again"):
            contents(with_file(tmp_path, name, whole[:length]))


def test_flipped_bytes_are_noticed(tmp_path):
    packed = bytearray(official.tar(FILES))
    packed[-8] ^= 1  # the checksum, which gzip compares at the very end
    with pytest.raises(ValueError, match=r"a\.tgz.*CRC check failed.*download it again"):
        contents(with_file(tmp_path, "a.tgz", bytes(packed)))
    stored = official.zipped({"a.txt": b"quite a long text"}).replace(b"quite", b"quilt")
    with pytest.raises(ValueError, match=r"a\.zip.*a\.txt.*CRC"):
        contents(with_file(tmp_path, "a.zip", stored))


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html><html>404</html>", b"quite another thing" * 99, b""]
)
def test_a_missing_or_invalid_archive_is_named(tmp_path, data):
    for name in ("a.zip", "a.tar.gz"):
        with pytest.raises(
            ValueError, match=rf"{name}: corrupted, truncated or neither a zip nor a tar"
        ):
            contents(with_file(tmp_path, name, data))
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder or zip"):
        contents(tmp_path / "nowhere")


def test_links_to_a_parent_folder_end(tmp_path):
    official.write(tmp_path, {"top/a.txt": b"a"})
    (tmp_path / "top" / "loop").symlink_to(tmp_path / "top")
    names = list(contents(tmp_path / "top"))
    assert "top/a.txt" in names and len(names) < 10


def test_a_link_to_a_folder_elsewhere_counts_by_its_own_name(tmp_path):
    official.write(tmp_path, {"store/a.txt": b"a"})
    (tmp_path / "SUN397").symlink_to(tmp_path / "store")
    assert contents(tmp_path / "SUN397") == {"SUN397/a.txt": b"a"}


def test_a_tar_that_unpacks_to_a_hundred_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cheem_jax.data.benchmarks.archives.SMALL_BYTES", 2**20)
    path = with_file(tmp_path, "a.tgz", official.tar({f"{i}.bin": bytes(2**20) for i in range(9)}))
    with pytest.raises(ValueError, match=r"a\.tgz: .*refused as a bomb"):
        contents(path)
    path = with_file(
        tmp_path, "b.tgz", gzip.compress(official.tar({"a": b"x"}, "w") + bytes(2**24))
    )
    with pytest.raises(
        ValueError, match=r"b\.tgz: .*refused as a bomb: more than \d+ bytes unpacked"
    ):
        contents(path)


def test_a_tar_of_too_many_members_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cheem_jax.data.benchmarks.archives.MAX_FILES", 3)
    path = with_file(tmp_path, "a.tgz", tar_of(*(header(str(i)) for i in range(5))))
    with pytest.raises(ValueError, match=r"a\.tgz: .*refused as a bomb: more than 3 members"):
        contents(path)
