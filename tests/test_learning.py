"""The search of one task: its report, and how it resumes."""

import contextlib
import dataclasses

import numpy as np
import pytest
import small

from cheem_jax.cheem.evolution import Scored, rank
from cheem_jax.cheem.learner import Cheem, num_skipped
from cheem_jax.core.keys import Keys
from cheem_jax.core.ops import truncate
from cheem_jax.core.settings import no_progress
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.rolling import Rolling
from cheem_jax.run.session import Session


class Halt(Exception):
    """Raised in place of the end of a process."""


class Halting(Session):
    """Saves at the first report after a number of images of the search, and raises."""

    def __init__(self, rolling, num_images):
        super().__init__()
        self.rolling, self.num_images = rolling, num_images

    @contextlib.contextmanager
    def phase(self, name, total=0, state=None, *, title=None):
        done = 0

        def advance(num_images, note="", /):
            nonlocal done
            done += num_images
            if name == "search" and done >= self.num_images and not num_images:
                self.rolling.save(0, state)
                raise Halt

        yield advance


class Resumed(Session):
    """A session that resumes from a checkpoint, and counts the images that each phase announces and
    reads."""

    def __init__(self, saved):
        super().__init__()
        self.saved = saved
        self.num_images = 0
        self.totals = {}

    @contextlib.contextmanager
    def phase(self, name, total=0, state=None, *, title=None):
        def advance(num_images, note="", /):
            self.num_images += num_images if name == "search" else 0

        self.totals[name] = self.totals.get(name, 0) + total
        yield advance


@pytest.fixture(scope="module")
def stages():
    return Stages(small.backbone(), "mlp_down")


ANCHORED = {"sampling": "anchored", "fallback": True}


def learner(stages, generations=3, max_flops=0.9, **settings):
    search = dataclasses.replace(small.QUICK.search, generations=generations, max_flops=max_flops)
    config = dataclasses.replace(small.QUICK, search=search, **settings)
    return Cheem(stages, config, Keys(0), None, FrozenFeatures(stages, config.batch_size))


def test_the_report_has_everything_that_the_search_scored_and_which_it_chose(stages):
    report = learner(stages).learn(small.task("colours", 0), Session())
    result = report["search"]
    assert set(result) == {"correct", "flops", "population", "num_images", "chosen"}
    assert (
        report["searched"]
        == len(result["correct"])
        == len(result["flops"])
        == 3 * result["population"]
    )
    # genomes, which break ties, are not in the report
    scored = Scored(
        np.zeros((report["searched"], 4)), np.array(result["correct"]), np.array(result["flops"])
    )
    best = rank(scored, result["num_images"], small.QUICK.search.tolerance)[0]
    chosen = result["chosen"]
    assert (result["correct"][best], result["flops"][best]) == (
        result["correct"][chosen],
        result["flops"][chosen],
    )
    assert result["flops"][chosen] == report["flops"]
    assert report["validation_accuracy"] == result["correct"][chosen] / result["num_images"]
    assert report["best_validation_accuracy"] == max(result["correct"]) / result["num_images"]


def test_a_search_resumes_from_a_rolling_checkpoint(stages, tmp_path):
    task = small.task("colours", 0)
    whole = Resumed(None)
    expected = learner(stages).learn(task, whole)
    # 6 candidates on 20 images per generation
    assert whole.num_images == whole.totals["search"] == 3 * 120
    rolling = Rolling(tmp_path)
    with pytest.raises(Halt):
        learner(stages).learn(task, Halting(rolling, 240))
    resumed = Resumed(rolling.open(0, print))
    assert resumed.saved is not None
    result = learner(stages).learn(task, resumed)
    assert resumed.num_images == resumed.totals["search"] == 120
    for name in ("search", "searched", "architecture", "finetune_losses"):
        assert result[name] == expected[name]


def test_an_elimination_skips_blocks_of_the_network_that_adapts_every_block(stages):
    task = small.task("colours", 0)
    report = learner(stages, **{**ANCHORED, "fallback": False}).learn(task, Session())
    result = report["search"]
    losses, flops = result["losses"], result["flops"]
    assert len(losses) == len(flops) == len(result["correct"]) == report["searched"]
    # the anchor, and Skip in each of the last two blocks
    assert report["searched"] == 3 and flops[0] == max(flops)
    assert result["chosen"] == 1 + int(np.argmin(losses[1:]))
    assert flops[result["chosen"]] == report["flops"] <= 0.9 * flops[0]
    assert report["architecture"][:2] == ["adapt:0"] * 2
    assert sorted(report["architecture"]) == ["adapt:0"] * 3 + ["skip"]
    assert report["supernet_losses"] == [] and "supernet" not in report["seconds"]
    assert report.get("frozen_head") is None  # nothing asks for this comparison
    # the networks are scored before training
    assert report["score"] == result["correct"][result["chosen"]] / 20
    assert "validation_accuracy" not in report


def test_an_elimination_adapts_the_backbone_even_after_a_task_with_the_same_images(stages):
    cheem = learner(stages, **{**ANCHORED, "fallback": False})
    for name in ("colours", "again"):
        report = cheem.learn(small.task(name, 0), Session())
        assert sorted(report["architecture"]) == ["adapt:0"] * 3 + ["skip"]
        # no task is compared with earlier tasks
        assert "similarity" not in report and "similarity" not in report["seconds"]
    # the experts of the first task were candidates
    assert max(map(len, cheem.memory.pool)) == 3


def test_the_limit_of_flops_determines_how_many_blocks_of_the_second_half_are_skipped(stages):
    def anchored(executor, max_flops):
        return learner(
            executor, max_flops=max_flops, placement=executor.placement, sampling="anchored"
        )

    attention = Stages(small.backbone(), "attn_proj")
    for executor, expected in ((stages, [0, 1, 2, 2]), (attention, [0, 2, 2, 2])):
        methods = [anchored(executor, limit) for limit in (1.0, 0.9, 0.8, 0.0)]
        assert [num_skipped(executor, method.config) for method in methods] == expected
    report = anchored(attention, 0.9).learn(small.task("colours", 0), Session())
    assert report["architecture"] == ["adapt:0"] * 2 + ["skip"] * 2


def test_elimination_needs_room_for_one_pair_per_block_at_any_number_of_tasks(stages):
    tasks = [small.task("task0", 0), small.task("task1", 1)]
    needed = {}
    for sampling in ("hee", "anchored"):
        cheem = learner(stages, sampling=sampling)
        before = cheem.bytes_needed(tasks[0])
        cheem.learn(tasks[0], Session())
        needed[sampling] = before, cheem.bytes_needed(tasks[1])
    assert needed["anchored"][0] == needed["anchored"][1] < needed["hee"][0] < needed["hee"][1]


def test_an_elimination_resumes_from_a_rolling_checkpoint(stages, tmp_path):
    task = small.task("colours", 0)
    settings = {**ANCHORED, "max_flops": 0.8}
    whole = Resumed(None)
    expected = learner(stages, **settings).learn(task, whole)
    # the anchor, 2 networks that skip one block, and one that skips two
    assert whole.num_images == whole.totals["search"] == 4 * 20
    rolling = Rolling(tmp_path)
    with pytest.raises(Halt):
        learner(stages, **settings).learn(task, Halting(rolling, 60))
    resumed = Resumed(rolling.open(0, print))
    result = learner(stages, **settings).learn(task, resumed)
    assert resumed.num_images == resumed.totals["search"] == 20
    for name in ("search", "searched", "architecture", "finetune_losses"):
        assert result[name] == expected[name]


def test_an_elimination_needs_all_ops():
    with pytest.raises(ValueError, match="sampling anchored uses Adapt and Skip"):
        dataclasses.replace(small.QUICK, sampling="anchored", remove=("skip",))


def test_truncated_pairs_are_stored_and_used(stages):
    task = small.task("colours", 0)
    ops = dataclasses.replace(small.QUICK.ops, rank=4)
    whole, truncated = (
        learner(stages, sampling="anchored", ops=dataclasses.replace(ops, truncated_rank=rank))
        for rank in (None, 2)
    )
    reports = [one.learn(task, Session()) for one in (whole, truncated)]
    pairs = [
        [stored.params for block in one.memory.pool for stored in block[1:]]
        for one in (whole, truncated)
    ]
    assert len(pairs[0]) == len(pairs[1]) == 3
    for full, short in zip(*pairs, strict=True):
        assert short.down.shape[1] == 2
        expected = truncate(full, 2)
        np.testing.assert_array_equal(short.down, expected.down)
    assert reports[1]["params_added"] == reports[0]["params_added"] / 2
    assert reports[1]["flops"] < reports[0]["flops"]
    assert reports[1]["finetune_losses"] == reports[0]["finetune_losses"]


class OneNaN(FrozenFeatures):
    """Features with one NaN among those of the validation images."""

    def __call__(self, images, advance=no_progress):
        features = super().__call__(images, advance).copy()
        if len(images) == 20:
            features[3, 1] = np.nan
        return features


def test_a_frozen_backbone_with_a_non_finite_feature_is_not_compared(stages):
    config = dataclasses.replace(small.QUICK, fallback=True)
    cheem = Cheem(stages, config, Keys(0), None, OneNaN(stages, config.batch_size))
    report = cheem.learn(small.task("colours", 0), Session())
    assert report.get("frozen_head") is None


class Counted(FrozenFeatures):
    """Features that count their own passes over images."""

    num_passes = 0

    def __call__(self, images, advance=no_progress):
        self.num_passes += not self.has(images)
        return super().__call__(images, advance)


def test_the_pass_of_a_tasks_network_also_computes_the_features_of_the_router(stages):
    features = Counted(stages, 16)
    cheem = Cheem(stages, small.QUICK, Keys(0), None, features)
    cheem.learn(small.task("colours", 0), Session())
    images = small.task("colours", 1).test.images
    before = features.num_passes
    cheem.predict(images, np.zeros(len(images), np.int32))
    assert features.num_passes == before
    expected = FrozenFeatures(stages, 16)(images)
    np.testing.assert_allclose(features(images), expected, atol=1e-5)
