"""The page of results: paired estimates against worked values, verdicts, and the committed page
itself."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import tables
from page_runs import entries
from scipy.stats import spearmanr

from cheem_jax.run.results import results_of
from studies.paper import claims
from studies.paper.claims import FAILS, HOLDS, NOT_RUN, OPEN, above, below, in_short, within
from studies.paper.collected import load, packed
from studies.paper.paired import Estimate, accuracy_difference, mean_difference, rank_correlation

ROOT = Path(__file__).parents[3]
NAMES = ("one", "two", "three")


def answered(*counts: int) -> np.ndarray:
    """Right, wrong, right, ... so many times in turn."""
    return np.repeat(np.arange(len(counts)) % 2 == 0, counts)


def test_the_interval_of_one_seed_is_the_analytic_one():
    # of 400 images 60 only we answer rightly, 20 only they do: variance of a difference 0.2 - 0.1^2
    ours, theirs = [[answered(60, 20, 320)]], [[answered(0, 60, 340)]]
    found = accuracy_difference(ours, theirs)
    deviation = np.sqrt((0.2 - 0.1**2) / 400)
    assert found.value == pytest.approx(0.1) and found.per_seed == (pytest.approx(0.1),)
    np.testing.assert_allclose(
        [found.low, found.high], 0.1 + 1.96 * deviation * np.array([-1, 1]), atol=0.003
    )
    assert found.p < 0.001
    swapped = accuracy_difference(theirs, ours)
    assert (swapped.value, swapped.p) == (pytest.approx(-0.1), pytest.approx(found.p))


def test_tasks_count_alike_whatever_their_images():
    found = accuracy_difference(
        [[answered(1000), answered(10)]], [[answered(0, 1000), answered(10)]]
    )
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_the_interval_over_tasks_is_that_of_drawing_tasks():
    # of 100 tasks half are won by all images and half by none: no image matters, and every task
    # does
    ours = [[answered(10) if task % 2 else answered(0, 10) for task in range(100)]]
    found = accuracy_difference(ours, [[answered(0, 10)] * 100])
    assert found[:3] == pytest.approx((0.5, 0.5, 0.5)) and found.over_tasks is not None
    np.testing.assert_allclose(found.over_tasks, 0.5 + 1.96 * 0.05 * np.array([-1, 1]), atol=0.011)


def test_methods_with_the_same_answers_do_not_differ():
    same = [[answered(30, 20, 50)], [answered(10, 90)]]
    assert accuracy_difference(same, same) == Estimate(0.0, 0.0, 0.0, 1.0, (0.0, 0.0), (0.0, 0.0))


def test_an_interval_may_come_from_seeds_alone():
    # one seed gains all images and the other none: means of two drawn seeds are 0, 0.5 and 1, a
    # quarter at either end
    found = accuracy_difference(
        [[answered(50)], [answered(50)]], [[answered(0, 50)], [answered(50)]]
    )
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)
    assert found.p == pytest.approx(0.5, abs=0.03)


def test_seeds_with_the_same_answers_are_no_more_images():
    ours, theirs = [answered(60, 20, 320)], [answered(0, 60, 340)]
    one, three = (accuracy_difference([ours] * num, [theirs] * num) for num in (1, 3))
    assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.05)


def test_sides_of_other_images_are_refused():
    with pytest.raises(ValueError, match=r"\[\[3\]\] and \[\[4\]\] test images by seed and task"):
        accuracy_difference([[answered(3)]], [[answered(4)]])
    with pytest.raises(ValueError, match="expected the same tasks"):
        accuracy_difference([], [])


def test_a_mean_over_tasks_has_the_interval_of_the_tasks():
    ours = np.random.default_rng(0).normal(1.0, 0.5, (1, 100))
    found = mean_difference(ours, np.zeros((1, 100)))
    assert found.value == pytest.approx(ours.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * ours.std() / 10, rel=0.05)


def test_the_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 12))
    y = rng.integers(0, 4, size=(2, 12)).astype(float)
    expected = [spearmanr(a, b)[0] for a, b in zip(x, y, strict=True)]
    found = rank_correlation(x, y)
    np.testing.assert_allclose(found.per_seed, expected)
    assert found.value == pytest.approx(np.mean(expected)) and found.low < found.value < found.high
    # the permutation p of one row is close to the one of Student's t
    alone = rank_correlation(x[:1], y[:1])
    assert alone.p == pytest.approx(spearmanr(x[0], y[0])[1], abs=0.03)
    rising = np.arange(8.0)[None]
    assert (
        rank_correlation(rising, rising**3)[:3] == pytest.approx((1, 1, 1))
        and rank_correlation(rising, rising).p < 0.01
    )
    with pytest.raises(ValueError, match="at least two different values"):
        rank_correlation(rising, np.zeros((1, 8)))


def test_verdicts_follow_from_where_the_interval_lies():
    def of(low: float, high: float) -> Estimate:
        return Estimate(0.0, low, high, 1.0, (0.0,))

    assert [above(of(*ends)) for ends in ((0.1, 0.2), (-0.1, 0.2), (-0.2, -0.1), (0, 0))] == [
        HOLDS,
        OPEN,
        FAILS,
        OPEN,
    ]
    assert [below(of(*ends)) for ends in ((0.1, 0.2), (-0.1, 0.2), (-0.2, -0.1))] == [
        FAILS,
        OPEN,
        HOLDS,
    ]
    assert [within(of(*ends), 0.1) for ends in ((-0.05, 0.05), (-0.2, 0.05), (0.2, 0.3))] == [
        HOLDS,
        OPEN,
        FAILS,
    ]
    assert claims.largest_gap() == pytest.approx(0.022)  # ViT-Base on MTIL: 88.1 and 85.9


def write(
    folder: Path,
    method: str = "cheem",
    seed: int = 0,
    rate: float | Mapping[str, float] = 0.8,
    names: Sequence[str] = NAMES,
    **config,
) -> Path:
    """A collected run with 200 test images per task, of which about `rate` are right, if it is one
    number."""
    rng = np.random.default_rng(seed)
    directory = folder / f"{method}{len(list(folder.glob('*')))}/seed-{seed}"
    luck = {name: rng.random((2, 200)) for name in NAMES}  # the same for all methods
    rates = rate if isinstance(rate, Mapping) else dict.fromkeys(NAMES, rate)
    given = tuple(luck[name][0] < rates[name] for name in names)
    right = tuple(
        is_right & (luck[name][1] < 0.9) for is_right, name in zip(given, names, strict=True)
    )
    results = results_of(
        list(entries(names=names, classes=("cat", "dog"), method=method, seed=seed))
    )
    for name, found in (("accuracy", right), ("local_accuracy", given)):
        results[name][-1] = [float(task.mean()) for task in found]
    results["average_accuracy"], results["local_average_accuracy"] = (
        float(np.mean(results[name][-1])) for name in ("accuracy", "local_accuracy")
    )
    if method == "cheem":
        results["yardsticks"] = {
            "frozen_linear": {**results, "local_accuracy": [[0.9, 0.2, 0.5]], "yardsticks": {}}
        }
        if config.get("sampling") == "uniform":
            for task in results["tasks"]:
                task["params_added_percent"] += 1 + task["name"].count("e")
    own = [word for name, value in config.items() for word in (f"--{method}.{name}", str(value))]
    record = {
        "command": [
            "mtil.py",
            "--stream",
            "DATA",
            "--tasks",
            ",".join(names),
            "--router",
            "None",
            *own,
            "--no-tensorboard",
            f"--{method}.epochs",
            "3",
            "--seed",
            str(seed),
            "--run-dir",
            "RUN_DIR",
        ],
        "data": {"stream": "DATA", "split_seed": 0},
        "conditions": {"device": {"processor": "a processor", "threads": 2, "platform": "cpu"}},
    }
    held = {
        "tasks": list(names),
        "seed": seed,
        "weights_sha256": "w",
        method: {"epochs": 3, "batch_size": 8, **config},
    }
    directory.mkdir(parents=True)
    for name, content in (("results", results), ("record", record), ("config", held)):
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "right.npz").write_bytes(packed(right, given))
    return directory


def page_of(tmp_path: Path) -> str:
    tables.main(tables.Tables(results=tmp_path / "runs", page=tmp_path / "docs/results.md"))
    return (tmp_path / "docs/results.md").read_text()


def line_of(page: str, compared: str) -> list[str]:
    [line] = [line for line in page.splitlines() if f"| {compared} |" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
    return [*cells[1:], cells[0]]  # the verdict last


def test_the_page_is_the_same_when_made_again_and_says_what_was_not_run(tmp_path):
    write(tmp_path / "runs")
    (tmp_path / "notes.md").write_text("## Limits\n\n- Written by hand.\n")
    first = page_of(tmp_path)
    picture = (tmp_path / "docs/results/accuracy.png").read_bytes()
    assert (
        first == page_of(tmp_path)
        and picture == (tmp_path / "docs/results/accuracy.png").read_bytes()
    )
    assert (
        "CHEEM − LoRA-CL" not in first
        and "- Not run, or not in full: (a) CHEEM is more accurate than LoRA-CL;" in first
    )
    assert "- (g)" not in first and "(g) CHEEM is insensitive to the order of the tasks" in first
    assert "## Limits\n\n- Written by hand.\n\n## Methods" in first
    assert "nan" not in first and "None" not in first
    assert "(a), (b)" not in first and str(tmp_path) not in first


def test_the_same_sentence_is_confirmed_or_refuted_as_the_numbers_say(tmp_path):
    for seed in (0, 1, 2):
        write(tmp_path / "runs", seed=seed, rate=0.8)
        write(tmp_path / "runs", "s_prompts", seed=seed, rate=0.95)
    write(tmp_path / "runs", "lora_cl", seed=1, rate=0.5)
    write(tmp_path / "runs", "lora_cl", seed=7, rate=0.99)  # no run of CHEEM has this seed
    write(tmp_path / "runs", "l2p", rate=0.1)
    write(tmp_path / "runs", "full_finetune", rate=0.805)
    write(tmp_path / "runs", names=("three", "one", "two"))
    write(tmp_path / "runs", names=NAMES[::-1])
    write(tmp_path / "runs", sampling="uniform")
    write(tmp_path / "runs", search={"tolerance": 0.1})
    page = page_of(tmp_path)
    worse, alone = line_of(page, "CHEEM − S-Prompts"), line_of(page, "CHEEM − LoRA-CL")
    assert worse[-1] == "**refuted**" and worse[0].startswith("−1") and worse[4].count(":") == 3
    assert alone[-1] == "confirmed (one seed)" and alone[4].startswith("1: +2")
    assert "rests on a single seed" in page
    assert line_of(page, "S-Prompts − L2P")[-1] == "confirmed (one seed)"
    assert (
        line_of(page, "CHEEM − full fine-tuning, task ID given to both")[-1]
        == "confirmed (one seed)"
    )
    assert line_of(page, "CHEEM, order2 − usual order")[:2] == ["0.0 points", "0.0 to 0.0"]
    # parameters: 1.5 against 1.5 + 1 and the letters e of "one", "two" and "three", 1, 0 and 2
    assert line_of(page, "HEE − uniform, parameters added per task")[0] == "−2.00 % of the backbone"
    [good] = re.findall(r"^- Confirmed here: (.*)$", page, re.MULTILINE)
    [bad] = re.findall(r"^- \*\*Refuted here\*\*: (.*)$", page, re.MULTILINE)
    assert [re.findall(r"\((\w)\)", claims) for claims in (good, bad)] == [
        ["a", "e", "g"],
        ["b", "c"],
    ]
    [unbeaten] = re.findall(
        r"^- \*\*More accurate\*\* than CHEEM with the paper's router: (.*)$", page, re.MULTILINE
    )
    assert unbeaten.startswith("S-Prompts (CHEEM −1") and not {"L2P", "LoRA-CL", "full"} & set(
        re.findall(r"[\w-]+", unbeaten)
    )
    leads = {}
    for line in page[page.index("| method | seeds |") :].split("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        leads[cells[0]] = cells[4]
    assert leads["CHEEM"] == "–" and leads["CHEEM, order2"] == "0.0 (0.0 to 0.0)"
    assert leads["LoRA-CL"] == f"{alone[0].removesuffix(' points')} ({alone[1]})"
    bound = line_of(page, "CHEEM − full fine-tuning, task ID given to both")
    assert leads["full fine-tuning *"] == f"{bound[0].removesuffix(' points')} ({bound[1]})"
    ahead, behind = (
        re.fullmatch(r"([+−])(.*) \((.*)\)", leads[name])
        for name in ("LoRA-CL", "full fine-tuning *")
    )
    assert ahead[1] == "+" and f"; {ahead[2]} points above LoRA-CL ({ahead[3]}); " in page
    assert (
        behind[1] == "−"
        and f"; {behind[2]} points below full fine-tuning with the task ID given to both (" in page
    )
    assert f"({behind[3]}, not significant); frozen, linear heads: not run.\n" in page
    assert "as CHEEM, but for the tasks in the order three one two |" in page
    assert "| CHEEM, uniform | as CHEEM, but for sampling uniform |" in page
    assert (
        "--methods cheem,s_prompts --seeds 0,1,2" in page
        and "--methods lora_cl --seeds 1,7" in page
    )
    assert "python experiments/compare.py --stream DATA --tasks one,two,three" in page


def test_the_other_search_and_chosen_settings_have_lines_of_their_own(tmp_path):
    write(tmp_path / "runs", rate=0.7)
    write(tmp_path / "runs", score="closed_form", rate=0.9)
    write(tmp_path / "runs", "lora_cl", rate=0.8)
    write(tmp_path / "runs", "lora_cl", begin="nearest", rate=0.75)
    row = {
        "title": "LoRA-CL",
        "setting": "rate",
        "values": [1e-3, 3e-3, 1e-2],
        "accuracies": [0.5, 0.75, None],
    }
    (tmp_path / "chosen.json").write_text(
        json.dumps([{**row, "chosen": 3e-3, "at_the_end": False}])
    )
    page = page_of(tmp_path)
    assert line_of(page, "CHEEM − LoRA-CL")[-1] == "**refuted** (one seed)"
    assert line_of(page, "CHEEM, closed-form score − LoRA-CL")[-1] == "confirmed (one seed)"
    assert "- Confirmed here: (a) CHEEM is more accurate than LoRA-CL (closed-form score)" in page
    assert (
        "- **Refuted here**: (a) CHEEM is more accurate than LoRA-CL (the paper's search)" in page
    )
    assert "without" not in page[page.index("## In short") :].split("\n\n")[1]
    [told] = re.findall(r"^- With the paper's search: (.*)$", page, re.MULTILINE)
    ours = re.match(r"\*\*CHEEM: (.*) %\*\*, .* \(1 seed\); .* points below LoRA-CL", told)
    assert ours and f"| CHEEM | 0 | {ours[1]} |" in page
    assert "rate 0.001: 50.0, **0.003: 75.0** |" in page and "(an end of the grid)" not in page
    table = page[page.index("| method | seeds |") :].split("\n\n")[0]
    names = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    assert names == [
        "| CHEEM",
        "| CHEEM, closed-form score",
        "| LoRA-CL",
        "| LoRA-CL, from the nearest task",
    ]
    assert (
        "--choose CHOSEN \\\n    --methods cheem,cheem:closed_form,lora_cl,lora_cl:nearest"
        " --seeds 0" in page
    )
    assert sum(line.startswith("| ---") for line in page.splitlines()) <= 5


def test_a_lead_that_rests_on_one_task_is_told_with_what_is_left_without_it(tmp_path):
    write(tmp_path / "runs", rate={"one": 0.7, "two": 0.95, "three": 0.7})
    write(tmp_path / "runs", "lora_cl", rate={"one": 0.75, "two": 0.5, "three": 0.75})
    write(tmp_path / "runs", "frozen_linear", rate=0.4)
    [lora, frozen] = re.findall(r"points above [^(]*\(([^)]*)\)", page_of(tmp_path))
    value, low, high = re.search(r"; without two −(.*), −(.*) to −(.*)$", lora).groups()
    assert (
        3 < float(value) < 7 and float(high) < float(value) < float(low) and "without" not in frozen
    )


def test_the_other_search_is_compared_where_the_papers_was_not_run(tmp_path):
    write(tmp_path / "runs", score="closed_form", rate=0.8)
    write(tmp_path / "runs", "lora_cl", rate=0.5)
    write(tmp_path / "runs", "s_prompts", rate=0.9)
    page = page_of(tmp_path)
    assert line_of(page, "CHEEM, closed-form score − LoRA-CL")[-1] == "confirmed (one seed)"
    assert (
        "- **More accurate** than CHEEM, closed-form score with the paper's router: S-Prompts ("
        in page
    )
    assert (
        "| (d) easy tasks skip more blocks | CHEEM, closed-form score: rank correlation |" in page
    )
    assert "no run of CHEEM" not in page and "| CHEEM, closed-form score minus |" in page
    [lora] = [line.split(" | ") for line in page.splitlines() if line.startswith("| LoRA-CL | 0 |")]
    assert (
        f"; {lora[4][1:].replace(' ', ' points above LoRA-CL ', 1)}; frozen, linear heads: not"
        " run; " in page
    )
    assert lora[4].startswith("+")


def test_uniform_sampling_and_other_orders_are_compared_with_the_search_that_they_belong_to(
    tmp_path,
):
    write(tmp_path / "runs", rate=0.7)
    write(tmp_path / "runs", score="closed_form", rate=0.8)
    write(tmp_path / "runs", score="closed_form", sampling="uniform", rate=0.8)
    write(tmp_path / "runs", score="closed_form", rate=0.8, names=NAMES[::-1])
    write(tmp_path / "runs", "lora_cl", rate=0.5)
    page = page_of(tmp_path)
    title = "CHEEM, closed-form score"
    assert (
        line_of(page, f"{title}: HEE − uniform, parameters added per task")[0]
        == "−2.00 % of the backbone"
    )
    assert line_of(page, f"{title}: HEE − uniform, accuracy")[:2] == ["0.0 points", "0.0 to 0.0"]
    assert line_of(page, f"{title}, reversed − usual order")[:2] == ["0.0 points", "0.0 to 0.0"]
    assert (
        "| HEE − uniform" not in page
        and "--methods cheem,cheem:closed_form,cheem:uniform,lora_cl --seeds 0" in page
    )


def test_all_lines_of_a_claim_decide_it():
    def judged(*words: str) -> str:
        found = Estimate(0.1, 0.0, 0.2, 1.0, (0.1,))
        lines = [
            claims.Verdict("x", None if word == NOT_RUN else found, "points", (0, 1), word)
            for word in words
        ]
        return in_short([(claims.claims()[0], lines)])

    assert judged(HOLDS, HOLDS).startswith("- Confirmed here") and judged(HOLDS, OPEN).startswith(
        "- Not decided"
    )
    assert judged(HOLDS, NOT_RUN).startswith("- Not run, or not in full")
    assert judged(NOT_RUN, FAILS, OPEN).startswith("- **Refuted here**")


def test_damaged_and_mixed_runs_end_in_one_error(tmp_path):
    directory = write(tmp_path / "runs")
    whole = (directory / "right.npz").read_bytes()
    (directory / "right.npz").write_bytes(whole[:-60])
    with pytest.raises(ValueError, match=r"right.npz cannot be read .*collect the run again"):
        page_of(tmp_path)
    wrong = tuple(np.zeros(200, bool) for _ in NAMES)
    (directory / "right.npz").write_bytes(packed(wrong, wrong))
    with pytest.raises(ValueError, match="are not those of its results"):
        page_of(tmp_path)
    (directory / "right.npz").write_bytes(whole)
    (write(tmp_path / "runs", "l2p") / "results.json").unlink()
    with pytest.raises(ValueError, match="some cannot be used: .*unfinished"):
        page_of(tmp_path)
    assert not (tmp_path / "docs/results.md").exists()


def test_the_page_has_no_tables_of_runs_beside_it(tmp_path):
    with pytest.raises(ValueError, match="leave out --runs and --only"):
        tables.main(tables.Tables(results=tmp_path, only="fom"))
    with pytest.raises(ValueError, match=r"contains no collected run; .*experiments/collect.py"):
        load(tmp_path)


def test_figures_of_the_readme_are_those_of_the_records():
    lines = (ROOT / "docs/results.md").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    table = re.search(r"^\| method \| seeds .*?\n\n", readme, re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in line.split("|")[3:-1]]
        for line in table[0].splitlines()[2:]
        if line
    ]
    assert len(rows) >= 3 and all(len(row) == 5 and row.count("–") < 3 for row in rows)
    for task_agnostic, routed, *others in rows:
        own = [cell for cell in (task_agnostic, *others) if cell != "–"]
        assert any(all(f"| {cell} " in line for cell in own) for line in lines), own
        assert routed == "–" or any(
            line.startswith("| levels | **") and f"| {routed}, +" in line for line in lines
        )


def test_what_was_cut_off_is_told_next_to_finished_runs_at_the_same_task():
    results = ROOT / "docs/results"
    cut = json.loads((results / "cut_off.json").read_text())
    notes = (results / "notes.md").read_text()

    def told(name: str) -> str:
        if name in cut["methods"]:
            return f"{np.mean(cut['methods'][name]['accuracy']):.1f}"
        found = json.loads((results / f"runs/{name}/seed-0/results.json").read_text())
        num = len(cut["tasks"])
        assert [task["name"] for task in found["tasks"]][:num] == cut["tasks"]
        return f"{100 * np.mean(found['accuracy'][num - 1][:num]):.1f}"

    others = [told(method) for method in cut["methods"]]
    given = [f"{np.mean(found['given']):.1f}" for found in cut["methods"].values()]
    listed = [f"{', '.join(each[:-1])} and {each[-1]}" for each in (others, given)]
    assert f"After six sets they had {listed[0]} % ({listed[1]} with the task ID given)" in notes
    ours, paper, lora, prompts = map(told, ("cheem-closed_form", "cheem", "lora_cl", "s_prompts"))
    frozen = told("frozen_linear")
    assert (
        f"score, had {ours}, CHEEM {paper}, LoRA-CL {lora}, S-Prompts {prompts} and frozen heads"
        f" {frozen} (" in notes
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["results", "results_96"])
def test_the_committed_page_is_what_the_command_makes(tmp_path, name):
    page = tmp_path / f"{name}.md"
    tables.main(tables.Tables(results=ROOT / f"docs/{name}/runs", page=page))
    assert page.read_text() == (ROOT / f"docs/{name}.md").read_text(), (
        f"make the page again: python experiments/tables.py --results docs/{name}/runs --page"
        f" docs/{name}.md"
    )
    assert (ROOT / f"docs/{name}/accuracy.png").is_file()


def test_a_folder_that_is_not_there_is_named_by_its_option(tmp_path):
    with pytest.raises(ValueError, match="--results names .*nowhere, which is not a folder"):
        tables.main(tables.Tables(results=tmp_path / "nowhere", page=tmp_path / "results.md"))
    assert not (tmp_path / "results.md").exists()
