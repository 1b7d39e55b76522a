"""The page of results: paired estimates against worked values, verdicts, and the committed page itself."""

import json
import re
from collections.abc import Sequence
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
from studies.paper.merit import ahead_line, merit_section, sides_of
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
    np.testing.assert_allclose([found.low, found.high], 0.1 + 1.96 * deviation * np.array([-1, 1]), atol=0.003)
    assert found.p < 0.001
    swapped = accuracy_difference(theirs, ours)
    assert (swapped.value, swapped.p) == (pytest.approx(-0.1), pytest.approx(found.p))


def test_tasks_count_alike_whatever_their_images():
    found = accuracy_difference([[answered(1000), answered(10)]], [[answered(0, 1000), answered(10)]])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_the_interval_over_tasks_is_that_of_drawing_tasks():
    # of 100 tasks half are won by all images and half by none: no image matters, and every task does
    ours = [[answered(10) if task % 2 else answered(0, 10) for task in range(100)]]
    found = accuracy_difference(ours, [[answered(0, 10)] * 100])
    assert found[:3] == pytest.approx((0.5, 0.5, 0.5)) and found.over_tasks is not None
    np.testing.assert_allclose(found.over_tasks, 0.5 + 1.96 * 0.05 * np.array([-1, 1]), atol=0.011)


def test_methods_with_the_same_answers_do_not_differ():
    same = [[answered(30, 20, 50)], [answered(10, 90)]]
    assert accuracy_difference(same, same) == Estimate(0.0, 0.0, 0.0, 1.0, (0.0, 0.0), (0.0, 0.0))


def test_an_interval_may_come_from_seeds_alone():
    # one seed gains all images and the other none: means of two drawn seeds are 0, 0.5 and 1, a quarter at either end
    found = accuracy_difference([[answered(50)], [answered(50)]], [[answered(0, 50)], [answered(50)]])
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
    x, y = rng.normal(size=(2, 12)), rng.integers(0, 4, size=(2, 12)).astype(float)
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

    assert [above(of(*ends)) for ends in ((0.1, 0.2), (-0.1, 0.2), (-0.2, -0.1), (0, 0))] == [HOLDS, OPEN, FAILS, OPEN]
    assert [below(of(*ends)) for ends in ((0.1, 0.2), (-0.1, 0.2), (-0.2, -0.1))] == [FAILS, OPEN, HOLDS]
    assert [within(of(*ends), 0.1) for ends in ((-0.05, 0.05), (-0.2, 0.05), (0.2, 0.3))] == [HOLDS, OPEN, FAILS]
    assert claims.largest_gap() == pytest.approx(0.022)  # ViT-Base on MTIL: 88.1 and 85.9


def write(
    folder: Path, method: str = "cheem", seed: int = 0, rate: float = 0.8, names: Sequence[str] = NAMES,
    processor: str = "a processor", pixels: int | None = None, **config,
) -> Path:  # fmt: skip
    """A collected run with 200 test images per task, of which about `rate` are right."""
    rng, directory = np.random.default_rng(seed), folder / f"{method}{len(list(folder.glob('*')))}/seed-{seed}"
    luck = {name: rng.random((2, 200)) for name in NAMES}  # the same for all methods
    given = tuple(luck[name][0] < rate for name in names)
    right = tuple(is_right & (luck[name][1] < 0.9) for is_right, name in zip(given, names, strict=True))
    results = results_of(list(entries(names=names, classes=("cat", "dog"), method=method, seed=seed)))
    results["image_size"] = pixels or results["image_size"]
    for name, found in (("accuracy", right), ("local_accuracy", given)):
        results[name][-1] = [float(task.mean()) for task in found]
    results["average_accuracy"], results["local_average_accuracy"] = (
        float(np.mean(results[name][-1])) for name in ("accuracy", "local_accuracy")
    )
    if method == "cheem":
        results["yardsticks"] = {"frozen_linear": {**results, "local_accuracy": [[0.9, 0.2, 0.5]], "yardsticks": {}}}
        if config.get("sampling") == "uniform":
            for task in results["tasks"]:
                task["params_added_percent"] += 1 + task["name"].count("e")
    own = [word for name, value in config.items() for word in (f"--{method}.{name}", str(value))]
    record = {
        "command": [
            "mtil.py", "--stream", "DATA", "--tasks", ",".join(names), "--router", "None", *own, "--no-tensorboard",
            f"--{method}.epochs", "3", "--seed", str(seed), "--run-dir", "RUN_DIR",
        ],
        "data": {"stream": "DATA", "split_seed": 0},
        "conditions": {"device": {"processor": processor, "threads": 2, "platform": "cpu"}},
    }  # fmt: skip
    held = {"tasks": list(names), "seed": seed, "weights_sha256": "w", method: {"epochs": 3, "batch_size": 8, **config}}
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
    (tmp_path / "notes.md").write_text("- Written by hand.\n")
    first = page_of(tmp_path)
    picture = (tmp_path / "docs/results/accuracy.png").read_bytes()
    assert first == page_of(tmp_path) and picture == (tmp_path / "docs/results/accuracy.png").read_bytes()
    assert line_of(first, "CHEEM − LoRA-CL") == ["no run of LoRA-CL", "–", "–", "–", "–", "not run"]
    assert line_of(first, "CHEEM in other orders")[-1] == "not run"
    assert first.endswith("## What these runs do not show\n\n- Written by hand.\n")
    assert "nan" not in first and "None" not in first and "frozen, linear heads (inside CHEEM's runs)" in first
    assert "(a), (b)" not in first and str(tmp_path) not in first


def test_the_same_sentence_holds_or_does_not_as_the_numbers_say(tmp_path):
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
    write(tmp_path / "runs", search={"cost": "resumed"})
    page = page_of(tmp_path)
    worse, alone = line_of(page, "CHEEM − S-Prompts"), line_of(page, "CHEEM − LoRA-CL")
    assert worse[-1] == "**does not hold**" and worse[0].startswith("−1") and worse[4].count(":") == 3
    assert alone[-1] == "holds (one seed)" and alone[4].startswith("1: +2")
    assert "rests on a single seed" in page
    assert line_of(page, "S-Prompts − L2P")[-1] == "holds (one seed)"
    assert line_of(page, "CHEEM − full fine-tuning, task ID given to both")[-1] == "holds (one seed)"
    assert line_of(page, "CHEEM, order2 − usual order")[:2] == ["0.0 points", "0.0 to 0.0"]
    # parameters: 1.5 against 1.5 + 1 and the letters e of "one", "two" and "three", 1, 0 and 2
    assert line_of(page, "HEE − uniform, parameters added per task")[0] == "−2.00 % of the backbone"
    [good] = re.findall(r"^- Hold here: (.*)$", page, re.MULTILINE)
    [bad] = re.findall(r"^- \*\*Do not hold here\*\*: (.*)$", page, re.MULTILINE)
    assert [re.findall(r"\((\w)\)", claims) for claims in (good, bad)] == [["a", "e", "g"], ["b", "c"]]
    [unbeaten] = re.findall(r"^- \*\*More accurate\*\* than CHEEM with the paper's router: (.*)$", page, re.MULTILINE)
    assert unbeaten.startswith("S-Prompts (CHEEM −1") and not {"L2P", "LoRA-CL", "full"} & set(
        re.findall(r"[\w-]+", unbeaten)
    )
    against = page[page.index("| CHEEM minus |") :].split("\n\n")[0]
    assert [line.split(" | ")[0] for line in against.splitlines()[2:]] == ["| LoRA-CL", "| S-Prompts", "| L2P"]
    assert "### Variants and other orders" in page and "| CHEEM, uniform | 0 |" in page
    assert "| as CHEEM, but for the tasks in the order three one two |" in page
    assert "| CHEEM, uniform | 0 | as CHEEM, but for sampling uniform |" in page
    assert "| CHEEM, order2 | 0.0 points | 0.0 to 0.0 | 0.0 to 0.0 | 1.000 | 0: 0.0 |" in page
    assert "--methods cheem,s_prompts --seeds 0,1,2" in page and "--methods lora_cl --seeds 1,7" in page
    assert "| CHEEM, shared-prefix FLOPs, executed |" in page  # of the figures of merit
    assert "python experiments/compare.py --stream DATA --tasks one,two,three" in page


def test_runs_on_another_processor_and_on_larger_pictures_stand_beside_the_others(tmp_path):
    write(tmp_path / "runs", rate=0.8)
    write(tmp_path / "runs", seed=1, rate=0.9)
    write(tmp_path / "runs", "s_prompts", rate=0.6)
    write(tmp_path / "runs", "lora_cl", seed=1, rate=0.6)  # never made again
    write(tmp_path / "runs", sampling="uniform", rate=0.7)
    plain = page_of(tmp_path)
    assert "kind of processor" not in plain and "The same pictures at" not in plain
    write(tmp_path / "again", rate=0.7, processor="another")
    write(tmp_path / "at_64", "frozen_linear", rate=0.99, pixels=64)
    write(tmp_path / "at_128", "frozen_linear", rate=0.5, pixels=128)
    page = page_of(tmp_path)
    section = page[page.index("### The same seed on another kind of processor") :]
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in section.splitlines() if " − " in line}
    assert list(rows) == ["CHEEM run again − CHEEM above", "CHEEM − S-Prompts", "CHEEM, uniform − CHEEM"]
    first = float(rows["CHEEM run again − CHEEM above"][0].removesuffix(" points").replace("−", "-"))
    above, again = (float(rows["CHEEM − S-Prompts"][side].removesuffix(" points")) for side in (0, 2))
    assert first < -5 and again - above == pytest.approx(first, abs=0.11)
    assert rows["CHEEM, uniform − CHEEM"][2] == "0.0 points"  # the same answers
    assert "other networks for 0 of 3 tasks" in section and "- another, 2 threads" in section
    short = page[page.index("## In short") : page.index("## What the paper")]
    small, large = (short.index(f"- At {pixels} pixels instead of {first_size(tmp_path)}") for pixels in (64, 128))
    assert small < large and short.count("more than any method without the task ID") == 1
    write(tmp_path / "runs", "tuna", rate=1.0)
    assert "more than any method without" not in page_of(tmp_path)


def first_size(tmp_path: Path) -> int:
    return next(iter(load(tmp_path / "runs")[claims.CHEEM].values())).run.results["image_size"]


def test_a_verdict_that_hangs_on_the_processor_is_named(tmp_path):
    write(tmp_path / "runs", rate=0.8)
    write(tmp_path / "runs", "s_prompts", rate=0.7)
    write(tmp_path / "again", rate=0.7, processor="another")
    assert "With CHEEM's run on another kind of processor (b) would be “not decided” instead of “holds”." in page_of(
        tmp_path
    )


@pytest.mark.parametrize(
    ("folder", "run", "why"),
    [
        ("again", {"rate": 0.7}, "both ran on a processor"),
        ("again", {"seed": 1, "processor": "another"}, "no run there is of its method, settings and seed"),
        ("again", {"names": NAMES[::-1], "processor": "another"}, "its tasks are three, two, one"),
        ("again", {"batch_size": 4, "processor": "another"}, r"its settings differ from .*: cheem.batch_size is .*"),
        ("at_64", {"method": "frozen_linear"}, r"its size is \d+ as well"),
    ],
)
def test_what_does_not_belong_beside_the_runs_is_named(folder, run, why, tmp_path):
    write(tmp_path / "runs")
    write(tmp_path / folder, **run)
    with pytest.raises(ValueError, match=f"{folder}.*seed-.* is not a run .*: {why}; remove it"):
        page_of(tmp_path)
    assert not (tmp_path / "docs/results.md").exists()


def test_all_lines_of_a_claim_decide_it():
    def judged(*words: str) -> str:
        found = Estimate(0.1, 0.0, 0.2, 1.0, (0.1,))
        lines = [claims.Verdict("x", None if word == NOT_RUN else found, "points", (0, 1), word) for word in words]
        return in_short([(claims.claims()[0], lines)])

    assert judged(HOLDS, HOLDS).startswith("- Hold here") and judged(HOLDS, OPEN).startswith("- Not decided")
    assert judged(HOLDS, NOT_RUN).startswith("- Not run, or not in full")
    assert judged(NOT_RUN, FAILS, OPEN).startswith("- **Do not hold here**")


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


@pytest.mark.full
def test_the_committed_page_is_what_the_command_makes(tmp_path):
    page = tmp_path / "results.md"
    tables.main(tables.Tables(results=ROOT / "docs/results/runs", page=page))
    assert page.read_text() == (ROOT / "docs/results.md").read_text(), (
        "make the page again: python experiments/tables.py --results docs/results/runs"
    )
    assert (ROOT / "docs/results/accuracy.png").is_file()


def test_a_folder_that_is_not_there_is_named_by_its_option(tmp_path):
    with pytest.raises(ValueError, match="--results names .*nowhere, which is not a folder"):
        tables.main(tables.Tables(results=tmp_path / "nowhere", page=tmp_path / "results.md"))
    assert not (tmp_path / "results.md").exists()


def test_the_figure_of_merit_is_told_by_both_counts_and_of_both_routers():
    def row(accuracy, paper, executed, **given):
        values = {"average_accuracy": accuracy, "flops_paper": paper, "flops_executed": executed, **given}
        return {name: {"mean": value, "std": None} for name, value in values.items()}

    measured = {
        "cheem": row(0.6, 2.0, 1.5), "lora_cl": row(0.5, 3.0, 2.5), "l2p": row(0.75, 3.0, 2.5),
        "full_finetune": row(0.0, 1.0, 1.0, local_average_accuracy=0.7),
    }  # fmt: skip
    titles = {name: name.upper() for name in measured}
    chosen = {
        "features": "early",
        "title": "LDA",
        "cheem": {"accuracy": 0.65},
        "flops": {"paper": 1.6, "executed": 1.0},
    }
    page = merit_section(sides_of(titles, measured, {"chosen": chosen}, {}), {})

    def cells(method):
        [line] = [line for line in page.splitlines() if line.startswith(f"| {method} |")]
        return [cell.strip() for cell in line.strip("|").split("|")][1:]

    # gaps 0.2 and 0.1, FLOPs 3 / 2 and 2.5 / 1.5; then gaps 0.2 and 0.05, FLOPs 3 / 1.6 and 2.5 / 1
    assert cells("LORA_CL") == ["20.0", "3.00", "3.33", "7.50", "10.00"]
    assert cells("CHEEM") == ["10.0", "–", "–", "2.50", "3.00"]
    assert cells("L2P") == ["-5.0", "–", "–", "–", "–"] and "FULL_FINETUNE" not in page
    assert cells("CHEEM, early LDA") == ["5.0", "0.40", "0.33", "–", "–"]
    added, lora = {"paper": -0.4, "executed": -0.5}, {**chosen, "lora_cl": {"accuracy": 0.6}}
    fair = merit_section(sides_of(titles, measured, {"chosen": lora}, added), {})
    # with the same router: gaps 0.1 and 0.05, FLOPs 2.6 / 1.6 and 2 / 1
    [line] = [line for line in fair.splitlines() if line.startswith("| LORA_CL, early LDA |")]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == ["10.0", "1.30", "1.33", "3.25", "4.00"]
    other = merit_section(sides_of(titles, measured, None, {}), {"CHEEM, resumed": row(0.65, 2.5, 1.0)})
    [line] = [line for line in other.splitlines() if line.startswith("| LORA_CL |")]
    assert line == "| LORA_CL | 20.0 | 3.00 | 3.33 | 4.80 | 10.00 |"  # gaps 0.2 and 0.05, FLOPs 3 / 2.5 and 2.5 / 1
    assert "LDA" not in merit_section(sides_of(titles, measured, None, {}), {})
    few = {**measured, "ewc": {**row(0.58, 1.0, 1.0), "seeds": [0]}}  # gaps 0.12 and 0.1, half of the FLOPs
    lora = {**chosen, "lora_cl": {"accuracy": 0.69}}  # gaps 0.01 and 0.05, FLOPs 2.6 / 1.6
    assert ahead_line(sides_of({**titles, "ewc": "EWC"}, few, {"chosen": lora}, added)).endswith(
        "CHEEM with the paper's router: L2P (not below the reference), EWC (0.60, one seed); "
        "than CHEEM, early LDA: L2P (not below the reference), LORA_CL, early LDA (0.33)."
    )
    assert ahead_line(sides_of(titles, {"cheem": measured["cheem"]}, None, {})) == ""
    assert "needs runs of CHEEM and of full" in merit_section(None, {})
