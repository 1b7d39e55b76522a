"""Push memories to the Hugging Face hub with a model card, and pull them; a failed pull leaves no
files.

Only the record and the files for predictions are pushed. Images and reports are not pushed; reports
can contain images.
"""

import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cheem_jax.core.hub import TIMEOUT, hub_errors
from cheem_jax.core.paths import absolute
from cheem_jax.memory.contents import BASE, WEIGHTS
from cheem_jax.memory.directory import new_directory
from cheem_jax.memory.making import open_memory
from cheem_jax.memory.opened import OpenMemory
from cheem_jax.report.grid import Grid
from cheem_jax.run.checkpoint import files_of, saved_tasks
from cheem_jax.run.directory import NAME, hold
from cheem_jax.run.record import NAME as RECORD
from cheem_jax.run.record import read

COMMIT_TIMEOUT = 120.0
"""Timeout in seconds for a commit with files; `TIMEOUT` applies to other requests."""
MAX_FILES = 100_000
"""Maximum number of files of a pulled memory. A task has about 20 files."""
MAX_BYTES = 100 * 2**30
"""Maximum size of a pulled memory in bytes."""
CARD = "README.md"
FILES = re.compile(
    rf"(?!.*(?:^|/)\.)({NAME}|{WEIGHTS}|{RECORD}|{BASE}/.+|generation-\d{{4,}}/cheem/\d{{3,}}[-.].+)"
)
"""Pattern of the files of a memory, relative to its directory; hidden files do not match."""


def push(
    directory: str | Path, repository: str, *, license: str | None = None, public: bool = False
) -> list[str]:
    """Replace the memory in the repository `OWNER/NAME` with the memory in `directory`, in a single
    commit.

    A missing repository is created; it is private unless `public` is set. Returns the names of the
    pushed files. Raises ValueError for a run or an interrupted task, the errors of `open_memory`,
    and OSError with a hint if the hub refuses the request or does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
    from huggingface_hub.errors import RepositoryNotFoundError

    directory = absolute(directory)
    memory = open_memory(directory)
    memory.check_writable()
    with hold(directory):
        memory.tidy()  # removes the remains of a killed command, so that they are not pushed
        if (unfinished := memory.state.interrupted) is not None:
            raise ValueError(
                f"task {unfinished['name']!r} is interrupted; finish or forget it before you push"
                " the memory"
            )
        folders = [directory / BASE, *saved_tasks(memory.root)]
        files = [
            folder / name for folder in folders if folder.is_dir() for name in files_of(folder)
        ]
        names = [NAME, WEIGHTS, RECORD, *(file.relative_to(directory).as_posix() for file in files)]
        card = model_card(memory, repository, license).encode()
        api = HfApi()
        get_session().timeout = COMMIT_TIMEOUT  # by default, there is no timeout
        with hub_errors(repository, "push to"):
            try:
                info = api.model_info(repository, timeout=TIMEOUT)
                pushed = [file.rfilename for file in info.siblings or ()]
            except RepositoryNotFoundError:
                pushed = []
                api.create_repo(repository, private=not public, exist_ok=True)
            api.create_commit(
                repository,
                [
                    *(CommitOperationAdd(name, str(directory / name)) for name in names),
                    CommitOperationAdd(CARD, card),
                    *(
                        CommitOperationDelete(name)
                        for name in pushed
                        if FILES.fullmatch(name) and name not in names
                    ),
                ],
                commit_message=f"A memory of {len(memory.tasks)} tasks",
            )
    return [CARD, *names]


def pull(repository: str, directory: str | Path) -> OpenMemory:
    """Download the memory in the repository `OWNER/NAME` into a new or empty folder.

    Raises ValueError if the repository does not contain a complete memory, or if its files are too
    many or too large, and OSError if the hub refuses the request or does not answer. If an error is
    raised, nothing is left behind.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with new_directory(absolute(directory)) as partial:
        with hub_errors(repository, "pull"):
            info = HfApi().model_info(repository, timeout=TIMEOUT, files_metadata=True)
            sizes = {
                file.rfilename: file.size or 0
                for file in info.siblings or ()
                if FILES.fullmatch(file.rfilename)
            }
            names = list(sizes)
            if missing := sorted({NAME, WEIGHTS} - set(names)):
                raise ValueError(
                    f"{repository!r} on the hub is not a memory: it lacks {' and '.join(missing)}"
                )
            _check_sizes(repository, sizes, shutil.disk_usage(partial).free)

            def fetch(name: str) -> str:
                return hf_hub_download(
                    repository, name, revision=info.sha, local_dir=partial, etag_timeout=TIMEOUT
                )

            with ThreadPoolExecutor(8) as threads:
                list(threads.map(fetch, names))
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # written by huggingface_hub
        try:
            open_memory(partial)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{repository!r} on the hub is not a complete memory: {error}"
            ) from error
    return open_memory(directory)


def _check_sizes(repository: str, sizes: Mapping[str, int], num_free: int) -> None:
    """Raise ValueError if there are too many files for a memory, or if they are too large for a
    memory or the disk. `sizes` contains the size of each file in bytes, keyed by file name;
    `num_free` is the number of free bytes on the disk."""
    total = sum(sizes.values())
    if len(sizes) > MAX_FILES or total > MAX_BYTES:
        raise ValueError(
            f"{repository!r} has {len(sizes):,} files of {total / 2**30:,.1f} GB, expected at most"
            f" {MAX_FILES:,} files of {MAX_BYTES / 2**30:,.0f} GB; if it is a memory and you trust"
            f" it, `hf download {repository}` gets it"
        )
    if total > num_free:
        raise ValueError(
            f"{repository!r} has {total / 2**30:,.1f} GB, and {num_free / 2**30:,.1f} GB are free;"
            " choose a folder on another disk"
        )


def model_card(memory: OpenMemory, repository: str, license: str | None = None) -> str:
    """Return the model card as Markdown: tasks, accuracies and the commands to use the memory."""
    config = memory.config
    entries = read(memory.directory)
    evaluated = {
        entry["index"]: entry["methods"]["cheem"]
        for entry in entries
        if entry["event"] == "evaluated"
    }
    reports = (entry["report"] for entry in entries if entry["event"] == "learned")
    # an extension without test images is measured on validation images
    on_validation = {one["index"] for one in reports if one.get("tested_on") == "validation"}
    rows = []
    for index, task in enumerate(memory.tasks):
        shares = (
            evaluated[index][kind][index] if index in evaluated else None
            for kind in ("accuracy", "local_accuracy")
        )
        mark = "*" if index in on_validation else ""
        cells = (
            "not measured" if share is None else f"{100 * share:.1f} %{mark}" for share in shares
        )
        classes = ", ".join(task.classes[:20]) + (", ..." if len(task.classes) > 20 else "")
        rows.append((task.name, f"{len(task.classes)}: {classes}", *cells))
    header = {
        "library_name": "cheem_jax",
        "pipeline_tag": "image-classification",
        "tags": ["continual-learning"],
    } | ({} if license is None else {"license": license})
    # JSON is valid YAML
    fields = "\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items())
    table = Grid("", ("task", "classes", "accuracy", "task ID given"), tuple(rows), 2).to_markdown()
    note = " (* on validation images)" if on_validation else ""
    learned = f"a frozen {config.backbone} at {config.image_size} pixels with experts for"
    return f"""---
{fields}
---

# {repository.split("/")[-1]}

A memory of cheem_jax: {learned} {len(rows)} tasks.
They were learned one after another with the seed {config.seed}.
New tasks are learned with the preset `{config.preset}`.
It contains no images.

{table}

Accuracy is measured on the test images of each task, right after learning the task{note}.

```console
$ cheem pull {repository} MEMORY
$ cheem predict MEMORY IMAGES
```
"""
