"""Images decoded on demand: the same ones, in the same order, starting at any step."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import small
from test_data_cache import make_cache, pictures

from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import SupernetFit, constant_draws, fit
from cheem_jax.core.images import in_turn
from cheem_jax.core.pool import dense_experts
from cheem_jax.core.settings import FitConfig
from cheem_jax.data import ImagesConfig, fingerprint, load_tasks, plan_task
from cheem_jax.data.folder import plan_stream
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.stages import Stages

pytest.importorskip("grain", reason="the extra `datasets` is not installed")


@pytest.fixture
def plan(tmp_path):
    return plan_task(pictures(tmp_path / "pets"))


ORDER = [np.array(rows) for rows in ([3, 1, 11, 0], [5, 5, 2, 10], [9, 8, 7, 6], [4, 4, 4, 4])]


def test_a_stream_behaves_like_an_array(plan):
    memory = make_cache(plan, None, "memory").train.images
    stream = make_cache(plan, None, "stream").train.images
    assert stream.shape == memory.shape
    assert stream.dtype == memory.dtype
    assert len(stream) == len(memory)
    np.testing.assert_array_equal(stream[np.array([3, 1, 3])], memory[[3, 1, 3]])
    np.testing.assert_array_equal(stream[:], memory)
    assert stream[:0].shape == (0, 8, 8, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_streamed_in_the_requested_order(plan, workers):
    memory = make_cache(plan, None, "memory").train.images
    stream = make_cache(plan, None, "stream", workers=workers).train.images
    result = list(in_turn(stream, ORDER))
    assert len(result) == len(ORDER)
    for images, rows in zip(result, ORDER, strict=True):
        np.testing.assert_array_equal(images, memory[rows])


def test_a_stream_resumes_exactly_where_it_was(plan):
    stream = make_cache(plan, None, "stream").train.images
    unbroken = list(stream.follow(ORDER))
    iterator = stream.follow(ORDER)
    first = [next(iterator), next(iterator)]
    state = iterator.get_state()
    again = stream.follow(ORDER)
    again.set_state(state)
    np.testing.assert_array_equal(np.stack(first + list(again)), np.stack(unbroken))
    np.testing.assert_array_equal(np.stack(list(stream.follow(ORDER[2:]))), np.stack(unbroken[2:]))


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_image_that_breaks_later_is_named(tmp_path, workers):
    plan = plan_task(pictures(tmp_path / "pets"))
    stream = make_cache(plan, None, "stream", workers=workers).train.images
    (tmp_path / "pets" / plan.train.files.key(2)).write_bytes(b"broken")
    with pytest.raises(ValueError, match=plan.train.files.key(2)):
        list(stream.follow(ORDER))


def test_a_broken_image_is_named_before_anything_is_streamed(tmp_path):
    plan = plan_task(pictures(tmp_path / "pets"))
    broken = [part.files.key(0) for part in (plan.train, plan.test)]
    for key in broken:
        (tmp_path / "pets" / key).write_bytes(b"broken")
    with pytest.raises(ValueError, match=f"2 image.*{broken[0]}.*{broken[1]}"):
        make_cache(plan, None, "stream")


def test_streams_have_fingerprints_that_tell_other_files_apart(tmp_path):
    plans = [plan_task(pictures(tmp_path / name / "pets")) for name in ("a", "b")]
    prints = [fingerprint(make_cache(plan, None, "stream")) for plan in (*plans, plans[0])]
    assert prints[0] == prints[2] != prints[1]


def test_a_zip_streams_as_its_folder_does(tmp_path):
    folder = pictures(tmp_path / "pets")
    shutil.make_archive(str(tmp_path / "zips" / "pets"), "zip", folder)
    (zipped,) = load_tasks(plan_stream(tmp_path / "zips"), 8, ImagesConfig("stream", workers=1))
    memory = make_cache(plan_task(folder), None, "memory")
    assert zipped.split_sha256 == memory.split_sha256
    for images, rows in zip(in_turn(zipped.train.images, ORDER), ORDER, strict=True):
        np.testing.assert_array_equal(images, memory.train.images[rows])


def test_a_zip_that_is_replaced_is_noticed(tmp_path):
    folder, other = pictures(tmp_path / "pets"), pictures(tmp_path / "other" / "pets", per_class=7)
    zipped = Path(shutil.make_archive(str(tmp_path / "zips" / "pets"), "zip", folder))
    stream = make_cache(plan_task(zipped), None, "stream").train.images
    shutil.make_archive(str(tmp_path / "zips" / "pets"), "zip", other)
    with pytest.raises(ValueError, match="the zip has changed"):
        stream[:]


@pytest.mark.full
def test_training_on_streamed_images_is_training_on_the_same_images(plan):
    executor = Stages(small.backbone(), "mlp_down")

    def losses(keep):
        task = make_cache(plan, None, keep)
        net = Supernet(jax.random.key(1), dense_experts(executor.base_pool), 2, small.QUICK.ops)
        return fit(
            executor,
            SupernetFit(net, net.init()),
            HostImages(executor, task.train.images),
            task.train.labels,
            draws=constant_draws(np.array([0, 1, 0, 0])),
            config=FitConfig(epochs=3),
            batch_size=8,
            order_key=jax.random.key(0),
            advance=lambda num, note="": None,
        ).progress

    assert losses("memory") == losses("stream")
