"""The router: nearest centroid, per image."""

import numpy as np
import pytest

from cheem_jax.core.routing import RouterConfig, fit_centroids, normalise, route


def test_routing_equals_a_brute_force_search_in_l1():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6)).astype(np.float32)
    centroids = [rng.normal(size=(k, 6)).astype(np.float32) / 3 for k in (5, 1, 3)]
    points = features / np.linalg.norm(features, axis=1, keepdims=True)
    expected = [min(range(3), key=lambda t: min(np.abs(p - c).sum() for c in centroids[t])) for p in points]
    np.testing.assert_array_equal(route(features, centroids, RouterConfig()), expected)


def test_l1_and_l2_can_name_different_tasks():
    # from (1, 0): L1 distances 0.6 and 0.7, L2 distances 0.6 and 0.495
    centroids = [np.array([[0.4, 0.0]], np.float32), np.array([[0.65, 0.35]], np.float32)]
    feature = np.array([[2.0, 0.0]], np.float32)
    assert route(feature, centroids, RouterConfig(metric="l1"))[0] == 0
    assert route(feature, centroids, RouterConfig(metric="l2"))[0] == 1
    assert route(feature, centroids, RouterConfig(metric="cosine"))[0] == 0


def test_ties_go_to_the_lowest_task():
    same = np.array([[0.5, 0.5]], np.float32)
    assert route(np.array([[1.0, 0.0]], np.float32), [same, same, same], RouterConfig())[0] == 0


def test_centroids_are_those_of_normalised_features_and_not_renormalised():
    features = np.array([[3.0, 0.0], [0.0, 2.0]], np.float32)
    (centroid,) = fit_centroids(features, seed=0, config=RouterConfig(num_centroids=1))
    np.testing.assert_allclose(centroid, [0.5, 0.5], atol=1e-6)


def test_fewer_images_than_centroids_give_as_many_centroids_as_images():
    features = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert fit_centroids(features, seed=0, config=RouterConfig()).shape == (3, 4)
    same = np.ones((10, 4), np.float32)
    assert fit_centroids(same, seed=0, config=RouterConfig()).shape == (1, 4)


def test_an_image_is_routed_alone_as_in_company():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(30, 8)).astype(np.float32)
    centroids = [rng.normal(size=(5, 8)).astype(np.float32) / 3 for _ in range(4)]
    together = route(features, centroids, RouterConfig())
    alone = [route(features[i : i + 1], centroids, RouterConfig())[0] for i in range(30)]
    np.testing.assert_array_equal(together, alone)


def test_a_zero_feature_stays_zero():
    assert not normalise(np.zeros((1, 3), np.float32)).any()


def test_a_router_needs_a_centroid():
    with pytest.raises(ValueError, match="num_centroids is 0"):
        RouterConfig(num_centroids=0)
