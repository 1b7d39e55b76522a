"""The phases of one task under the search's own options: what they compare, begin with, tell and keep."""

import contextlib
import dataclasses
import itertools

import jax
import numpy as np
import pytest
import small

from cheem_jax import hee, training
from cheem_jax.architecture import decode
from cheem_jax.evolution import Scored, rank
from cheem_jax.execution.stages import Stages
from cheem_jax.flops import executed_flops, executed_pass_flops
from cheem_jax.interruption import Stop
from cheem_jax.keys import Keys
from cheem_jax.methods import cheem
from cheem_jax.methods.cheem import Cheem
from cheem_jax.methods.learning import Candidates, Tables, first_genomes
from cheem_jax.methods.method import FrozenFeatures, Undisturbed
from cheem_jax.pool import pool_sizes
from cheem_jax.rolling import Rolling
from cheem_jax.supernet import OpSettings, Supernet
from cheem_jax.training import architecture_flops, resumed_flops


class Halt(Exception):
    """Ends a process in the middle."""


class Halting:
    """Saves at the first report after so many images of the search, and ends there."""

    saved = None

    def __init__(self, rolling, num_images):
        self.rolling, self.num_images = rolling, num_images

    @contextlib.contextmanager
    def phase(self, name, total, state=None):
        done = 0

        def advance(num_images, note="", /):
            nonlocal done
            done += num_images
            if name == "search" and done >= self.num_images and not num_images:
                self.rolling.save(0, state)
                raise Halt

        yield advance


class Resumed(Undisturbed):
    """Goes on from what was saved; counts the images of the search, and those that each phase announces."""

    def __init__(self, saved):
        self.saved, self.num_images, self.totals = saved, 0, {}

    @contextlib.contextmanager
    def phase(self, name, total, state=None):
        def advance(num_images, note="", /):
            self.num_images += num_images if name == "search" else 0

        self.totals[name] = self.totals.get(name, 0) + total
        yield advance


@pytest.fixture(scope="module")
def stages():
    return Stages(small.backbone(), "mlp_down")


def learner(stages, generations=3, **options):
    search = dataclasses.replace(small.QUICK.search, generations=generations, **options)
    config = dataclasses.replace(small.QUICK, search=search)
    return Cheem(stages, config, Keys(0), None, FrozenFeatures(stages, config.batch_size))


TABLE = np.array([[0.1, 0.2, 0.3, 0.1, 0.2, 0.1, 0, 0], [0.1, 0.2, 0.2, 0.3, 0, 0, 0, 0]])
SIMILARITY = np.array([[0.0, 0.0], [-0.5, np.nan], [0.9, 0.1]])


def candidates(earlier):
    return Candidates(((0, 3), (0,)), (), (2, 1), (), earlier)


def test_a_warm_start_is_the_likeliest_all_reuse_all_adapt_and_earlier_networks_by_similarity():
    # block 0 offers Reuse(0), Reuse(1), Adapt(0), Adapt(1), New, Skip; block 1 Reuse, Adapt, New, Skip
    found = first_genomes(Tables(TABLE, TABLE), candidates([(0, 0), (0, None), (1, 0)]), SIMILARITY)
    assert found.tolist() == [[2, 3], [0, 0], [2, 1], [1, 0], [0, 3]]


def test_a_warm_start_leaves_out_what_holds_a_removed_op():
    tables = Tables(*(hee.without(table, ("skip",), (2, 1)) for table in (TABLE, TABLE)))
    found = first_genomes(tables, candidates([(0, 0), (0, None), (1, 0)]), SIMILARITY)
    assert found.tolist() == [[2, 1], [0, 0], [2, 1], [1, 0]]


def test_the_resumed_cost_prefers_the_longer_prefix_of_the_base_in_a_tie(stages):
    supernet = Supernet(jax.random.key(0), stages.base_pool, 3, OpSettings(rank=2))
    assert pool_sizes(stages.base_pool) == (1, 1, 1, 1)
    early_skip, late_adapt, base = [3, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]
    genomes, correct = np.array([early_skip, late_adapt, base]), np.array([50.0, 50.0, 40.0])

    def best(cost):
        return rank(Scored(genomes, correct, cost(genomes)), 100, 0.02).tolist()[0]

    assert best(architecture_flops(stages, supernet)) == 0  # a Skip saves, Adapt costs
    cost = resumed_flops(stages, supernet, until=4)
    assert best(cost) == 1 and cost(genomes)[2] == 0
    architecture = decode(late_adapt, supernet.sizes)
    assert cost(genomes)[1] == executed_flops(stages.config, "mlp_down", architecture, begin=3)
    # a router that reads only two blocks, or another network, leaves less to resume from
    for until, begin in ((2, 2), (0, None)):
        assert resumed_flops(stages, supernet, until)(genomes)[1] == executed_flops(
            stages.config, "mlp_down", architecture, begin=begin
        )
    # what all choices at block 0 share the router's pass gives as well, but not another network's
    early, shared = decode(early_skip, supernet.sizes), executed_pass_flops(stages.config, "mlp_down", 0)
    whole = executed_flops(stages.config, "mlp_down", early)
    assert cost(genomes)[0] == whole - shared and resumed_flops(stages, supernet, 0)(genomes)[0] == whole


def test_the_report_tells_what_each_option_compared_and_left_out(stages):
    task = small.task("colours", 0)
    plain = learner(stages).learn(task, Undisturbed())
    halved = learner(stages, cost="resumed", rungs=3, warm_start=True).learn(task, Undisturbed())
    assert plain["searched"] == 3 * 6 and set(plain["search"]) == {
        "correct", "flops", "population", "num_images", "chosen",
    }  # fmt: skip
    # 6 are 12, 6 and 3 in three rungs
    assert halved["searched"] == 3 * 12 and halved["search"]["dropped"] == 3 * 9
    assert halved["search"]["population"] == 3 and len(halved["search"]["correct"]) == 3 * 3
    chosen = halved["search"]["chosen"]
    assert halved["search"]["flops"][chosen] == halved["flops"] != halved["search"]["flops_compared"][chosen]
    assert halved["validation_accuracy"] == halved["search"]["correct"][chosen] / halved["search"]["num_images"]


@pytest.mark.full
def test_a_search_with_all_options_goes_on_from_a_rolling_checkpoint(stages, tmp_path):
    options, task = {"cost": "resumed", "rungs": 3, "warm_start": True}, small.task("colours", 0)
    whole = Resumed(None)
    expected = learner(stages, **options).learn(task, whole)
    # 12 candidates on 5 images, 6 on 5 more, 3 on the other 10, per generation
    assert whole.num_images == whole.totals["search"] == 3 * 120
    rolling = Rolling(tmp_path, Stop())
    with pytest.raises(Halt):
        learner(stages, **options).learn(task, Halting(rolling, 240))
    going_on = Resumed(rolling.open(0, print))
    assert going_on.saved is not None and len(going_on.saved.arrays["dropped"]) == 2 * 9
    found = learner(stages, **options).learn(task, going_on)
    assert going_on.num_images == going_on.totals["search"] == 120
    for name in ("search", "searched", "architecture", "finetune_losses"):
        assert found[name] == expected[name]


# hard enough that draws differ in accuracy
HARD = small.task("colours", 0, num_classes=9)


def drawing(stages, num=3, **options):
    search = dataclasses.replace(small.QUICK.search, **options)
    config = dataclasses.replace(small.QUICK, search=search, trained_draws=num)
    return Cheem(stages, config, Keys(0), None, FrozenFeatures(stages, config.batch_size))


# the chosen one is the last of three, and at the larger tolerance the first
@pytest.mark.parametrize("tolerance", [0.02, 1.0])
def test_of_trained_draws_the_first_in_rank_is_kept_as_it_was_trained(stages, tolerance):
    own = drawing(stages, tolerance=tolerance)
    report = own.learn(HARD, Undisturbed())
    found = report["search"]
    assert report["searched"] == len(found["correct"]) == found["population"] == 3
    scored = Scored(np.zeros((3, 4), np.int32), np.array(found["correct"]), np.array(found["flops"]))
    assert found["chosen"] == rank(scored, found["num_images"], tolerance)[0]
    assert found["chosen"] == (2 if tolerance < 1 else 0)
    assert report["flops"] == found["flops"][found["chosen"]] and len(set(found["correct"])) > 1
    assert report["supernet_losses"] == [] and len(report["finetune_losses"]) == small.QUICK.finetune.epochs
    assert set(report["seconds"]) >= {"finetune", "search"} and "supernet" not in report["seconds"]
    # what is remembered answers as what was scored
    right = int((own.predict(HARD.val.images).classes == HARD.val.labels).sum())
    assert right == found["correct"][found["chosen"]]


def test_a_tolerance_chooses_the_cheapest_draw_within_it_though_it_was_not_the_best_then(stages):
    strict, lenient = (drawing(stages, 6, tolerance=t).learn(HARD, Undisturbed()) for t in (0.0, 1.0))
    assert strict["search"]["correct"] == lenient["search"]["correct"]
    assert strict["flops"] > lenient["flops"] == min(lenient["search"]["flops"])
    assert strict["search"]["correct"][strict["search"]["chosen"]] == max(strict["search"]["correct"])


class HaltingAt(Halting):
    """Saves and ends at the given report of the given phase, counted over the whole task."""

    def __init__(self, rolling, place):
        self.rolling, self.place, self.reports = rolling, place, {}

    @contextlib.contextmanager
    def phase(self, name, total, state=None):
        def advance(num_images, note="", /):
            self.reports[name] = self.reports.get(name, 0) + 1
            if (name, self.reports[name]) == self.place:
                self.rolling.save(0, state)
                raise Halt

        yield advance


# 40 images in batches of 16 are 3 steps in each of 4 epochs, 12 for a draw
@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "left"),
    [(("finetune", 5), 408), (("finetune", 17), 248), (("search", 3), 160), (("finetune", 36), 0), (("means", 1), 0)],
)
def test_trained_draws_go_on_from_a_rolling_checkpoint(stages, tmp_path, place, left):
    whole = drawing(stages)
    expected = whole.learn(HARD, Undisturbed())
    rolling = Rolling(tmp_path, Stop())
    with pytest.raises(Halt):
        drawing(stages).learn(HARD, HaltingAt(rolling, place))
    going_on = Resumed(rolling.open(0, print))
    assert going_on.saved is not None
    again = drawing(stages)
    found = again.learn(HARD, going_on)
    assert going_on.totals.get("finetune", 0) == left
    for name in ("search", "architecture", "finetune_losses", "skipped_steps"):
        assert found[name] == expected[name]
    for one, other in zip(whole.memory.tasks, again.memory.tasks, strict=True):
        np.testing.assert_array_equal(one.head.weight, other.head.weight)
        np.testing.assert_array_equal(one.means, other.means)


def test_a_draw_whose_training_diverges_loses_and_the_others_go_on(stages, monkeypatch):
    expected = drawing(stages).learn(HARD, Undisturbed())
    chosen, fits = expected["search"]["chosen"], itertools.count()

    def diverging(*args, **kwargs):
        if next(fits) == chosen:
            fail()
        return training.fit(*args, **kwargs)

    monkeypatch.setattr(cheem, "fit", diverging)
    found = drawing(stages).learn(HARD, Undisturbed())
    assert found["search"]["chosen"] != chosen and np.isnan(found["search"]["correct"][chosen])
    others = [i for i in range(3) if i != chosen]
    assert [found["search"]["correct"][i] for i in others] == [expected["search"]["correct"][i] for i in others]
    monkeypatch.setattr(cheem, "fit", fail)
    with pytest.raises(ValueError, match="no architecture with a score: none was a finite number; try lower learning"):
        drawing(stages).learn(HARD, Undisturbed())


def fail(*_, **__):
    raise FloatingPointError("the loss became no finite number")


def test_trained_draws_that_need_a_supernet_or_are_fewer_than_none_are_refused():
    with pytest.raises(ValueError, match=r"trained_draws is -1; expected 0 \(supernet and search\) or more"):
        dataclasses.replace(small.QUICK, trained_draws=-1)
    for changes, named in (
        ({"weights": "inherited"}, "weights inherited"),
        (
            {"search": dataclasses.replace(small.QUICK.search, rungs=2, warm_start=True)},
            "search.rungs 2 and search.warm",
        ),
    ):
        with pytest.raises(ValueError, match=f"trained_draws is 2, which has no .* and so no {named}"):
            dataclasses.replace(small.QUICK, trained_draws=2, **changes)


def test_a_stream_with_too_few_validation_images_is_refused_before_it_is_learned(stages):
    tasks = [small.task("many", 0), small.task("few", 1, num=6)]
    assert learner(stages, rungs=2).check(tasks) == []
    with pytest.raises(ValueError, match="task 'few': .*3 validation images; so many rungs need at least 4"):
        learner(stages, rungs=3).check(tasks)
