"""Mutation testing: make one small change at a time in the core, and count the changes that the
tests of `make test` notice.

    make mutants MUTANTS_ARGS="--only core cheem --per-module 10"

First, each test file runs once in a separate process, which records the lines that each of its
tests executes. Then each mutant runs the tests that execute its lines, and after them the rest of
their files, because caches of compiled functions hide lines from all tests but the first. A mutant
that survives `--seconds` of tests counts as survived, so the numbers are lower bounds. Results are
saved after each mutant, and the same command resumes.

mutmut and cosmic-ray start a new process per mutant: importing JAX and the test libraries costs 4
CPU seconds each time, more than most tests that kill a mutant. Here each process is a fork of a
process that has imported them, and compiled functions are cached across mutants.
"""

import argparse
import ast
import collections
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("core", "cheem", "engine/stages.py", "engine/scan.py", "engine/passes.py"),
    *("data/augmentation.py", "memory/learning.py", "memory/extending.py"),
    *("memory/forgetting.py", "report/comparison.py", "report/table.py"),
)
IMPORTED = (
    "jax flax.nnx optax orbax.checkpoint sklearn.cluster sklearn.metrics scipy.optimize tyro rich"
    " safetensors.numpy PIL.Image jinja2 huggingface_hub pytest hypothesis beartype chex coverage"
).split()

OPERATORS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift},
}
PAIRS = "min max, argmin argmax, minimum maximum, any all, sum mean, floor ceil, zeros ones"
RENAMED = {a: b for a, b in map(str.split, PAIRS.split(", "))}
RENAMED |= {b: a for a, b in RENAMED.items()}


NO_TESTS = 5
"""Exit status of pytest if no test was selected."""
STAMPS = itertools.count(10**9)
TREE = ROOT
"""The copy of the working tree in which this process runs tests."""


Runs = list[tuple[str, list[str], float]]
"""Test file, tests in the order in which they run, and their usual CPU seconds."""


class Mutant(NamedTuple):
    """A module with one change."""

    name: str
    """`file:line:column operator`."""
    module: str
    lines: range
    """Lines that a test has to execute to notice the change; empty for code that runs on import."""
    change: str
    source: bytes


def mutants_of(module: str) -> list[Mutant]:
    """Make all mutants of a module."""
    source = (ROOT / "cheem_jax" / module).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    mutants = []
    names = collections.Counter()
    for node, lines, operator, text in changes(ast.parse(source)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        name = f"{module}:{node.lineno}:{node.col_offset} {operator}"
        change = f"{' '.join(source[first:last].decode().split())} -> {text}"
        mutated = source[:first] + text.encode() + source[last:]
        names[name] += 1
        if names[name] > 1:
            name += f" {names[name]}"
        mutants.append(Mutant(name, module, lines, change, mutated))
    return mutants


def changes(
    node: Any, body: range = range(0), fixed: range = range(0)
) -> Iterator[tuple[Any, range, str, str]]:
    """Yield node, lines, operator and new text of each change at `node` or below.

    Annotations, decorators, texts, errors and assertions are not changed. A test has to execute the
    statement (`fixed`), a part of a longer statement, or the function's `body` if a default
    argument changes.
    """
    match node:
        case ast.Raise() | ast.Assert() | ast.keyword(arg="strict") | ast.JoinedStr():
            return
        case ast.FunctionDef(name="__repr__"):
            return
        case ast.FunctionDef():
            body = range(node.body[0].lineno, node.end_lineno + 1)
        case ast.stmt() if body and not hasattr(node, "body") and not isinstance(node, ast.Match):
            fixed = range(node.lineno, node.end_lineno + 1)
    for target, operator, new in replacements(node):
        lines = fixed or (range(target.lineno, target.end_lineno + 1) if body else body)
        # types are joined by `|` at module level
        if lines or operator != "operator":
            yield target, lines, operator, new if isinstance(new, str) else f"({ast.unparse(new)})"
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changes(child, body, body if isinstance(child, ast.arguments) else fixed)


def replacements(node: ast.AST) -> Iterator[tuple[Any, str, ast.AST | str]]:
    """Yield the changed node, the operator and the replacement of each change of `node` itself."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                mutated = [*ops[:i], OPERATORS[type(op)](), *ops[i + 1 :]]
                yield node, f"comparison {i + 1}", copy(node, ops=mutated)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            new = copy(node, op=OPERATORS[type(op)]())
            yield node, "operator", ast.unparse(new) if isinstance(node, ast.stmt) else new
        case ast.Constant(value=bool(value)):
            yield node, "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield node, "constant", ast.Constant(0 if value == 1 else value + 1)
        case ast.Constant(value=float(value)):
            yield node, "constant", ast.Constant(2 * value or 1.0)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, "sign", operand
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return", "return None"
        case ast.Call(func=ast.Name(id=name) as called) if name in RENAMED:
            yield node, "function", copy(node, func=copy(called, id=RENAMED[name]))
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in RENAMED:
            yield node, "function", copy(node, func=copy(called, attr=RENAMED[name]))
    match node:
        case ast.Call(keywords=keywords) if any(keyword.arg == "axis" for keyword in keywords):
            rest = [keyword for keyword in keywords if keyword.arg != "axis"]
            yield node, "axis", copy(node, keywords=rest)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
            # `==`, `is` and `in` are negated by "comparison", and `not` is removed by "sign"
            if not isinstance(test, ast.UnaryOp | ast.Compare):
                yield test, "condition", ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "deleted", "pass"


def copy(node: ast.AST, **fields: Any) -> Any:
    """Copy a syntax node with some fields replaced."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


class Observer:
    """Select and order the tests of a file, and note their CPU seconds, failures and lines."""

    def __init__(self, chosen: list[str] | None, coverage: Any):
        self.chosen = chosen
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failures: list[tuple[str, str]] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen is not None:
            order = {name: i for i, name in enumerate(self.chosen)}
            items[:] = [item for item in items if item.nodeid in order]
            items.sort(key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds[nodeid] = -sum(os.times()[:4])
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] += sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self.failures.append((report.nodeid, " ".join(reason.split())[:200]))

    pytest_collectreport = pytest_runtest_logreport


def run_tests(
    tree: Path, file: str, chosen: list[str] | None, seconds: float, is_recorded: bool = False
) -> dict[str, Any]:
    """Run the `chosen` tests of a file of `tree` in a fork of this process: until one fails, or all
    if the lines are recorded. A limit far above `seconds`, their usual CPU time, ends them."""
    scratch = Path(tempfile.mkdtemp(prefix="cheem-mutant-"))
    child = os.fork()
    if not child:
        try:
            os.setsid()
            # a background process ignores Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
            resource.setrlimit(resource.RLIMIT_CPU, (int(5 * seconds + 60), resource.RLIM_INFINITY))
            output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            result = run_pytest(tree, file, chosen, scratch, is_recorded)
            (scratch / "result").write_text(json.dumps(result))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20 * seconds + 300
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its tests can have left processes behind
    _, status = os.waitpid(child, 0)
    try:
        return json.loads((scratch / "result").read_text())
    except FileNotFoundError:
        code = os.waitstatus_to_exitcode(status)
        reason = "timeout" if code in (-signal.SIGXCPU, -signal.SIGKILL) else f"exit {code}"
        return {"status": code, "failures": [(file, reason)], "seconds": {}, "lines": {}}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_pytest(
    tree: Path, file: str, chosen: list[str] | None, scratch: Path, is_recorded: bool
) -> dict[str, Any]:
    """Run pytest in this process, whose temporary files are in `scratch`."""
    import coverage
    import pytest

    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["TMPDIR"] = str(scratch)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch / "hypothesis")
    tempfile.tempdir = None
    covered = None
    if is_recorded:
        paths = [
            f"{tree}/cheem_jax/{name}{'' if name.endswith('.py') else '/*'}" for name in MODULES
        ]
        covered = coverage.Coverage(data_file=None, config_file=False, include=paths)
        covered.start()
    observer = Observer(chosen, covered)
    arguments = [file, "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    # pytest cannot rewrite the assertions of plugins that are imported before
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    status = int(pytest.main(arguments + ["-x"] * (not is_recorded), plugins=[observer]))
    lines = {}
    if covered:
        covered.stop()
        data = covered.get_data()
        for module in data.measured_files():
            name = Path(module).relative_to(tree / "cheem_jax").as_posix()
            lines[name] = data.contexts_by_lineno(module)
    return {
        "status": status,
        "failures": observer.failures,
        "seconds": observer.seconds,
        "lines": lines,
    }


def prepare(directory: str) -> None:
    """Copy the working tree for this process, which changes one module of it at a time."""
    global TREE
    TREE = Path(tempfile.mkdtemp(dir=directory))
    for file in listed("."):
        (TREE / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, TREE / file)


def listed(*patterns: str) -> list[str]:
    """List the files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate", *patterns]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(file for file in files.splitlines() if (ROOT / file).is_file())


def digest_of(tree: Path, file: str) -> str:
    """Hash a test file and the library, because recorded lines are valid for these sources only."""
    sources = (tree / file, *sorted((tree / "cheem_jax").rglob("*.py")))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def record(file: str) -> dict[str, Any]:
    """Run all tests of a file without a change."""
    start = sum(os.times()[:4])
    result = run_tests(TREE, file, None, 1000, is_recorded=True)
    cpu = sum(os.times()[:4]) - start
    return {"file": file, "digest": digest_of(TREE, file), "cpu": cpu, **result}


def judge(job: tuple[Mutant, Runs]) -> dict[str, Any]:
    """Run the tests of a mutant until one fails."""
    mutant, runs = job
    module = TREE / "cheem_jax" / mutant.module
    original, stat = module.read_bytes(), module.stat()
    outcome = {"name": mutant.name, "change": mutant.change, "seconds": 0}
    outcome["outcome"] = "survived" if runs else "not executed"
    try:
        module.write_bytes(mutant.source)
        # cached bytecode is valid for one size and time, so each mutant has a different time
        os.utime(module, (next(STAMPS),) * 2)
        for file, tests, seconds in runs:
            result = run_tests(TREE, file, tests, seconds)
            outcome["seconds"] += round(seconds)
            if result["status"] not in (0, NO_TESTS):
                by, reason = (result["failures"] or [(file, "")])[0]
                return outcome | {"outcome": "killed", "by": by, "reason": reason}
        return outcome
    finally:
        module.write_bytes(original)
        os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def runs_of(mutant: Mutant, recordings: list[dict[str, Any]], limit: float) -> Runs:
    """List the tests to run for a mutant, by file, with their usual CPU seconds.

    First those that execute its lines, then the others of the same files; in both cases, the file
    named after the module is the first, and faster files are earlier. The fastest tests of a file
    run first, and those that exceed the `limit` of CPU seconds are omitted.
    """
    runs = []
    for recording in recordings:
        file, seconds = recording["file"], recording["seconds"]
        usable = seconds.keys() - {test for test, _ in recording["failures"]}
        lines = recording["lines"].get(mutant.module, {})
        executed = map(str, mutant.lines) if mutant.lines else lines
        tests = {test for line in executed for test in lines.get(line, ())} & usable
        start = max(0, recording["cpu"] - sum(seconds.values()))
        is_other = Path(file).stem != f"test_{Path(mutant.module).stem}"
        for turn, chosen in enumerate([tests, usable - tests] if tests else []):
            costs = sorted((seconds[test], test) for test in chosen)
            total = start + sum(cost for cost, _ in costs)
            runs.append((turn, is_other, total, file, start, costs))
    selected = []
    for *_, file, start, costs in sorted(runs):
        total = start
        tests = []
        for cost, test in costs:
            if cost <= limit:
                tests.append(test)
                total += cost
                limit -= cost
        if tests:
            selected.append((file, tests, total))
    return selected


def table(mutants: list[Mutant], outcomes: dict[str, dict[str, Any]]) -> str:
    """Make a Markdown table of the outcomes by module."""
    columns = ("killed", "survived", "not executed")
    rows = ["| module | mutants | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * 4]
    judged = [mutant for mutant in mutants if mutant.name in outcomes]
    for module in dict.fromkeys(mutant.module for mutant in judged):
        of_module = [outcomes[m.name]["outcome"] for m in judged if m.module == module]
        counts = [of_module.count(column) for column in columns]
        rows.append(f"| `{module}` | {len(of_module)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def keep(file: Path, content: Any) -> None:
    """Replace a JSON file."""
    file.with_suffix(".tmp").write_text(json.dumps(content, indent=1))
    file.with_suffix(".tmp").replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", default=MODULES, help="folders and modules of cheem_jax")
    add("--per-module", type=int, default=10, help="number of mutants per module; 0 is all")
    add("--tests", nargs="+", default=["*/test_*.py"], help="patterns of test files")
    add(
        "--seconds", type=float, default=60, help="CPU seconds of tests per mutant, without imports"
    )
    add("--workers", type=int, default=1, help="number of processes")
    add("--again", action="store_true", help="judge mutants that survived again")
    add("--directory", type=Path, default=ROOT / "runs" / "mutants", help="folder of the results")
    options = parser.parse_args()
    for name in options.only:
        if not (ROOT / "cheem_jax" / name).exists():
            parser.error(
                f"--only names {name!r}; expected folders or modules of cheem_jax, such as"
                " core or cheem/hee.py"
            )
    if options.workers < 1 or options.per_module < 0 or options.seconds <= 0:
        parser.error(
            "expected --workers of at least 1, --per-module of at least 0 and --seconds above 0"
        )
    if not (files := listed(*options.tests)):
        parser.error(f"--tests names {options.tests}; no test file has such a name")
    directory = options.directory.resolve()
    (directory / "recorded").mkdir(parents=True, exist_ok=True)

    ranked = []
    for path in (ROOT / "cheem_jax" / name for name in options.only):
        for file in [path] if path.suffix else sorted(path.glob("*.py")):
            of_module = mutants_of(file.relative_to(ROOT / "cheem_jax").as_posix())
            random.Random(file.stem).shuffle(of_module)
            ranked += enumerate(of_module[: options.per_module or None])
    # one of each module, then the next of each
    mutants = [mutant for _, mutant in sorted(ranked, key=lambda item: item[0])]

    sys.path.remove(str(ROOT / "tests"))
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    os.environ.setdefault("CHEEM_SHARED", str(ROOT.parent / "shared"))
    for name in IMPORTED:
        importlib.import_module(name)

    def pool() -> Any:
        return multiprocessing.get_context("fork").Pool(options.workers, prepare, [trees])

    with tempfile.TemporaryDirectory(prefix="cheem-mutants-") as trees:
        recordings = {}
        for file in (directory / "recorded").glob("*.json"):
            recording = json.loads(file.read_text())
            recordings[recording["file"]] = recording
        changed = [
            file
            for file in files
            if recordings.get(file, {}).get("digest") != digest_of(ROOT, file)
        ]
        with pool() as processes:
            for recording in processes.imap_unordered(record, changed):
                file = recording["file"]
                recordings[file] = recording
                keep(directory / "recorded" / f"{Path(file).name}.json", recording)
                print(f"{file}: {recording['cpu']:.0f} s", recording["failures"], flush=True)

        outcomes_file = directory / "outcomes.json"
        outcomes = json.loads(outcomes_file.read_text()) if outcomes_file.exists() else {}
        usable = [recordings[file] for file in files if recordings[file]["seconds"]]
        jobs = [
            (mutant, runs_of(mutant, usable, options.seconds))
            for mutant in mutants
            if (outcome := outcomes.get(mutant.name)) is None
            or outcome["change"] != mutant.change
            or (options.again and outcome["outcome"] != "killed")
        ]
        with pool() as processes:
            for i, outcome in enumerate(processes.imap_unordered(judge, jobs), 1):
                outcomes[outcome["name"]] = outcome
                keep(outcomes_file, outcomes)
                print(f"{i}/{len(jobs)}", *list(outcome.values())[:5], flush=True)
    print(table(mutants, outcomes))


if __name__ == "__main__":
    main()
