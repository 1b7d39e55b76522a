"""A memory on the Hugging Face hub: pushed with a model card made from its record, and pulled whole
or not at all.

What answers is pushed, and the record; never an image, nor a report, which may show some.
"""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cheem_jax.core.hub import TIMEOUT, hub_errors
from cheem_jax.core.paths import absolute
from cheem_jax.memory.contents import BASE, WEIGHTS
from cheem_jax.memory.directory import made_whole
from cheem_jax.memory.making import open_memory
from cheem_jax.memory.opened import OpenMemory
from cheem_jax.report.grid import Grid
from cheem_jax.run.checkpoint import files_of, saved_tasks
from cheem_jax.run.directory import NAME, hold
from cheem_jax.run.record import NAME as RECORD
from cheem_jax.run.record import read

COMMIT_TIMEOUT = 120.0
"""The same once files are being sent, which it has to process."""
CARD = "README.md"
_OURS = re.compile(
    rf"(?!.*(?:^|/)\.)({NAME}|{WEIGHTS}|{RECORD}|{BASE}/.+|generation-\d{{4,}}/cheem/\d{{3,}}[-.].+)"
)
"""Files of a memory by their names: none of them hidden, and none outside."""


def push(
    directory: str | Path, repository: str, *, license: str | None = None, public: bool = False
) -> list[str]:
    """Make the repository `OWNER/NAME` contain this memory, in one commit; returns the names of its
    files.

    A repository that is not there is made, for its owner alone unless `public`. Raises ValueError
    for a run or an interrupted task, and as `open_memory`; OSError with the way out where the hub
    refuses or does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
    from huggingface_hub.errors import RepositoryNotFoundError

    directory = absolute(directory)
    memory = open_memory(directory)
    memory.check_writable()
    with hold(directory):
        memory.tidy()  # nor does what a killed command left travel
        if (left := memory.interrupted) is not None:
            raise ValueError(
                f"task {left['name']!r} is interrupted; finish it, or forget it, before the memory"
                " is pushed"
            )
        folders = [directory / BASE, *saved_tasks(memory.root)]
        files = [
            folder / name for folder in folders if folder.is_dir() for name in files_of(folder)
        ]
        names = [NAME, WEIGHTS, RECORD, *(file.relative_to(directory).as_posix() for file in files)]
        api = HfApi()
        card = card_of(memory, repository, license)
        get_session().timeout = COMMIT_TIMEOUT  # by itself it would wait for ever
        with hub_errors(repository, "push to"):
            try:
                there = [
                    file.rfilename
                    for file in api.model_info(repository, timeout=TIMEOUT).siblings or ()
                ]
            except RepositoryNotFoundError:
                there = []
                api.create_repo(repository, private=not public, exist_ok=True)
            gone = [name for name in there if _OURS.fullmatch(name) and name not in names]
            operations = [CommitOperationAdd(name, str(directory / name)) for name in names]
            operations += [
                CommitOperationAdd(CARD, card.encode()),
                *map(CommitOperationDelete, gone),
            ]
            api.create_commit(
                repository, operations, commit_message=f"A memory of {len(memory.tasks)} tasks"
            )
    return [CARD, *names]


def pull(repository: str, directory: str | Path) -> OpenMemory:
    """The memory in the repository `OWNER/NAME`, in a new or empty folder.

    Raises ValueError for what is not a whole memory, and OSError as `push`; then nothing is left.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with made_whole(absolute(directory)) as partial:
        with hub_errors(repository, "pull"):
            info = HfApi().model_info(repository, timeout=TIMEOUT)
            names = [
                file.rfilename for file in info.siblings or () if _OURS.fullmatch(file.rfilename)
            ]
            if missing := sorted({NAME, WEIGHTS} - set(names)):
                raise ValueError(
                    f"{repository!r} on the hub is not a memory: it lacks {' and '.join(missing)}"
                )

            def fetch(name: str) -> str:
                return hf_hub_download(
                    repository, name, revision=info.sha, local_dir=partial, etag_timeout=TIMEOUT
                )

            with ThreadPoolExecutor(8) as threads:
                list(threads.map(fetch, names))
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub's own notes
        try:
            open_memory(partial)
        except (ValueError, OSError) as error:
            raise ValueError(f"{repository!r} on the hub is not a whole memory: {error}") from error
    return open_memory(directory)


def card_of(memory: OpenMemory, repository: str, license: str | None = None) -> str:
    """The model card, in Markdown: what the memory knows, how well, and how to use it."""
    config = memory.config
    tasks = memory.pools.tasks
    evaluated = {
        e["index"]: e["methods"]["cheem"]
        for e in read(memory.directory)
        if e["event"] == "evaluated"
    }
    rows = []
    for index, task in enumerate(tasks):
        found = evaluated.get(index, {})
        shares = (
            (found.get(kind) or [None] * (index + 1))[index]
            for kind in ("accuracy", "local_accuracy")
        )
        told = ("not measured" if share is None else f"{100 * share:.1f} %" for share in shares)
        classes = ", ".join(task.classes[:20]) + (", ..." if len(task.classes) > 20 else "")
        rows.append((task.name, f"{len(task.classes)}: {classes}", *told))
    header = {
        "library_name": "cheem_jax",
        "pipeline_tag": "image-classification",
        "tags": ["continual-learning"],
    }
    header |= {} if license is None else {"license": license}
    fields = "\n".join(
        f"{name}: {json.dumps(value)}" for name, value in header.items()
    )  # JSON is YAML
    table = Grid("", ("task", "classes", "accuracy", "task ID given"), tuple(rows), 2).to_markdown()
    return f"""---
{fields}
---

# {repository.split("/")[-1]}

A memory of cheem_jax: {config.backbone} at {config.image_size} pixels with experts for {len(rows)} tasks,
learned one after another with the preset `{config.preset}` and seed {config.seed}. It contains no image.

{table}

Accuracy is on the test images of each task, right after learning it.

```console
$ cheem pull {repository} MEMORY
$ cheem predict MEMORY IMAGES
```
"""  # noqa: E501
