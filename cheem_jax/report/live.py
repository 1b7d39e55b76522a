"""A run or memory in the terminal: as a view with a row per task, and as one line."""

import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cheem_jax.report import table
from cheem_jax.report.memories import after_learning, left_undone, num_forgotten, unmeasured
from cheem_jax.report.status import Snapshot
from cheem_jax.report.table import METHODS, NONE, SIZES, UPPER_BOUNDS, Grid, percent
from cheem_jax.run.progress import Doing, duration

SILENT = 60.0
"""Seconds without a sign of life after which a view says so."""


def view(seen: Snapshot, width: int, rows: int) -> RenderableType:
    """Everything, `width` characters wide, with at most `rows` tasks."""
    parts: list[RenderableType] = [_header(seen)]
    parts += [Text(f"! {trouble}", style="bold red") for trouble in seen.trouble]
    parts.append(_overall(seen, width))
    if (doing := _doing(seen)) is not None:
        parts += ["", *_phase(seen, doing, width)]
    if seen.names or not seen.is_memory:
        parts.append(_tasks(seen, width, rows))
    if seen.is_finished:
        parts.append(table.method_grid(seen.results).to_rich())
    return Group(*parts)


def line(seen: Snapshot) -> str:
    """The same in one line, for logs."""
    parts = [state(seen), count(seen), *averages(seen)]
    if (doing := _doing(seen)) is not None:
        parts += [
            f"[{doing.phase}] {doing.task}: {_counted(doing)}",
            *_pace(seen, doing),
            *filter(None, [doing.note]),
        ]
    if (left := _left(seen)) is not None:
        parts.append(
            f"about {duration(left)} left {'for this task' if seen.is_memory else 'in all'}"
        )
    return ", ".join([*parts, *seen.trouble])


def state(seen: Snapshot) -> str:
    """Whether a process works on it, and since when; what to do where it was stopped."""
    owner = seen.owner
    doing = seen.status
    last = _time_of_last(seen)
    if owner is not None:
        sign = max(last or owner.since, owner.since, doing.time if doing is not None else 0.0)
        silent = f", silent for {duration(seen.time - sign)}" if seen.time - sign > SILENT else ""
        since = (
            f"{datetime.datetime.fromtimestamp(owner.since):%H:%M}"
            f" ({duration(seen.time - owner.since)})"
        )
        return f"running since {since}, process {owner.pid} on {owner.host}{silent}"
    at = f" {datetime.datetime.fromtimestamp(last):%Y-%m-%d %H:%M}" if last is not None else ""
    if seen.is_memory:
        return left_undone(seen.config, seen.directory) or f"at rest{' since' if at else ''}{at}"
    return f"finished{at}" if seen.is_finished else f"stopped{at}; the same command resumes it"


def _time_of_last(seen: Snapshot, *without: str) -> float | None:
    """When the last entry of the record was written, seconds since 1970; events in `without` do not
    count."""
    times = (entry["time"] for entry in reversed(seen.entries) if entry["event"] not in without)
    return next((datetime.datetime.fromisoformat(time).timestamp() for time in times), None)


def count(seen: Snapshot) -> str:
    """How many tasks are learned, and of how many where that is known: a memory does not know of
    tasks to come."""
    num = seen.num_finished
    return f"{_num_tasks(num)} learned" if seen.is_memory else f"{num} of {len(seen.names)} tasks"


def _num_tasks(num: int) -> str:
    return f"{num:,} task{'' if num == 1 else 's'}"


def averages(seen: Snapshot) -> list[str]:
    """Of the tasks so far; of a memory that did not measure them all, right after each was
    learned."""
    results = seen.results
    if not results:
        return []
    if results["local_average_accuracy"] is None:
        mean, num = after_learning(results)
        return (
            []
            if mean is None
            else [f"right after learning {percent(mean)} %, mean of {_num_tasks(num)}"]
        )
    given = f"{percent(results['local_average_accuracy'])} %"
    if results["method"] in UPPER_BOUNDS:
        return [f"average accuracy {given}"]
    forgetting = results["average_forgetting"]
    return [
        f"average accuracy {percent(results['average_accuracy'])} %",
        f"task ID given {given}",
        *([] if forgetting is None else [f"forgetting {percent(forgetting)} points"]),
    ]


def _doing(seen: Snapshot) -> Doing | None:
    """The phase at work, or the one that was when the run was killed; not that of an earlier
    process."""
    doing, owner = seen.status, seen.owner
    if doing is None or seen.is_finished:
        return None
    is_of_owner = owner is None or (owner.pid == doing.pid and doing.time >= owner.since - 1)
    return doing if is_of_owner else None


def _header(seen: Snapshot) -> Text:
    known = seen.setting | seen.config
    method = seen.setting.get("method") or next((name for name in METHODS if name in known), "")
    parts = [
        known.get("stream"),
        known.get("backbone"),
        METHODS.get(method, method),
        f"seed {known.get('seed', NONE)}",
    ]
    parts += [f"preset {known['preset']}"] if "preset" in known else []
    words = state(seen)
    style = {"running": "bold green", "finished": "bold blue", "at": "bold blue"}.get(
        words.split()[0], "bold yellow"
    )
    title = Text(" · ".join(str(part) for part in parts if part), style="bold")
    return title.append(f"\n{seen.directory}\n", style="dim").append(words, style=style)


def _overall(seen: Snapshot, width: int) -> Text:
    text = Text(f"{count(seen)}  ")
    if not seen.is_memory:
        text.append_text(_bar(seen.num_finished / max(len(seen.names), 1), min(30, width // 4)))
    if (left := _left(seen)) is not None:
        text.append(f"  about {duration(left)} left")
    elif seen.owner is not None and not seen.num_finished:
        text.append("  time left: known after the first task")
    if num_bounds := sum(entry["event"] == "upper_bound" for entry in seen.entries):
        text.append(f"  (upper bound of {num_bounds})")
    means = ", ".join(averages(seen))
    return text.append(f"\n{means}" if means else "")


def _left(seen: Snapshot) -> float | None:
    """Seconds until the last task is learned: as estimated before it, else as long as the finished
    ones on average."""
    doing = _doing(seen)
    if (
        seen.owner is not None
        and doing is not None
        and doing.ends is not None
        and doing.ends > seen.time
    ):
        return doing.ends - seen.time
    waiting = len(seen.names) - seen.num_finished
    if seen.owner is None or not seen.num_finished or waiting <= 0:
        return None
    timed = [
        entry["seconds"] for entry in seen.entries if entry["event"] in ("learned", "evaluated")
    ]
    each = sum(timed) / seen.num_finished
    begun = max(seen.owner.since, _time_of_last(seen, "learned") or 0.0)
    return max(0.0, each - (seen.time - begun)) + each * (waiting - 1)


def _phase(seen: Snapshot, doing: Doing, width: int) -> list[Text]:
    text = Text(f"{doing.phase}  ", style="bold").append(f"{doing.task}  ", style="not bold")
    text.append_text(_bar(doing.done / max(doing.total, 1), min(30, width // 4)))
    lines = [text, Text(", ".join([_counted(doing), *_pace(seen, doing)]))]
    return [*lines, Text(doing.note, style="dim")] if doing.note else lines


def _counted(doing: Doing) -> str:
    return f"{doing.done:,} of {doing.total:,} images"


def _pace(seen: Snapshot, doing: Doing) -> list[str]:
    if seen.owner is None:
        return [f"last sign of life {duration(seen.time - doing.time)} ago"]
    if not doing.done or not doing.seconds:
        return []
    rate = doing.done / doing.seconds
    return [f"{rate:,.0f} images/s", f"{duration((doing.total - doing.done) / rate)} left"]


def _tasks(seen: Snapshot, width: int, rows: int) -> Table:
    """What `task_grid` says of the tasks that are learned, and the others; columns that have no
    room are left out."""
    num = len(seen.names)
    num_finished = seen.num_finished
    learned = (
        table.task_grid(seen.results).without(SIZES) if seen.results else Grid("", ("task",), (), 1)
    )
    shown = shown_tasks(num, num_finished, rows)
    num_empty = len(learned.columns) - 1
    hidden = [
        f"{n:,} {word}" for n, word in ((shown.start, "before"), (num - shown.stop, "after")) if n
    ]
    captions = [f"{num:,} tasks, not shown: {' and '.join(hidden)} these"] if hidden else []
    captions += [learned.caption] if learned.caption else []
    if seen.results and unmeasured(seen.results):
        captions.append(f"{NONE} not measured: their images were not available")
    if forgotten := num_forgotten(seen.config):
        captions.append(
            f"forgotten: {forgotten}, to which images could still be sent when older numbers were"
            " measured"
        )
    lines = []
    for index in shown:
        if index < num_finished:
            task, *numbers = learned.rows[index]
            lines.append((task, "learned", *numbers))
        else:
            lines.append(
                (f"T{index + 1} {seen.names[index]}", _waiting(seen, index), *[""] * num_empty)
            )
    columns = (learned.columns[0], "state", *learned.columns[1:])
    grid = Grid("", columns, tuple(lines), learned.num_left + 1, "\n".join(captions))
    if grid.width > width:
        grid = grid.without((table.ARCHITECTURE,))._replace(num_left=2)
    while grid.width > width and len(grid.columns) > 3:
        grid = grid.without(grid.columns[-1:])
    return grid.to_rich()


def shown_tasks(num: int, current: int, rows: int) -> range:
    """Which of `num` tasks have room in `rows`: those around the current one, more of those before
    it."""
    start = max(0, min(current + 3, num) - rows)
    return range(start, min(num, start + rows))


def _waiting(seen: Snapshot, index: int) -> str:
    """The state of a task that is not learned yet."""
    if index == seen.num_finished and seen.owner is not None:
        return "learning"
    return (
        "stopped"
        if (seen.config.get("learning") or {}).get("name") == seen.names[index]
        else "waiting"
    )


def _bar(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    text = Text("━" * full, style="green").append("╌" * (width - full), style="dim")
    return text.append(f" {100 * share:.0f} %", style="default")
