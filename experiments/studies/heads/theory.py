"""Probability that the best logit within a task is the best of all classes (paper, 'Local vs.
Global Argmax of Head Classifiers').

Rivals are the classes of other tasks. The best logit within the task, Z*, is normal, and its mean
is `gap` above that of every rival; rivals are normal and independent. `local_std` and `rival_std`
are the standard deviations of Z* and of a rival.
"""

import math

import numpy as np
from jaxtyping import Float
from scipy.integrate import quad
from scipy.special import log_ndtr, ndtr, ndtri_exp

FAR = 10.0
"""Standard deviations from the mean beyond which a normal density is below 1e-22."""


def match_with_one_rival(gap: float, local_std: float, rival_std: float) -> float:
    """P(Z* >= rival) = Phi(gap / sqrt(local_std^2 + rival_std^2)).

    With equal deviations this is Phi(gap / (sqrt(2) sigma)), the paper's 'A Basic Two-Class
    Example'.
    """
    _check(gap, local_std, rival_std)
    return float(ndtr(gap / math.hypot(local_std, rival_std)))


def match_probability(gap: float, local_std: float, rival_std: float, num_rivals: int) -> float:
    """P(Z* >= all of `num_rivals` rivals), by quadrature: the paper's 'Many Classes from Different
    Tasks'.

    The integral of Phi((z - mu_o) / sigma_o)^M times the density of Z* over z. The paper writes
    F_{Z*} for that density, although F is not a distribution function there (see the end of its 'A
    Rough Illustrative Bound').
    """
    _check(gap, local_std, rival_std, num_rivals)
    if num_rivals == 0:
        return 1.0

    def integrand(x: float) -> float:
        # x is in standard deviations of Z* from its mean; logarithms avoid underflow
        below = num_rivals * log_ndtr((gap + local_std * x) / rival_std)
        density = -0.5 * x * x - 0.5 * math.log(2 * math.pi)
        return math.exp(below + density)

    # split where a factor rises or has its mass, because the quadrature can miss a narrow one
    shares = np.array([-35.0, -7.0, -0.7, -1e-3, -1e-7, -1e-14])  # logarithms
    rises = (rival_std * ndtri_exp(shares / num_rivals) - gap) / local_std
    masses = ndtri_exp(shares)
    edges = [-FAR, *sorted(float(x) for x in (*rises, *masses) if -FAR < x < FAR), FAR]
    pieces = [
        quad(integrand, a, b, epsabs=1e-14, epsrel=1e-11)[0]
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return min(math.fsum(pieces), 1.0)


def match_with_unequal_rivals(
    local_mean: float, local_std: float, means: Float[np.ndarray, "M"], stds: Float[np.ndarray, "M"]
) -> float:
    """P(Z* >= all rivals) if every rival has a separate mean and deviation, the paper's mu_{t,c}
    and sigma_{t,c}.

    Exact to 1e-8, unless a rival's deviation is below a twenty-fifth of `local_std`.
    """
    _check(local_mean, local_std, float(stds.min()))
    x = np.linspace(
        -8.0, 8.0, 401
    )  # equal steps converge fast where a density dies out at both ends
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    below = log_ndtr((local_mean + local_std * x[:, None] - means) / stds).sum(axis=1)
    return float((np.exp(below) * density).sum() * (x[1] - x[0]))


def _check(gap: float, local_std: float, rival_std: float, num_rivals: int = 1) -> None:
    stds = (local_std, rival_std)
    if not (math.isfinite(gap) and all(0 < std < math.inf for std in stds)):
        raise ValueError(
            f"gap {gap} with the deviations {stds}; expected finite numbers, and deviations above 0"
        )
    if num_rivals < 0:
        raise ValueError(f"num_rivals is {num_rivals}; expected 0 or more")
