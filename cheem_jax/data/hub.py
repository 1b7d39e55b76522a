"""Data sets of the Hugging Face hub, and folders that `save_to_disk` wrote, read through the library `datasets`.

Their images come as bytes, which our own decoder decodes. They are kept as Arrow files: no code of a data set runs, and
nothing is unpickled.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.data.files import Encoded, FolderFiles, stamp_of
from cheem_jax.data.splits import SPLITS, Members, cut_missing
from cheem_jax.data.task import Plan

PREFIX = "hf:"
DICT, ONE = "dataset_dict.json", "dataset_info.json"
"""Files by which a folder of `save_to_disk` is known: of several splits, or of one."""


class HubImages(Encoded):
    """Images of a data set: each in a split at a position."""

    def __init__(self, source: str, splits: Mapping[str, Any], image: str, places: Sequence[tuple[str, int]]):
        super().__init__([f"{split}/{position:07d}" for split, position in places])
        self.source, self.splits, self.image, self.places = source, splits, image, list(places)

    def where(self, row: int) -> str:
        """See `Encoded.where`."""
        split, position = self.places[row]
        return f"{self.source} split {split!r} #{position}"

    def read(self, row: int) -> bytes:
        """See `Encoded.read`."""
        split, position = self.places[row]
        try:
            found = self.splits[split][position][self.image]
            # a data set made of files names them where it does not contain them
            return found["bytes"] or FolderFiles(Path(), [found["path"]]).read(0)
        except Exception as error:  # pyarrow raises its own
            raise ValueError(f"{self.where(row)} cannot be read: {error}") from error


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / DICT).is_file() or ((path / ONE).is_file() and (path / "state.json").is_file())


def plan_hub(source: str | Path, *, name: str | None = None, seed: int = 0) -> Plan:
    """The task in a data set: `NAME` or `NAME:CONFIG` on the hub, or a folder of `save_to_disk` (a path).

    The only column of images and the only one of class labels count, or those called `image` and `label`. Missing
    splits are cut from train by `seed` as for folders. Raises ValueError or FileNotFoundError.
    """
    datasets, told = _import_datasets(), f"{'' if isinstance(source, Path) else PREFIX}{source}"
    try:
        if isinstance(source, Path):
            found = datasets.load_from_disk(str(source))
            default = source.resolve().name
        else:
            repository, _, config = source.partition(":")
            found = datasets.load_dataset(repository, config or None)
            default = name_in(source)
    except Exception as error:  # of the hub, of Arrow, and of the library
        reason = " ".join(f"{error or type(error).__name__}".split())[:300]
        raise ValueError(
            f"{told} cannot be read: {reason}; check the name (hf:OWNER/NAME or hf:OWNER/NAME:CONFIG) and the network, "
            "or give a folder that save_to_disk of the library datasets wrote"
        ) from error
    splits = found if isinstance(found, dict) else {"train": found}
    splits = {SPLITS[split.lower()]: rows for split, rows in splits.items() if split.lower() in SPLITS}
    if "train" not in splits:
        raise ValueError(f"{told} has no train split, only {sorted(splits) or 'others'}")
    features = splits["train"].features
    image, label = _only(told, features, datasets.Image), _only(told, features, datasets.ClassLabel)
    classes, members, places = tuple(features[label].names), Members(), dict[str, tuple[str, int]]()
    for split, rows in splits.items():
        if rows.features.get(label) != features[label] or image not in rows.features:
            raise ValueError(f"{told}: the columns of {split} are not those of train; save splits that have the same")
        labels = np.array([-1 if one is None else one for one in rows.select_columns([label])[:][label]], int)
        if outside := int(((labels < 0) | (labels >= len(classes))).sum()):
            raise ValueError(
                f"{told}: {outside} of {len(labels)} images of {split} have no label; save the other splits with "
                "save_to_disk, and give that folder"
            )
        members[split] = {f"{split}/{position:07d}": value for position, value in enumerate(labels.tolist())}
        places |= {key: (split, position) for position, key in enumerate(members[split])}
        splits[split] = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    cut_missing(told, classes, members, seed)
    files = [Path(file["filename"]) for rows in splits.values() for file in rows.cache_files]
    return Plan.of(
        name or default,
        classes,
        members,
        lambda keys: HubImages(told, splits, image, [places[key] for key in keys]),
        source=told,
        stamp=stamp_of(sorted(set(files))),
    )


def name_in(spec: str) -> str:
    """What the task of `OWNER/NAME[:CONFIG]` is called."""
    return spec.partition(":")[0].split("/")[-1]


def _only(told: str, features: Mapping[str, Any], kind: type) -> str:
    """The column of this kind."""
    found = [name for name, feature in features.items() if isinstance(feature, kind)]
    usual = {"Image": "image", "ClassLabel": "label"}[kind.__name__]
    if usual not in found and len(found) != 1:
        raise ValueError(
            f"{told}: expected one column of {kind.__name__}, found {found or 'none'} among {sorted(features)}; "
            f"rename the one to use to {usual!r}, or cast it, and give the folder that save_to_disk writes"
        )
    return usual if usual in found else found[0]


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data sets of the hub need the library datasets ({error}): `pip install 'cheem_jax[hub]'`"
        ) from error
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # which would tell of every attempt
    return datasets
