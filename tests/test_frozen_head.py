"""The ridge head of the frozen backbone against brute force: heads fitted without each image."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.linear_model import Ridge

from cheem_jax.cheem.frozen_head import PENALTIES, ridge_head
from cheem_jax.core.pool import compute_logits


def images(num: int, width: int, labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return features that depend on the labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(labels.max() + 1, width))
    scale = np.exp(rng.normal(size=width))
    return ((rng.normal(size=(num, width)) + 0.7 * centres[labels]) * scale + 3).astype(np.float32)


SETS = {
    "even classes": np.arange(40) % 4,
    "uneven classes": np.repeat([0, 1, 2], [30, 6, 4]),
    "a class of one image": np.repeat([0, 1, 2], [20, 19, 1]),
    "two classes": np.arange(30) % 2,
    "fewer images than features": np.arange(9) % 3,
}


@pytest.mark.parametrize("labels", SETS.values(), ids=SETS.keys())
def test_the_ridge_head_is_that_of_the_least_squared_error_without_each_image(labels):
    features = images(len(labels), 12, labels)
    num_classes = int(labels.max()) + 1
    num = len(labels)
    x = (features - features.mean(0)) / features.std(0)
    y = np.eye(num_classes)[labels]
    alone = {}
    for penalty in PENALTIES:
        rests = [np.arange(num) != out for out in range(num)]
        alone[penalty] = np.array(
            [
                Ridge(alpha=penalty * num).fit(x[rest], y[rest]).predict(x[~rest])[0]
                for rest in rests
            ]
        )
    errors = {penalty: np.square(answers - y).sum() for penalty, answers in alone.items()}
    head, penalty = ridge_head(features, labels, num_classes)
    assert penalty == pytest.approx(min(errors, key=errors.__getitem__))
    logits = compute_logits(features, head)
    wanted = Ridge(alpha=penalty * num).fit(x, y).predict(x)
    scale = np.std(logits) / np.std(wanted)
    np.testing.assert_allclose(logits, scale * wanted, rtol=1e-3, atol=1e-3 * scale)
    # the scale maximises the log-probability of the labels, each predicted without its image
    answers = alone[min(errors, key=errors.__getitem__)]
    best = minimize_scalar(
        lambda scale: -log_softmax(scale * answers, axis=1)[np.arange(num), labels].mean(),
        bounds=(4, 100),
        method="bounded",
    ).x
    assert scale == pytest.approx(best, rel=0.02)
