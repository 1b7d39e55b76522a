"""A run or memory in the terminal: as a view with a row per task, and as one line."""

import contextlib
import datetime
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import rich.box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cheem_jax.core import metrics
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.memories import num_forgotten
from cheem_jax.report.status import MALFORMED, Doing, Snapshot
from cheem_jax.report.table import METHODS, NONE, TOLD, final_table, percent
from cheem_jax.run.progress import duration

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT = 60.0
"""Seconds without a sign of life after which a view says so."""


def view(seen: Snapshot, width: int, rows: int) -> RenderableType:
    """Everything, `width` characters wide, with at most `rows` tasks."""
    parts: list[RenderableType] = [_header(seen)]
    parts += [Text(f"! {trouble}", style="bold red") for trouble in seen.trouble]
    parts.append(_overall(seen, width))
    if (doing := _doing(seen)) is not None:
        parts += ["", *_phase(seen, doing, width)]
    if losses := _learned_losses(seen, width):
        parts.append(losses)
    if seen.names or not seen.is_memory:
        parts.append(_tasks(seen, width, rows))
    if seen.is_finished:
        with contextlib.suppress(*MALFORMED):  # missing or corrupted: the record says the same above
            parts.append(final_table(seen.results))
    return Group(*parts)


def line(seen: Snapshot) -> str:
    """The same in one line, for logs."""
    parts = [state(seen), count(seen), *averages(seen)]
    if (doing := _doing(seen)) is not None:
        parts += [f"[{doing.phase}] {doing.task}: {_counted(doing)}", *_pace(seen, doing), *filter(None, [doing.note])]
    if (left := _left(seen)) is not None:
        parts.append(f"about {duration(left)} left {'for this task' if seen.is_memory else 'in all'}")
    return ", ".join([*parts, *seen.trouble])


def state(seen: Snapshot) -> str:
    """Whether a process works on it, and since when; what to do where it was stopped."""
    owner, doing = seen.owner, seen.status
    if owner is not None:
        sign = max(seen.last or owner.since, owner.since, doing.time if doing is not None else 0.0)
        silent = f", silent for {duration(seen.time - sign)}" if seen.time - sign > SILENT else ""
        since = f"{datetime.datetime.fromtimestamp(owner.since):%H:%M} ({duration(seen.time - owner.since)})"
        return f"running since {since}, process {owner.pid} on {owner.host}{silent}"
    if seen.is_memory:
        return _state_of_memory(seen)
    word = "finished" if seen.is_finished else "stopped"
    at = f" {datetime.datetime.fromtimestamp(seen.last):%Y-%m-%d %H:%M}" if seen.last is not None else ""
    return word + at + ("" if word == "finished" else "; the same command resumes it")


def _state_of_memory(seen: Snapshot) -> str:
    """Of one that no process works on."""
    if seen.config.get("forgetting"):
        return f"stopped while it forgot {seen.config['forgetting']['name']}; the next cheem learn finishes that"
    if seen.config.get("learning"):
        return f"stopped in the middle of {seen.config['learning']['name']}; the same cheem learn resumes it"
    if not seen.names:
        return f"no task yet; cheem learn {seen.directory} FOLDER adds one"
    at = f" since {datetime.datetime.fromtimestamp(seen.last):%Y-%m-%d %H:%M}" if seen.last is not None else ""
    return f"at rest{at}"


def count(seen: Snapshot) -> str:
    """How many tasks are learned, and of how many where that is known."""
    num = seen.num_finished
    if seen.is_memory:  # which does not know of tasks to come
        return f"{_num_tasks(num)} learned"
    return f"{num} of {len(seen.names)} tasks"


def _num_tasks(num: int) -> str:
    return f"{num:,} task{'' if num == 1 else 's'}"


def averages(seen: Snapshot) -> list[str]:
    """Of the tasks so far; of a memory that did not measure them all, right after each was learned."""
    num = seen.num_finished
    accuracy, given = seen.accuracy[:num, :num], seen.given[:num, :num]
    if seen.is_memory and (not num or np.isnan(accuracy[np.tri(num, dtype=bool)]).any()):
        known = np.diagonal(accuracy)[~np.isnan(np.diagonal(accuracy))]
        mean = f"right after learning {percent(float(known.mean()))} %" if len(known) else ""
        return [f"{mean}, mean of {_num_tasks(len(known))}"] if mean else []
    found = []
    with contextlib.suppress(*MALFORMED):  # where the record lacks some
        found.append(f"average accuracy {percent(metrics.average_accuracy(accuracy))} %")
        if seen.setting.get("method") not in TOLD:
            found.append(f"task ID given {percent(metrics.average_accuracy(given))} %")
        if (forgetting := metrics.average_forgetting(accuracy)) is not None:
            found.append(f"forgetting {percent(forgetting)} points")
    return found


def _doing(seen: Snapshot) -> Doing | None:
    """The phase at work, or the one that was when the run was killed; not that of an earlier process."""
    doing, owner = seen.status, seen.owner
    if (
        doing is None
        or seen.is_finished
        or (owner is not None and (owner.pid != doing.pid or doing.time < owner.since - 1))
    ):
        return None
    return doing


def _header(seen: Snapshot) -> Text:
    config, setting = seen.config, seen.setting
    method = setting.get("method") or next((name for name in METHODS if name in config), "")
    parts = [config.get("stream", setting.get("stream")), config.get("backbone", setting.get("backbone"))]
    parts += [METHODS.get(method, method), f"seed {config.get('seed', setting.get('seed', NONE))}"]
    if preset := setting.get("preset"):
        parts.append(f"preset {preset}")
    words = state(seen)
    style = {"running": "bold green", "finished": "bold blue", "at": "bold blue"}.get(words.split()[0], "bold yellow")
    title = Text(" · ".join(str(part) for part in parts if part), style="bold")
    return title.append(f"\n{seen.directory}\n", style="dim").append(words, style=style)


def _overall(seen: Snapshot, width: int) -> Text:
    total = max(len(seen.names), 1)
    text = Text(f"{count(seen)}  ")
    if not seen.is_memory:
        text.append_text(_bar(seen.num_finished / total, min(30, width // 4)))
    left = _left(seen)
    if left is not None:
        only = ", without the upper bound" if seen.has_bounds and seen.num_finished < len(seen.names) else ""
        text.append(f"  about {duration(left)} left{only}")
    elif seen.owner is not None:
        first = "upper bound" if len(seen.names) <= seen.num_finished else "task"
        text.append(f"  time left: known after the first {first}")
    if seen.bounds:
        text.append(f"  (upper bound of {len(seen.bounds)})")
    means = ", ".join(averages(seen))
    return text.append(f"\n{means}" if means else "")


def _left(seen: Snapshot) -> float | None:
    """Seconds until the run ends if the tasks to come take as long as the finished ones did on average."""
    if seen.owner is None or not seen.seconds:
        return None
    durations, waiting = list(seen.seconds.values()), len(seen.names) - seen.num_finished
    if not waiting:  # the upper bound comes last
        durations, waiting = seen.bounds, len(seen.names) - len(seen.bounds)
    if not durations:
        return None
    each = float(np.mean(durations))
    return max(0.0, each - (seen.time - max(seen.owner.since, seen.begun))) + each * max(waiting - 1, 0)


def _phase(seen: Snapshot, doing: Doing, width: int) -> list[Text]:
    text = Text(f"{doing.phase}  ", style="bold").append(f"{doing.task}  ", style="not bold")
    text.append_text(_bar(doing.done / max(doing.total, 1), min(30, width // 4)))
    lines = [text, Text(", ".join([_counted(doing), *_pace(seen, doing)]))]
    if doing.note or len(doing.losses) > 1:
        lines.append(Text(f"{doing.note}  ", style="dim").append(sparkline(doing.losses, width // 3), style="cyan"))
    return lines


def _counted(doing: Doing) -> str:
    return f"{doing.done:,} of {doing.total:,} images"


def _pace(seen: Snapshot, doing: Doing) -> list[str]:
    if seen.owner is None:
        return [f"last sign of life {duration(seen.time - doing.time)} ago"]
    return [] if doing.left is None else [f"{doing.rate:,.0f} images/s", f"{duration(doing.left)} left"]


def _learned_losses(seen: Snapshot, width: int) -> Text | None:
    """The losses per epoch of the last task that was learned."""
    if not seen.reports:
        return None
    index = max(seen.reports)
    text = Text(f"{seen.reports[index].get('name', index)}  ", style="dim")
    for key, losses in seen.reports[index].items():
        known = [loss for loss in losses if isinstance(loss, float)] if isinstance(losses, list) else []
        if key.endswith("losses") and known:
            phase = key.removesuffix("losses").replace("_", " ")
            text.append(f"{phase}loss ").append(sparkline(known, width // 5), style="cyan").append(
                f" {known[-1]:.3g}  "
            )
    return text if text.spans else None


class Measure(NamedTuple):
    """A column of numbers: its title, and the characters it needs."""

    title: str
    size: int


TASK, STATE = 14, 9
LEARNED, NOW = Measure("after\nlearning\n%", 8), Measure("now\n%", 5)
FORGOTTEN, GIVEN = Measure("forgotten\npoints", 9), Measure("given\n%", 5)


def _tasks(seen: Snapshot, width: int, rows: int) -> RenderableType:
    num, num_finished = len(seen.names), seen.num_finished
    shown = shown_tasks(num, num_finished, rows)
    names = [f"T{index} {seen.names[index]}" for index in shown]
    blocks = max((len(seen.reports[i].get("architecture") or ()) for i in shown if i in seen.reports), default=0)
    # a column has two characters around it; what there is no room for goes
    room = width - sum(size + 2 for size in (TASK, STATE, LEARNED.size, NOW.size))
    measures = [LEARNED, NOW]
    has_letters = 0 < blocks and max(blocks, len("blocks")) + 2 <= room
    room -= has_letters * (max(blocks, len("blocks")) + 2)
    for measure in (FORGOTTEN, GIVEN):
        if measure.size + 2 <= room:
            measures.append(measure)
            room -= measure.size + 2
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task", width=min(max(map(len, [*names, "task"])), max(8, TASK + room)), no_wrap=True)
    table.add_column("state", width=STATE, no_wrap=True)
    if has_letters:
        table.add_column("blocks", no_wrap=True)
    for measure in measures:
        table.add_column(measure.title, width=measure.size, justify="right", no_wrap=True)
    for index, name in zip(shown, names, strict=True):
        cells = [Text(name, overflow="ellipsis"), _task_state(seen, index)]
        if has_letters:
            cells.append(_letters(seen.reports.get(index, {}).get("architecture") or ()))
        column = seen.accuracy[index : seen.num_finished, index]
        if len(column):
            given = seen.given[seen.num_finished - 1, index]
            values = {LEARNED: column[0], NOW: column[-1], FORGOTTEN: column.max() - column[-1], GIVEN: given}
            cells += [Text(NONE if np.isnan(values[m]) else percent(float(values[m]))) for m in measures]
        table.add_row(*cells)
    hidden = [f"{n:,} {word}" for n, word in ((shown.start, "before"), (num - shown.stop, "after")) if n]
    notes = [f"{num:,} tasks, not shown: {' and '.join(hidden)} these"] if hidden else []
    notes += ["blocks: R reuse, A adapt, N new, S skip"] if has_letters else []
    if seen.is_memory and np.isnan(seen.accuracy[:num_finished][np.tri(num_finished, num, dtype=bool)]).any():
        notes.append(f"{NONE} not measured: their images were not available")
    if forgotten := num_forgotten(seen.config):
        notes.append(f"forgotten: {forgotten}, to which images could still be sent when older numbers were measured")
    return Group(table, *(Text(note, style="dim") for note in notes))


def shown_tasks(num: int, current: int, rows: int) -> range:
    """Which of `num` tasks have room in `rows`: those around the current one, more of those before it."""
    start = max(0, min(current + 3, num) - rows)
    return range(start, min(num, start + rows))


def _task_state(seen: Snapshot, index: int) -> Text:
    if index < seen.num_finished:
        return Text("learned")
    if index != seen.num_finished or seen.owner is None:
        is_half = (seen.config.get("learning") or {}).get("name") == seen.names[index]
        return Text("stopped" if is_half else "waiting", style="dim")
    return Text("measuring" if index in seen.reports else "learning", style="bold green")


def _letters(architecture: Sequence[str]) -> Text:
    text = Text()
    try:
        for choice in from_strings(architecture):
            text.append(choice.kind[0].upper(), style=f"#202020 on {COLOURS[choice.kind]}")
    except ValueError:
        return Text(NONE)
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """One block per value, at most `width`, as high as the value between the least and the greatest."""
    if not values:
        return ""
    kept = [values[round(i)] for i in np.linspace(0, len(values) - 1, min(len(values), max(width, 1)))]
    low, high = min(kept), max(kept)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (value - low) / (high - low)) if high > low else 0] for value in kept)


def _bar(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    text = Text("━" * full, style="green").append("╌" * (width - full), style="dim")
    return text.append(f" {100 * share:.0f} %", style="default")
