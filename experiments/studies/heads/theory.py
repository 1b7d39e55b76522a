"""Probability that the best logit within a task is the best logit of all classes (paper, 'Local vs.
Global Argmax of Head Classifiers').

The best logit within the task, Z*, is normal, and its mean is `gap` above that of the logit of
every other class. The logits of the classes of other tasks are normal and independent. `local_std`
and `other_std` are the standard deviations of Z* and of the logit of another class.
"""

import math

import numpy as np
from jaxtyping import Float
from scipy.integrate import quad
from scipy.special import log_ndtr, ndtri_exp

FAR = 10.0
"""Distance from the mean, in standard deviations, at which a normal density is below 1e-22."""


def match_probability(gap: float, local_std: float, other_std: float, num_others: int) -> float:
    """Compute P(Z* >= logits of all `num_others` other classes) by quadrature: the paper's 'Many
    Classes from Different Tasks'.

    It is the integral of Phi((z - mu_o) / sigma_o)^M times the density of Z* over z. The paper
    writes F_{Z*} for that density, although F is not a distribution function there (see the end of
    its 'A Rough Illustrative Bound').
    """
    _check(gap, local_std, other_std, num_others)
    if num_others == 0:
        return 1.0

    def integrand(x: float) -> float:
        # x is the distance of Z* from its mean in standard deviations; logarithms avoid underflow
        below = num_others * log_ndtr((gap + local_std * x) / other_std)
        density = -0.5 * x * x - 0.5 * math.log(2 * math.pi)
        return math.exp(below + density)

    # the pieces end at points where a factor rises or has its mass, because the quadrature can miss
    # a narrow factor
    shares = np.array([-35.0, -7.0, -0.7, -1e-3, -1e-7, -1e-14])  # logarithms
    rises = (other_std * ndtri_exp(shares / num_others) - gap) / local_std
    masses = ndtri_exp(shares)
    edges = [-FAR, *sorted(float(x) for x in (*rises, *masses) if -FAR < x < FAR), FAR]
    pieces = [
        quad(integrand, a, b, epsabs=1e-14, epsrel=1e-11)[0]
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return min(math.fsum(pieces), 1.0)


def match_with_unequal_others(
    local_mean: float, local_std: float, means: Float[np.ndarray, "M"], stds: Float[np.ndarray, "M"]
) -> float:
    """Compute P(Z* >= logits of all other classes) if the logit of every other class has a separate
    mean and deviation, the paper's mu_{t,c} and sigma_{t,c}.

    The result is exact to 1e-8, unless a deviation in `stds` is below a twenty-fifth of
    `local_std`.
    """
    _check(local_mean, local_std, float(stds.min()))
    x = np.linspace(
        -8.0, 8.0, 401
    )  # equal steps converge fast because the density vanishes at both ends
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    below = log_ndtr((local_mean + local_std * x[:, None] - means) / stds).sum(axis=1)
    return float((np.exp(below) * density).sum() * (x[1] - x[0]))


def _check(gap: float, local_std: float, other_std: float, num_others: int = 1) -> None:
    stds = (local_std, other_std)
    if not (math.isfinite(gap) and all(0 < std < math.inf for std in stds)):
        raise ValueError(
            f"gap {gap} with the deviations {stds}; expected finite numbers, and deviations above 0"
        )
    if num_others < 0:
        raise ValueError(f"num_others is {num_others}; expected 0 or more")
