"""Tables of a page of results: paired estimates are compared with worked values, and verdicts with
their intervals."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import study
import tables
from page_runs import entries
from scipy.stats import spearmanr, ttest_1samp

from cheem_jax.run.results import results_of
from studies.paper.claims import (
    CONFIRMED,
    NEGATIVE,
    OPEN,
    POSITIVE,
    REFUTED,
    TOO_FEW,
    largest_gap,
    verdict,
)
from studies.paper.collected import load, pack
from studies.paper.paired import Estimate, accuracy_difference, mean_difference, rank_correlation

NAMES = ("one", "two", "three")


def correct(*counts: int) -> np.ndarray:
    """Make runs of correct, wrong, correct, ... predictions with these lengths."""
    return np.repeat(np.arange(len(counts)) % 2 == 0, counts)


def test_the_interval_of_one_seed_is_the_analytic_one():
    # of 400 images, 60 are correct for our side only and 20 for the other side only: the variance
    # is 0.2 - 0.1^2
    ours, theirs = [[correct(60, 20, 320)]], [[correct(0, 60, 340)]]
    estimate = accuracy_difference(ours, theirs)
    deviation = np.sqrt((0.2 - 0.1**2) / 400)
    assert estimate.value == pytest.approx(0.1) and estimate.per_seed == (pytest.approx(0.1),)
    ends = 0.1 + 1.96 * deviation * np.array([-1, 1])
    np.testing.assert_allclose([estimate.low, estimate.high], ends, atol=0.003)
    assert estimate.p < 0.001
    swapped = accuracy_difference(theirs, ours)
    assert (swapped.value, swapped.p) == (pytest.approx(-0.1), pytest.approx(estimate.p))


def test_tasks_have_equal_weights_and_an_interval_of_resampled_tasks():
    estimate = accuracy_difference(
        [[correct(1000), correct(10)]], [[correct(0, 1000), correct(10)]]
    )
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)
    # all images of half of the 100 tasks are correct, and none of the other half: only the choice
    # of tasks matters
    ours = [[correct(10) if task % 2 else correct(0, 10) for task in range(100)]]
    over_tasks = accuracy_difference(ours, [[correct(0, 10)] * 100]).over_tasks
    np.testing.assert_allclose(over_tasks, 0.5 + 1.96 * 0.05 * np.array([-1, 1]), atol=0.011)


def test_published_intervals_are_those_of_formulas_on_the_collected_bits():
    folder = Path(__file__).parents[3] / "docs/results"
    page = (folder.parent / "results.md").read_text()

    def correct_of(method: str, seed: int) -> list[np.ndarray]:
        with np.load(folder / f"runs/{method}/seed-{seed}/right.npz") as stored:
            ends = np.cumsum(stored["num_images"])
            bits = np.unpackbits(stored["right"])[: ends[-1]]
        return np.split(bits.astype(float), ends[:-1])

    def row(compared: str) -> list[float]:
        # a claim and its form with a margin have the same numbers
        lines = (line for line in page.splitlines() if f" | {compared} |" in line)
        cells = {tuple(line.split(" | ")[3:5]) for line in lines}
        [numbers] = cells
        return [float(n) for n in re.findall(r"[+-]?\d+\.\d", " ".join(numbers).replace("−", "-"))]

    def leads(method: str, seed: int) -> list[np.ndarray]:
        pairs = zip(correct_of(method, seed), correct_of("lora_cl", seed), strict=True)
        return [ours - theirs for ours, theirs in pairs]

    # one seed: the variance of a mean over tasks of means over images
    lead = leads("cheem", 0)
    mean = np.mean([task.mean() for task in lead])
    error = np.sqrt(sum(task.var() / len(task) for task in lead)) / len(lead)
    wanted = 100 * (mean + error * np.array([0, -1.96, 1.96]))
    np.testing.assert_allclose(row("CHEEM − LoRA-CL")[:3], wanted, atol=0.11)

    # three seeds: Student's t with two degrees of freedom is wider than the spread of the images
    means = [
        np.mean([task.mean() for task in leads("cheem-closed_form", seed)]) for seed in range(3)
    ]
    error = np.std(means, ddof=1) / np.sqrt(3)
    wanted = 100 * (np.mean(means) + error * np.array([0, -4.303, 4.303]))
    np.testing.assert_allclose(row("CHEEM, closed-form score − LoRA-CL")[:3], wanted, atol=0.06)


def test_seeds_are_resampled():
    same = [[correct(30, 20, 50)], [correct(10, 90)]]
    assert accuracy_difference(same, same) == Estimate(0.0, 0.0, 0.0, 1.0, (0.0, 0.0), (0.0, 0.0))
    # all images differ for one seed and none for the other: means of two resampled seeds are 0, 0.5
    # and 1
    estimate = accuracy_difference([[correct(50)]] * 2, [[correct(0, 50)], [correct(50)]])
    # Student's t with one degree of freedom: 12.706 standard errors of 0.5 each, and p = 0.5
    ends = 0.5 + 12.706 * 0.5 * np.array([-1, 1])
    np.testing.assert_allclose([estimate.low, estimate.high], ends, rtol=1e-4)
    assert estimate.value == 0.5 and estimate.p == pytest.approx(0.5, abs=0.03)
    # identical predictions of three seeds do not count as three times as many images
    ours, theirs = [correct(60, 20, 320)], [correct(0, 60, 340)]
    one, three = (accuracy_difference([ours] * num, [theirs] * num) for num in (1, 3))
    assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.05)


def test_a_small_difference_of_three_seeds_is_that_of_a_t_test():
    # leads of 3, 11 and 10 of 1,000 images, almost without noise of the images
    theirs = [[correct(0, 20, 980)]] * 3
    ours = [[correct(lead, 20 - lead, 980)] for lead in (3, 11, 10)]
    leads = np.array([0.003, 0.011, 0.010])
    test = ttest_1samp(leads, 0)
    estimate = accuracy_difference(ours, theirs)
    assert estimate.value == pytest.approx(leads.mean())
    assert test.pvalue > 0.05 and estimate.p >= test.pvalue
    interval = test.confidence_interval()
    assert estimate.low <= interval.low < 0 and estimate.high >= interval.high
    assert estimate.over_tasks[0] <= interval.low
    assert verdict(estimate, POSITIVE) == OPEN


@pytest.mark.parametrize(
    ("num", "word"), [(1, TOO_FEW), (2, TOO_FEW), (3, CONFIRMED), (4, CONFIRMED)]
)
def test_a_verdict_needs_three_seeds(num, word):
    estimate = accuracy_difference([[correct(80, 20)]] * num, [[correct(0, 100)]] * num)
    assert verdict(estimate, POSITIVE) == word


@pytest.mark.parametrize("sides", [([[correct(3)]], [[correct(4)]]), ([], [])])
def test_sides_with_different_images_are_refused(sides):
    with pytest.raises(ValueError, match="test images by seed and task; expected the same tasks"):
        accuracy_difference(*sides)


def test_a_mean_over_tasks_has_the_interval_of_the_tasks():
    ours = np.random.default_rng(0).normal(1.0, 0.5, (1, 100))
    estimate = mean_difference(ours, np.zeros((1, 100)))
    assert estimate.value == pytest.approx(ours.mean())
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * ours.std() / 10, rel=0.05)


def test_the_rank_correlation_is_that_of_spearman():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 12))
    y = rng.integers(0, 4, size=(2, 12)).astype(float)
    estimate = rank_correlation(x, y)
    np.testing.assert_allclose(
        estimate.per_seed, [spearmanr(x[seed], y[seed])[0] for seed in (0, 1)]
    )
    assert estimate.low < estimate.value < estimate.high
    # the permutation p of one row is close to the p of Student's t
    one = rank_correlation(x[:1], y[:1])
    assert one.p == pytest.approx(spearmanr(x[0], y[0])[1], abs=0.03)
    rising = np.arange(8.0)[None]
    assert rank_correlation(rising, rising**3)[:3] == pytest.approx((1, 1, 1))
    with pytest.raises(ValueError, match="at least two different values"):
        rank_correlation(rising, np.zeros((1, 8)))


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.1, 0.2), (CONFIRMED, REFUTED, OPEN)),
        ((-0.05, 0.05), (OPEN, OPEN, CONFIRMED)),
        ((-0.3, -0.2), (REFUTED, CONFIRMED, REFUTED)),
    ],
)
def test_a_verdict_compares_the_interval_with_the_values_that_agree(ends, words):
    estimate = Estimate(0.0, *ends, 1.0, (0.0,) * 3)
    ranges = (POSITIVE, NEGATIVE, (-0.15, 0.15))
    assert tuple(verdict(estimate, agree) for agree in ranges) == words
    assert largest_gap() == pytest.approx(0.022)  # ViT-Base on MTIL: 88.1 and 85.9


def write(
    folder: Path,
    method: str = "cheem",
    seed: int = 0,
    rate: float = 0.8,
    names: Sequence[str] = NAMES,
    **config,
) -> Path:
    """Write a collected run with 200 test images per task; the share of correct predictions is
    about `rate`."""
    rng = np.random.default_rng(seed)
    directory = folder / f"{method}{len(list(folder.glob('*')))}/seed-{seed}"
    uniform = {name: rng.random((2, 200)) for name in NAMES}  # identical for all methods
    correct_given = tuple(uniform[name][0] < rate for name in names)
    right = tuple(
        given_of_task & (uniform[name][1] < 0.9)
        for given_of_task, name in zip(correct_given, names, strict=True)
    )
    entry_list = entries(names=names, classes=("cat", "dog"), method=method, seed=seed)
    results = results_of(list(entry_list))
    for name, by_task in (("accuracy", right), ("local_accuracy", correct_given)):
        results[name][-1] = [float(task.mean()) for task in by_task]
    results["average_accuracy"] = float(np.mean(results["accuracy"][-1]))
    results["local_average_accuracy"] = float(np.mean(results["local_accuracy"][-1]))
    if method == "cheem":
        heads = {**results, "local_accuracy": [[0.9, 0.2, 0.5]], "references": {}}
        results["references"] = {"frozen_linear": heads}
    if config.get("sampling") == "uniform":
        for task in results["tasks"]:
            task["params_added_percent"] += 1 + task["name"].count("e")
    contents = {
        "results": results,
        "record": {"command": ["mtil.py"], "data": {"stream": "DATA"}, "conditions": {}},
        "config": {
            "tasks": list(names),
            "seed": seed,
            "weights_sha256": "w",
            method: {"epochs": 3, "batch_size": 8, **config},
        },
    }
    directory.mkdir(parents=True)
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "right.npz").write_bytes(pack(right, correct_given))
    return directory


def page_of(tmp_path: Path) -> str:
    tables.main(tables.Tables(results=tmp_path / "runs", page=tmp_path / "docs/results.md"))
    return (tmp_path / "docs/results.md").read_text()


def row_of(page: str, name: str) -> list[str]:
    """Return the cells after the cell with this name."""
    line = next(line for line in page.splitlines() if f"| {name} |" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return cells[cells.index(name) + 1 :]


def agreement_in(page: str) -> dict[str, list[str]]:
    """Return the rows of the differences that the paper prints, keyed by comparison."""
    lines = page[page.index("## Agreement") :].splitlines()[4:]
    return {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}


def test_one_run_makes_tables_without_a_comparison_that_are_always_identical(tmp_path):
    write(tmp_path / "runs")
    page = page_of(tmp_path)
    figure = (tmp_path / "docs/results/accuracy.png").read_bytes()
    assert page == page_of(tmp_path)
    assert figure == (tmp_path / "docs/results/accuracy.png").read_bytes()
    assert "(a) CHEEM" not in page and not {"nan", "None", str(tmp_path)} & set(page.split())


def test_every_claim_is_checked_with_its_runs(tmp_path):
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
    page = page_of(tmp_path)
    prompts = row_of(page, "CHEEM − S-Prompts")
    assert (
        prompts[0] == "**refuted**" and prompts[1].startswith("−1") and prompts[5].count(":") == 3
    )
    lora = row_of(page, "CHEEM − LoRA-CL")
    assert lora[0] == TOO_FEW and lora[5].startswith("1: +2")
    assert row_of(page, "S-Prompts − L2P")[0] == TOO_FEW
    bound = row_of(page, "CHEEM − full fine-tuning, task ID given to both")
    assert bound[0] == TOO_FEW
    assert row_of(page, "CHEEM, order2 − usual order")[1:3] == ["0.0 points", "0.0 to 0.0"]
    # parameters: 1.5, and 2.5 plus the number of letters e in the name: 1, 0 and 2
    added = row_of(page, "HEE − uniform, parameters added per task")
    assert added[1] == "−2.00 % of the backbone"
    leads = {name: row_of(page, name)[3] for name in ("LoRA-CL", "full fine-tuning *")}
    for row, lead in zip((lora, bound), leads.values(), strict=True):
        assert lead == f"{row[1].removesuffix(' points')} ({row[2]})"
    assert "| CHEEM, uniform | as CHEEM, but for sampling uniform |" in page


def test_the_closed_form_search_has_separate_rows(tmp_path):
    write(tmp_path / "runs", rate=0.7)
    search = {"score": "closed_form", "rate": 0.9}
    write(tmp_path / "runs", **search)
    write(tmp_path / "runs", sampling="uniform", **search)
    write(tmp_path / "runs", names=NAMES[::-1], **search)
    write(tmp_path / "runs", "lora_cl", rate=0.8)
    row = {"title": "LoRA-CL", "setting": "rate", "values": [1e-3, 3e-3, 1e-2], "chosen": 3e-3}
    row |= {"method": "lora_cl", "accuracies": [0.5, 0.75, None], "at_the_end": False}
    (tmp_path / "chosen.json").write_text(json.dumps([row]))
    page = page_of(tmp_path)
    title = "CHEEM, closed-form score"
    assert row_of(page, "CHEEM − LoRA-CL")[0] == TOO_FEW
    assert row_of(page, f"{title} − LoRA-CL")[0] == TOO_FEW
    added = row_of(page, f"{title}: HEE − uniform, parameters added per task")
    assert added[1] == "−2.00 % of the backbone"
    assert row_of(page, f"{title}, reversed − usual order")[1:3] == ["0.0 points", "0.0 to 0.0"]
    assert " | HEE − uniform" not in page and f"| {title} minus |" in page
    assert "rate 0.001: 50.0, **0.003: 75.0** |" in page


def test_our_differences_are_next_to_those_that_the_paper_prints(tmp_path):
    for seed in (0, 1, 2):
        write(tmp_path / "runs", seed=seed, rate=0.8)
        write(tmp_path / "runs", "lora_cl", seed=seed, rate=0.95)
    write(tmp_path / "runs", "s_prompts")
    write(tmp_path / "runs", "l2p")
    write(tmp_path / "runs_32", rate=0.9)
    write(tmp_path / "runs_32", "lora_cl", rate=0.5)
    page = page_of(tmp_path)
    rows = agreement_in(page)
    # MTIL and VDD with DeiT-Tiny, ViT-B and CLIP: 74.51 - 71.06, 76.18 - 74.01, ...
    assert rows["CHEEM − LoRA-CL"][1:7] == ["+3.5", "+2.2", "+1.2", "+0.7", "−0.4", "−1.3"]
    assert rows["HEE − uniform, accuracy"][1:5] == ["−0.5", "–", "+1.1", "–"]
    assert rows["HEE − uniform, parameters added per task"][1] == "−8.6"  # 6.32 - 14.93
    ours, smaller = rows["CHEEM − LoRA-CL"][7:]
    assert ours.startswith("−1") and ours.endswith(f", {REFUTED}")
    assert smaller.startswith("+4") and smaller.endswith(f", {TOO_FEW}")
    assert rows["S-Prompts − L2P"][7] == f"0.0 (0.0 to 0.0), {TOO_FEW}"
    assert rows["S-Prompts − L2P"][8] == "–"
    assert "## Methods_32" in page


def test_elimination_is_compared_with_the_baseline_whose_rate_rises_too(tmp_path):
    write(tmp_path / "runs")
    write(tmp_path / "runs_32_chosen", sampling="anchored", ops={"truncated_rank": 32})
    write(tmp_path / "runs_32_chosen", "lora_cl", rate=0.5, fit={"schedule": "warm_cosine"})
    write(tmp_path / "runs_32_chosen", "s_prompts", rate=0.95)
    write(tmp_path / "runs", "lora_cl")
    page = page_of(tmp_path)
    rows = agreement_in(page)
    assert rows["compared"][-1] == "CHEEM, elimination, 32 pixels, chosen"
    for name, sign in (("CHEEM − LoRA-CL", "+"), ("CHEEM − S-Prompts", "−")):
        assert rows[name][-1].startswith(sign)
    assert row_of(page, "LoRA-CL, rising rate")[3].startswith("+")


def test_corrupted_runs_are_refused(tmp_path):
    directory = write(tmp_path / "runs")
    file = directory / "right.npz"
    content = file.read_bytes()
    file.write_bytes(content[:-60])
    with pytest.raises(ValueError, match=r"right.npz cannot be read .*collect the run again"):
        page_of(tmp_path)
    all_wrong = tuple(np.zeros(200, bool) for _ in NAMES)
    file.write_bytes(pack(all_wrong, all_wrong))
    with pytest.raises(ValueError, match="do not give the accuracy of its results"):
        page_of(tmp_path)
    file.write_bytes(content)
    (write(tmp_path / "runs", "l2p") / "results.json").unlink()
    with pytest.raises(ValueError, match="cannot be used: .*unfinished"):
        page_of(tmp_path)
    assert not (tmp_path / "docs/results.md").exists()


def test_options_without_effect_and_broken_files_are_refused(tmp_path):
    for options, message in (
        ({"results": tmp_path, "only": "fom"}, "no effect with --results: --only;"),
        (
            {"results": tmp_path, "out": tmp_path, "runs": (tmp_path,)},
            "no effect with --results: --runs, --out;",
        ),
        ({"page": tmp_path / "a.md"}, "no effect without --results: --page;"),
        ({"results": tmp_path, "page": tmp_path / "a"}, "expected a file that ends in .md"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.main(tables.Tables(**options))
    write(tmp_path / "runs")
    for name, text in (("routers.json", "{broken"), ("chosen.json", '[{"method": "cheem"}]')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} cannot be read .*; expected the {name} that"):
            page_of(tmp_path)
        (tmp_path / name).unlink()


def test_a_page_with_tables_of_other_runs_is_refused_and_not_changed(tmp_path):
    write(tmp_path / "runs_32", rate=0.9)
    write(tmp_path / "runs")
    page_of(tmp_path)
    shutil.rmtree(tmp_path / "runs_32")
    page = tmp_path / "docs/results.md"
    before = page.read_text()
    with pytest.raises(ValueError, match="has tables that .* does not give: methods_32; add"):
        page_of(tmp_path)
    assert page.read_text() == before


def test_accuracies_of_validation_images_are_not_on_the_page(tmp_path):
    config = write(tmp_path / "runs") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"measured_on": "validation"}))
    with pytest.raises(ValueError, match="measured on validation images"):
        page_of(tmp_path)


def test_finished_runs_of_other_weights_are_not_one_study(tmp_path):
    runs = [write(tmp_path / "runs", seed=seed) for seed in (0, 1)]
    study.check_finished([*runs, tmp_path / "not begun"])
    config = json.loads((runs[1] / "config.json").read_text())
    (runs[1] / "config.json").write_text(json.dumps(config | {"weights_sha256": "other"}))
    with pytest.raises(ValueError, match="weights_sha256"):
        study.check_finished(runs)


def test_folders_without_collected_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"contains no collected run; .*experiments/collect.py"):
        load(tmp_path)
    with pytest.raises(ValueError, match="--results names .*nowhere, which is not a folder"):
        load(tmp_path / "nowhere")
