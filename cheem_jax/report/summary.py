"""What a view of a run or memory says in words: its state, how far it is, and its averages."""

import datetime

import numpy as np

from cheem_jax import metrics
from cheem_jax.report.memories import is_memory
from cheem_jax.report.seen import MALFORMED, Facts, Seen, is_over
from cheem_jax.report.table import TOLD, percent

SILENT = 60.0
"""Seconds without a word after which a view says so."""


def state(seen: Seen, facts: Facts) -> str:
    """Whether somebody works on it, and since when; what to do where it was stopped."""
    owner, doing = seen.owner, seen.status
    if owner is not None:
        heard = max(facts.last or owner.since, owner.since, doing.time if doing is not None else 0.0)
        silent = f", silent for {span(seen.time - heard)}" if seen.time - heard > SILENT else ""
        since = f"{datetime.datetime.fromtimestamp(owner.since):%H:%M} ({span(seen.time - owner.since)})"
        return f"running since {since}, process {owner.pid} on {owner.host}{silent}"
    if is_memory(seen.config):
        return _state_of_memory(seen, facts)
    word = "finished" if is_finished(seen, facts) else "stopped"
    at = f" {datetime.datetime.fromtimestamp(facts.last):%Y-%m-%d %H:%M}" if facts.last is not None else ""
    return word + at + ("" if word == "finished" else "; the same command goes on")


def _state_of_memory(seen: Seen, facts: Facts) -> str:
    """Of one that nobody works on."""
    if seen.config.get("forgetting"):
        return f"stopped while it forgot {seen.config['forgetting']['name']}; the next cheem learn finishes that"
    if seen.config.get("learning"):
        return f"stopped in the middle of {seen.config['learning']['name']}; the same cheem learn goes on"
    if not facts.names:
        return f"no task yet; cheem learn {seen.directory} FOLDER teaches it one"
    at = f" since {datetime.datetime.fromtimestamp(facts.last):%Y-%m-%d %H:%M}" if facts.last is not None else ""
    return f"at rest{at}"


def count(seen: Seen, facts: Facts) -> str:
    """How many tasks are learned, and of how many where that is known."""
    num = facts.num_finished
    if is_memory(seen.config):  # which knows of no task that is to come
        return f"{_tasks_told(num)} learned"
    return f"{num} of {len(facts.names)} tasks"


def _tasks_told(num: int) -> str:
    return f"{num:,} task{'' if num == 1 else 's'}"


def is_finished(seen: Seen, facts: Facts) -> bool:
    """Whether nobody works on it and nothing that it was to do is left."""
    num_bounds = len(facts.names) if facts.has_bounds else 0
    return is_over(seen) and 0 < len(facts.names) <= facts.num_finished and len(facts.bounds) >= num_bounds


def averages(seen: Seen, facts: Facts) -> list[str]:
    """Of the tasks so far; of a memory that did not measure them all, what each had when it was learned."""
    if not is_memory(seen.config):
        return _averages_of_run(facts)
    num = facts.num_finished
    accuracy = facts.accuracy[:num, :num]
    if num and not np.isnan(accuracy[np.tri(num, dtype=bool)]).any():
        return _averages_of_run(facts)
    known = np.diagonal(accuracy)[~np.isnan(np.diagonal(accuracy))]
    return [f"when learned {percent(float(known.mean()))} %, mean of {_tasks_told(len(known))}"] if len(known) else []


def _averages_of_run(facts: Facts) -> list[str]:
    """Of the tasks measured so far; [] where the record does not hold them all."""
    num = facts.num_finished
    try:
        accuracy, given = facts.accuracy[:num, :num], facts.given[:num, :num]
        found = [f"average accuracy {percent(metrics.average_accuracy(accuracy))} %"]
        if facts.setting.get("method") not in TOLD:
            found.append(f"task given {percent(metrics.average_accuracy(given))} %")
        if (forgetting := metrics.average_forgetting(accuracy)) is not None:
            found.append(f"forgetting {percent(forgetting)} points")
        return found
    except MALFORMED:
        return []


def span(seconds: float) -> str:
    """`2 h 05 min`, two units at most."""
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
