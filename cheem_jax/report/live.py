"""Display a run or a memory in the terminal, as a table with a row per task or as a single line."""

import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cheem_jax.report import table
from cheem_jax.report.memories import after_learning, interrupted_work, num_forgotten, unmeasured
from cheem_jax.report.status import Doing, Snapshot
from cheem_jax.report.table import METHODS, NONE, SIZES, UPPER_BOUNDS, Grid, percent
from cheem_jax.run.progress import duration

SILENT = 60.0
"""Seconds without an update of the status after which the display says that the process is
silent."""
STYLES = {"running": "bold green", "finished": "bold blue", "idle": "bold blue"}
"""Rich styles, keyed by the first word of the text from `state`."""


def view(snapshot: Snapshot, width: int, rows: int) -> RenderableType:
    """Display the state, averages, current phase and tables in `width` characters, with at most
    `rows` tasks."""
    parts: list[RenderableType] = [_header(snapshot)]
    parts += [Text(f"! {trouble}", style="bold red") for trouble in snapshot.trouble]
    text = Text(f"{count(snapshot)}  ")
    if not snapshot.is_memory:
        share = snapshot.num_finished / max(len(snapshot.names), 1)
        text.append_text(_bar(share, min(30, width // 4)))
    if (seconds := _seconds_left(snapshot)) is not None:
        text.append(f"  about {duration(seconds)} left")
    elif snapshot.owner is not None and not snapshot.num_finished:
        text.append("  time left: known after one task")
    if num_bounds := sum(entry["event"] == "upper_bound" for entry in snapshot.entries):
        text.append(f"  (upper bound of {num_bounds})")
    if means := ", ".join(averages(snapshot)):
        text.append(f"\n{means}")
    parts.append(text)
    if (doing := _doing(snapshot)) is not None:
        bar = _bar(doing.done / max(doing.total, 1), min(30, width // 4))
        title = Text(f"{doing.phase}  ", style="bold").append(f"{doing.task}  ", style="not bold")
        parts += ["", title.append_text(bar), Text(", ".join(_pace(snapshot, doing)))]
        parts += [Text(doing.note, style="dim")] if doing.note else []
    if snapshot.names or not snapshot.is_memory:
        parts.append(_tasks(snapshot, width, rows))
    if snapshot.is_finished:
        parts.append(table.method_grid(snapshot.results).to_rich())
    return Group(*parts)


def line(snapshot: Snapshot) -> str:
    """Return the state, averages and current phase as a single line, for logs."""
    parts = [state(snapshot), count(snapshot), *averages(snapshot)]
    if (doing := _doing(snapshot)) is not None:
        counted, *pace = _pace(snapshot, doing)
        parts += [f"[{doing.phase}] {doing.task}: {counted}", *pace, *filter(None, [doing.note])]
    if (seconds := _seconds_left(snapshot)) is not None:
        scope = "for this task" if snapshot.is_memory else "in all"
        parts.append(f"about {duration(seconds)} left {scope}")
    return ", ".join([*parts, *snapshot.trouble])


def state(snapshot: Snapshot) -> str:
    """Describe the process that works on the run, or say how to resume a stopped run."""
    owner, doing, last = snapshot.owner, snapshot.status, _time_of_last(snapshot)
    if owner is not None:
        sign = max(last or 0.0, owner.since, doing.time if doing is not None else 0.0)
        silence = snapshot.time - sign
        silent = f", silent for {duration(silence)}" if silence > SILENT else ""
        since = f"{datetime.datetime.fromtimestamp(owner.since):%H:%M}"
        return (
            f"running since {since} ({duration(snapshot.time - owner.since)}), process {owner.pid}"
            f" on {owner.host}{silent}"
        )
    at = f" {datetime.datetime.fromtimestamp(last):%Y-%m-%d %H:%M}" if last is not None else ""
    if snapshot.is_memory:
        idle = f"idle since{at}" if at else "idle"
        return interrupted_work(snapshot.config, snapshot.directory) or idle
    return f"finished{at}" if snapshot.is_finished else f"stopped{at}; the same command resumes it"


def _time_of_last(snapshot: Snapshot, *without: str) -> float | None:
    """Return the time of the record's last entry in seconds since 1970. Entries whose event is in
    `without` are ignored."""
    entries = [entry for entry in snapshot.entries if entry["event"] not in without]
    return datetime.datetime.fromisoformat(entries[-1]["time"]).timestamp() if entries else None


def count(snapshot: Snapshot) -> str:
    """Return the number of learned tasks as text; for a run, also the number of all tasks."""
    num = snapshot.num_finished
    return (
        f"{_format_tasks(num)} learned"
        if snapshot.is_memory
        else f"{num} of {len(snapshot.names)} tasks"
    )


def _format_tasks(num: int) -> str:
    return f"{num:,} task{'' if num == 1 else 's'}"


def averages(snapshot: Snapshot) -> list[str]:
    """Return the averages over the learned tasks as texts. If a task was not measured after the
    last task was learned, the only average is the accuracy right after learning."""
    results = snapshot.results
    if not results:
        return []
    if results["local_average_accuracy"] is None:
        mean, num = after_learning(results)
        text = f"right after learning {percent(mean)} %, mean of {_format_tasks(num)}"
        return [] if mean is None else [text]
    given = f"{percent(results['local_average_accuracy'])} %"
    if results["method"] in UPPER_BOUNDS:
        return [f"average accuracy {given}"]
    forgetting = results["average_forgetting"]
    return [
        f"average accuracy {percent(results['average_accuracy'])} %",
        f"task ID given {given}",
        *([] if forgetting is None else [f"forgetting {percent(forgetting)} points"]),
    ]


def _doing(snapshot: Snapshot) -> Doing | None:
    """Return the current phase, or the last phase if the process was killed. Return None if the run
    is finished, or if the status is from an earlier process."""
    doing, owner = snapshot.status, snapshot.owner
    if doing is None or snapshot.is_finished:
        return None
    is_current = owner is None or (owner.pid == doing.pid and doing.time >= owner.since - 1)
    return doing if is_current else None


def _header(snapshot: Snapshot) -> Text:
    setting = snapshot.setting | snapshot.config
    method = snapshot.setting.get("method") or next((m for m in METHODS if m in setting), "")
    parts = [
        setting.get("stream"),
        setting.get("backbone"),
        METHODS.get(method, method),
        f"seed {setting.get('seed', NONE)}",
        f"preset {setting['preset']}" if "preset" in setting else "",
    ]
    words = state(snapshot)
    title = Text(" · ".join(str(part) for part in parts if part), style="bold")
    title.append(f"\n{snapshot.directory}\n", style="dim")
    return title.append(words, style=STYLES.get(words.split()[0], "bold yellow"))


def _seconds_left(snapshot: Snapshot) -> float | None:
    """Estimate the seconds until the last task is learned, from the estimate in the status or else
    from the duration of earlier tasks."""
    doing, owner, now = _doing(snapshot), snapshot.owner, snapshot.time
    if owner is None:
        return None
    if doing is not None and doing.ends is not None and doing.ends > now:
        return doing.ends - now
    waiting = len(snapshot.names) - snapshot.num_finished
    if not snapshot.num_finished or waiting <= 0:
        return None
    events = ("learned", "evaluated")
    seconds = [entry["seconds"] for entry in snapshot.entries if entry["event"] in events]
    each = sum(seconds) / snapshot.num_finished
    start = max(owner.since, _time_of_last(snapshot, "learned") or 0.0)
    return max(0.0, each - (now - start)) + each * (waiting - 1)


def _pace(snapshot: Snapshot, doing: Doing) -> list[str]:
    """Return the number of processed images of the phase, the speed and the remaining time as
    texts. For a killed run, return the number and the time since the last status."""
    counted = f"{doing.done:,} of {doing.total:,} images"
    if snapshot.owner is None:
        return [counted, f"last update {duration(snapshot.time - doing.time)} ago"]
    if not doing.done or not doing.seconds:
        return [counted]
    rate = doing.done / doing.seconds
    return [counted, f"{rate:,.0f} images/s", f"{duration((doing.total - doing.done) / rate)} left"]


def _tasks(snapshot: Snapshot, width: int, rows: int) -> Table:
    """Make the table of all tasks, with as many columns as fit into `width`."""
    num, num_finished, results = len(snapshot.names), snapshot.num_finished, snapshot.results
    learned = table.task_grid(results).without(SIZES) if results else Grid("", ("task",), (), 1)
    shown = shown_tasks(num, num_finished, rows)
    hidden = [
        f"{n:,} {word}" for n, word in ((shown.start, "before"), (num - shown.stop, "after")) if n
    ]
    captions = [f"{num:,} tasks; not displayed: {' and '.join(hidden)} these"] if hidden else []
    captions.append(learned.caption)
    if results and unmeasured(results):
        captions.append(f"{NONE} not measured: their images were not available")
    if forgotten := num_forgotten(snapshot.config):
        captions.append(
            f"{forgotten} forgotten; in older measurements, images could still be routed to"
            " forgotten tasks"
        )
    empty = [""] * (len(learned.columns) - 1)
    lines = []
    for index in shown:
        name = f"T{index + 1} {snapshot.names[index]}"
        task, *numbers = learned.rows[index] if index < num_finished else (name, *empty)
        lines.append((task, _task_state(snapshot, index), *numbers))
    columns = (learned.columns[0], "state", *learned.columns[1:])
    caption = "\n".join(filter(None, captions))
    grid = Grid("", columns, tuple(lines), learned.num_left + 1, caption)
    if grid.width > width:
        grid = grid.without((table.ARCHITECTURE,))._replace(num_left=2)
    while grid.width > width and len(grid.columns) > 3:
        grid = grid.without(grid.columns[-1:])
    return grid.to_rich()


def shown_tasks(num: int, current: int, rows: int) -> range:
    """Return the indices of at most `rows` tasks around the task `current`; most of these tasks
    precede it."""
    start = max(0, min(current + 3, num) - rows)
    return range(start, min(num, start + rows))


def _task_state(snapshot: Snapshot, index: int) -> str:
    if index < snapshot.num_finished:
        return "learned"
    if index == snapshot.num_finished and snapshot.owner is not None:
        return "learning"
    interrupted = (snapshot.config.get("learning") or {}).get("name")
    return "stopped" if interrupted == snapshot.names[index] else "waiting"


def _bar(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    text = Text("━" * full, style="green").append("╌" * (width - full), style="dim")
    return text.append(f" {100 * share:.0f} %", style="default")
