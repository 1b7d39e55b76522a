"""What one sees of a run from outside: a view of what lies in its directory, while it works or afterwards."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import rich.box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cheem_jax.architecture import from_strings
from cheem_jax.report import COLOURS
from cheem_jax.report.memories import is_memory, num_forgotten
from cheem_jax.report.seen import MALFORMED, Facts, Seen, facts_of
from cheem_jax.report.status import Doing
from cheem_jax.report.summary import averages, count, is_finished, span, state
from cheem_jax.report.table import METHODS, NONE, final_table, percent

BLOCKS = "▁▂▃▄▅▆▇█"


def view(seen: Seen, width: int, rows: int) -> RenderableType:
    """All there is to see, `width` characters wide, with at most `rows` tasks."""
    facts = facts_of(seen)
    parts: list[RenderableType] = [_header(seen, facts)]
    parts += [Text(f"! {trouble}", style="bold red") for trouble in seen.trouble]
    parts.append(_overall(seen, facts, width))
    if (doing := _doing(seen, facts)) is not None:
        parts += ["", *_phase(seen, doing, width)]
    if losses := _learned_losses(facts, width):
        parts.append(losses)
    if facts.names or not is_memory(seen.config):
        parts.append(_tasks(seen, facts, width, rows))
    if is_finished(seen, facts):
        with contextlib.suppress(*MALFORMED):  # missing or damaged: the record says the same above
            parts.append(final_table(seen.results))
    return Group(*parts)


def line(seen: Seen) -> str:
    """The same in one line, for logs."""
    facts = facts_of(seen)
    parts = [state(seen, facts), count(seen, facts), *averages(seen, facts)]
    if (doing := _doing(seen, facts)) is not None:
        parts += [f"[{doing.phase}] {doing.task}: {_counted(doing)}", *_pace(seen, doing), *filter(None, [doing.note])]
    if (left := _left(seen, facts)) is not None:
        parts.append(f"about {span(left)} left {'for this task' if is_memory(seen.config) else 'in all'}")
    return ", ".join([*parts, *seen.trouble])


def _doing(seen: Seen, facts: Facts) -> Doing | None:
    """The phase at work, or the one that was when the run was killed; not that of an earlier process."""
    doing, owner = seen.status, seen.owner
    if (
        doing is None
        or is_finished(seen, facts)
        or (owner is not None and (owner.pid != doing.pid or doing.time < owner.since - 1))
    ):
        return None
    return doing


def _header(seen: Seen, facts: Facts) -> Text:
    config, setting = seen.config, facts.setting
    method = setting.get("method") or next((name for name in METHODS if name in config), "")
    parts = [config.get("stream", setting.get("stream")), config.get("backbone", setting.get("backbone"))]
    parts += [METHODS.get(method, method), f"seed {config.get('seed', setting.get('seed', NONE))}"]
    if preset := setting.get("preset"):
        parts.append(f"preset {preset}")
    told = state(seen, facts)
    style = {"running": "bold green", "finished": "bold blue", "at": "bold blue"}.get(told.split()[0], "bold yellow")
    title = Text(" · ".join(str(part) for part in parts if part), style="bold")
    return title.append(f"\n{seen.directory}\n", style="dim").append(told, style=style)


def _overall(seen: Seen, facts: Facts, width: int) -> Text:
    total = max(len(facts.names), 1)
    text = Text(f"{count(seen, facts)}  ")
    if not is_memory(seen.config):
        text.append_text(_bar(facts.num_finished / total, min(30, width // 4)))
    left = _left(seen, facts)
    if left is not None:
        only = ", without the upper bound" if facts.has_bounds and facts.num_finished < len(facts.names) else ""
        text.append(f"  about {span(left)} left{only}")
    elif seen.owner is not None:
        first = "upper bound" if len(facts.names) <= facts.num_finished else "task"
        text.append(f"  time left: known after the first {first}")
    if facts.bounds:
        text.append(f"  (upper bound of {len(facts.bounds)})")
    means = ", ".join(averages(seen, facts))
    return text.append(f"\n{means}" if means else "")


def _left(seen: Seen, facts: Facts) -> float | None:
    """Seconds until the run ends if the tasks to come take as long as the finished ones did on average."""
    if seen.owner is None or not facts.seconds:
        return None
    durations, waiting = list(facts.seconds.values()), len(facts.names) - facts.num_finished
    if not waiting:  # the upper bound comes last
        durations, waiting = facts.bounds, len(facts.names) - len(facts.bounds)
    if not durations:
        return None
    each = float(np.mean(durations))
    return max(0.0, each - (seen.time - max(seen.owner.since, facts.begun))) + each * max(waiting - 1, 0)


def _phase(seen: Seen, doing: Doing, width: int) -> list[Text]:
    text = Text(f"{doing.phase}  ", style="bold").append(f"{doing.task}  ", style="not bold")
    text.append_text(_bar(doing.done / max(doing.total, 1), min(30, width // 4)))
    lines = [text, Text(", ".join([_counted(doing), *_pace(seen, doing)]))]
    if doing.note or len(doing.losses) > 1:
        lines.append(Text(f"{doing.note}  ", style="dim").append(sparkline(doing.losses, width // 3), style="cyan"))
    return lines


def _counted(doing: Doing) -> str:
    return f"{doing.done:,} of {doing.total:,} images"


def _pace(seen: Seen, doing: Doing) -> list[str]:
    if seen.owner is None:
        return [f"last heard of {span(seen.time - doing.time)} ago"]
    return [] if doing.left is None else [f"{doing.rate:,.0f} images/s", f"{span(doing.left)} left"]


def _learned_losses(facts: Facts, width: int) -> Text | None:
    """The losses per epoch of the task that was learned last."""
    if not facts.reports:
        return None
    index = max(facts.reports)
    text = Text(f"{facts.reports[index].get('name', index)}  ", style="dim")
    for key, losses in facts.reports[index].items():
        told = [loss for loss in losses if isinstance(loss, float)] if isinstance(losses, list) else []
        if key.endswith("losses") and told:
            phase = key.removesuffix("losses").replace("_", " ")
            text.append(f"{phase}loss ").append(sparkline(told, width // 5), style="cyan").append(f" {told[-1]:.3g}  ")
    return text if text.spans else None


class Measure(NamedTuple):
    """A column of numbers: its title, and the characters it needs."""

    title: str
    size: int


TASK, STATE = 14, 9
WHEN, NOW = Measure("when\nlearned\n%", 7), Measure("now\n%", 5)
FORGOTTEN, GIVEN = Measure("forgotten\npoints", 9), Measure("given\n%", 5)


def _tasks(seen: Seen, facts: Facts, width: int, rows: int) -> RenderableType:
    num, num_finished = len(facts.names), facts.num_finished
    shown = shown_tasks(num, num_finished, rows)
    names = [f"T{index} {facts.names[index]}" for index in shown]
    blocks = max((len(facts.reports[i].get("architecture") or ()) for i in shown if i in facts.reports), default=0)
    # a column has two characters around it; what there is no room for goes
    room = width - sum(size + 2 for size in (TASK, STATE, WHEN.size, NOW.size))
    measures = [WHEN, NOW]
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
        cells = [Text(name, overflow="ellipsis"), _task_state(seen, facts, index)]
        if has_letters:
            cells.append(_letters(facts.reports.get(index, {}).get("architecture") or ()))
        column = facts.accuracy[index : facts.num_finished, index]
        if len(column):
            given = facts.given[facts.num_finished - 1, index]
            values = {WHEN: column[0], NOW: column[-1], FORGOTTEN: column.max() - column[-1], GIVEN: given}
            cells += [Text(NONE if np.isnan(values[m]) else percent(float(values[m]))) for m in measures]
        table.add_row(*cells)
    hidden = [f"{n:,} {word}" for n, word in ((shown.start, "before"), (num - shown.stop, "after")) if n]
    notes = [f"{num:,} tasks, not shown: {' and '.join(hidden)} these"] if hidden else []
    notes += ["blocks: R reuse, A adapt, N new, S skip"] if has_letters else []
    if is_memory(seen.config) and np.isnan(facts.accuracy[:num_finished][np.tri(num_finished, num, dtype=bool)]).any():
        notes.append(f"{NONE} not measured: the images were not at hand")
    if forgotten := num_forgotten(seen.config):
        notes.append(f"forgotten: {forgotten}, to which images could still be sent when older numbers were measured")
    return Group(table, *(Text(note, style="dim") for note in notes))


def shown_tasks(num: int, current: int, rows: int) -> range:
    """Which of `num` tasks have room in `rows`: those around the current one, more of those before it."""
    start = max(0, min(current + 3, num) - rows)
    return range(start, min(num, start + rows))


def _task_state(seen: Seen, facts: Facts, index: int) -> Text:
    if index < facts.num_finished:
        return Text("learned")
    if index != facts.num_finished or seen.owner is None:
        is_half = (seen.config.get("learning") or {}).get("name") == facts.names[index]
        return Text("stopped" if is_half else "waiting", style="dim")
    return Text("measuring" if index in facts.reports else "learning", style="bold green")


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
