"""Law 8: the metrics against the paper's own printed rows, and against matrices worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheem_jax.core import metrics

nan = np.nan


def test_the_temperature_is_the_one_by_which_labels_were_sampled():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (4000, 5)).astype(np.float32)
    for temperature in (0.5, 2.0):
        labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(axis=1)
        assert metrics.fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.1)
    assert metrics.fit_temperature(logits, logits.argmax(axis=1)) == pytest.approx(1 / 5, rel=1e-3)
    assert metrics.fit_temperature(np.where(logits > 8, np.inf, logits), labels) == 1


def test_the_calibration_error_weighs_each_bins_gap_by_its_images():
    confidence, right = np.array([0.95, 0.95, 0.65, 0.65, 1.0]), np.array([True, True, True, False, True])
    np.testing.assert_allclose(metrics.calibration_error(confidence, right), (2 * 0.05 + 2 * 0.15 + 0) / 5)


# The paper's full-results tables in %: a column per task, then the average printed beside them.
FULL_RESULTS = {
    ("MTIL", "ViT-B"): """
        upper-bound 69.87 98.32 90.66 77.46 98.78 97.87 88.46 99.70 92.85 85.42 69.89  88.12
        LoRA-tuned  63.86 97.77 91.35 77.59 98.84 98.83 88.41 99.69 93.14 80.26 71.96  87.43
        CHEEM       69.77 84.86 90.27 68.48 98.31 97.54 89.48 99.60 92.88 84.94 68.58  85.88
        CHEEM-PE    69.97 84.96 90.21 66.74 97.97 97.32 86.97 99.50 92.32 82.11 64.06  84.74
        CHEEM-attn  69.92 83.00 90.44 66.54 98.31 97.53 88.94 99.60 92.90 85.50 68.62  85.57
        EWC         39.10 40.90 43.93 12.98 61.43 22.24 51.81 96.20 60.65 12.64 48.46  44.58
        CODA-Prompt  0.91 19.14 75.60  7.39 38.26 24.40 84.62 97.32 36.02 12.61 46.17  40.22
        DualPrompt   3.08 14.40 83.96  3.48 46.45  6.00 85.46 68.43 24.13  5.88 30.78  33.82
        L2P          1.22 17.35 78.81  3.46 30.39  4.67 78.47 16.83 23.45  4.62 33.40  26.61
        S-Prompts   53.78 82.54 88.26 65.44 96.71 98.51 84.64 99.23 92.88 70.09 65.79  81.62
        DIKI        52.29 91.68 89.10 63.95 96.31 30.22 86.55 98.37 92.24 70.22 69.74  76.42
        LoRA-CL     63.78 85.68 90.52 67.98 98.41 98.51 87.26 99.69 92.51 79.79 67.59  84.70
        """,
    ("MTIL", "DeiT-Ti"): """
        upper-bound 43.17 94.64 83.55 64.88 98.67 68.90 79.88 99.65 86.57 54.83 52.99  75.25
        LoRA-tuned  39.92 93.71 81.04 63.37 98.59 74.38 76.25 99.58 87.38 53.80 52.97  74.64
        CHEEM       52.51 80.59 79.67 57.43 97.86 73.94 77.89 99.60 87.37 61.73 51.02  74.51
        CHEEM-PE    53.03 80.50 80.16 57.66 97.86 80.37 78.11 99.62 85.95 62.43 49.81  75.05
        CHEEM-attn  50.65 80.35 78.44 56.77 97.75 77.23 77.71 99.55 86.84 61.72 51.27  74.39
        EWC         37.38 13.94 48.87  0.00 83.14  0.00 50.65 93.72 30.44  2.89 27.57  35.33
        CODA-Prompt  0.00  1.77  2.75  0.04  0.32  0.00 22.46  3.94  5.80  0.27 24.45   5.62
        DualPrompt   0.66 42.28 59.13  3.03 42.04  0.86 42.10 55.06 47.42  5.75 41.47  30.89
        L2P          0.11 39.46 47.87  4.11 29.80  1.02 37.07  0.83 50.15  1.29 43.97  23.24
        S-Prompts   36.00 79.08 71.58 50.50 93.87 72.27 67.97 98.66 87.44 40.01 43.22  67.33
        DIKI        33.95 76.57 71.13 54.84 92.66 71.79 70.46 97.40 87.61 40.13 47.41  67.63
        LoRA-CL     39.48 78.89 78.11 54.38 97.80 73.66 74.80 99.58 85.88 53.53 45.61  71.06
        """,
    ("VDD", "ViT-B"): """
        upper-bound 90.65 99.97 86.06 97.75 79.54 99.35 98.03 70.29 76.99  88.74
        LoRA-tuned  91.44 99.50 79.43 97.42 73.36 98.95 98.96 64.03 77.64  86.75
        CHEEM       90.06 99.59 83.32 95.87 73.96 97.09 97.48 67.13 75.85  86.71
        CHEEM-attn  89.90 99.58 83.08 96.26 74.49 97.27 97.56 70.55 76.42  87.23
        EWC         83.69 97.69  6.91 77.43 25.92 78.20  0.06  5.98 19.91  43.98
        CODA-Prompt 37.69  1.29  6.87 54.52  2.32 49.22 39.18  7.48 25.16  24.86
        DualPrompt  82.34  4.04 14.37 15.02 13.41 64.42 27.20 15.29 16.37  28.05
        L2P         86.64  4.98 14.75  6.63 14.19 27.89 25.59 16.71 18.12  23.94
        S-Prompts   88.34 99.47 57.38 94.23 55.07 87.90 98.48 53.52 72.59  78.55
        DIKI        86.54 98.20 57.70 63.44 52.10 72.66 36.45 53.53 72.82  65.94
        LoRA-CL     90.18 99.21 79.43 96.35 73.10 97.39 98.54 64.01 76.19  86.04
        """,
    ("VDD", "DeiT-Ti"): """
        upper-bound 83.50 99.97 69.71 97.24 57.97 98.95 69.04 44.46 65.02  76.21
        LoRA-tuned  81.29 99.96 76.93 96.37 54.83 98.16 74.37 40.66 63.67  76.25
        CHEEM       75.75 97.73 81.64 95.30 57.26 93.11 74.76 45.91 64.13  76.18
        CHEEM-attn  74.70 97.85 80.43 95.22 57.46 93.68 75.75 46.55 62.11  75.97
        EWC         79.39 93.96  0.03 60.13  4.97 64.41  0.00  0.58  0.00  33.72
        CODA-Prompt  2.07  0.00  0.02  1.55  0.02  0.56  0.36  0.30  5.16   1.12
        DualPrompt  47.87  4.48 28.60 11.53  2.54 75.67  0.40  0.57  2.61  19.36
        L2P         56.24  1.38  0.80  0.26  2.15 37.43  1.24  0.17  3.90  11.51
        S-Prompts   68.58 97.24 46.05 85.87 43.44 80.13 74.78 36.72 58.90  65.75
        DIKI        65.54 97.44 44.89 45.55 40.78 64.49 72.37 34.41 59.38  58.32
        LoRA-CL     74.26 97.69 76.87 94.96 52.68 93.09 73.75 40.52 62.22  74.01
        """,
}  # fmt: skip

# From the paper's tables: CHEEM's GFLOPs, then each method's average accuracy (None: as above), GFLOPs, FoM.
FOM = {
    ("MTIL", "ViT-B"): (62.31, {
        "EWC": (None, 33.7, 10.5), "CODA-Prompt": (None, 70.3, 24.2), "DualPrompt": (None, 70.3, 27.4),
        "L2P": (None, 70.3, 31.1), "S-Prompts": (None, 67.6, 3.2), "DIKI": (None, 42.5, 3.6),
        "LoRA-CL": (None, 68.2, 1.7), "TUNA": (70.7, 405.0, 50.6), "MoAL": (78.3, 33.7, 2.38),
    }),
    ("MTIL", "DeiT-Ti"): (4.47, {
        "EWC": (None, 2.2, 26.0), "CODA-Prompt": (None, 5.0, 84.6), "DualPrompt": (None, 5.0, 73.7),
        "L2P": (None, 5.1, 79.8), "S-Prompts": (None, 4.4, 10.5), "DIKI": (None, 2.8, 6.4),
        "LoRA-CL": (None, 4.5, 5.7), "TUNA": (44.5, 26.0, 242.4), "MoAL": (63.8, 2.2, 7.64),
    }),
    ("VDD", "ViT-B"): (61.6, {
        "EWC": (None, 33.7, 12.1), "CODA-Prompt": (None, 70.3, 35.9), "DualPrompt": (None, 70.3, 34.1),
        "L2P": (None, 70.3, 36.4), "S-Prompts": (None, 67.6, 5.5), "DIKI": (None, 42.5, 7.8),
        "LoRA-CL": (None, 68.2, 1.5), "TUNA": (70.7, 337.0, 58.6), "MoAL": (56.7, 33.7, 8.63),
    }),
}  # fmt: skip
# Here the print disagrees with itself. VDD on DeiT-Ti is left out: its gap of 0.03 points is all rounding.
INCONSISTENT = {
    ("MTIL", "DeiT-Ti", "CODA-Prompt"),
    ("MTIL", "DeiT-Ti", "DualPrompt"),
    ("VDD", "ViT-B", "TUNA"),
}


def rows_of(benchmark: str, backbone: str) -> dict[str, list[float]]:
    """Per method the accuracy of each task and, last, the printed average."""
    lines = [line.split() for line in FULL_RESULTS[benchmark, backbone].split("\n") if line.strip()]
    return {name: [float(value) for value in values] for name, *values in lines}


@pytest.mark.parametrize(("benchmark", "backbone"), FULL_RESULTS)
def test_average_accuracy_of_every_row_of_the_paper_is_the_printed_one(benchmark, backbone):
    rows = rows_of(benchmark, backbone)
    assert len(rows) == (12 if benchmark == "MTIL" else 11)
    for method, (*last, printed) in rows.items():
        accuracy = np.full((len(last), len(last)), nan)
        accuracy[-1] = last
        assert metrics.average_accuracy(accuracy) == pytest.approx(printed, abs=0.01), method


@pytest.mark.parametrize(("benchmark", "backbone"), FOM)
def test_fom_from_the_accuracies_and_flops_of_the_paper_is_the_printed_one(benchmark, backbone):
    printed_average = {method: row[-1] for method, row in rows_of(benchmark, backbone).items()}
    flops, others = FOM[benchmark, backbone]
    for method, (accuracy, other_flops, printed) in others.items():
        if accuracy is None:
            accuracy = printed_average[method]
        upper, cheem = printed_average["upper-bound"], printed_average["CHEEM"]
        fom = metrics.figure_of_merit(upper, cheem, flops, accuracy, other_flops)
        if (benchmark, backbone, method) in INCONSISTENT:
            assert fom != pytest.approx(printed, rel=0.05), method  # else the list is out of date
        else:
            assert fom == pytest.approx(printed, rel=0.03), method


def test_fom_is_undefined_where_a_method_reaches_the_bound():
    assert metrics.figure_of_merit(0.8, 0.8, 1, 0.7, 1) is None
    assert metrics.figure_of_merit(0.8, 0.7, 1, 0.9, 1) is None
    assert metrics.figure_of_merit(0.8, 0.7, 2, 0.6, 3) == pytest.approx(3.0)


def test_forgetting_is_the_mean_drop_from_the_best_accuracy_so_far():
    # task 0: best 0.9, last 0.85; task 1: best 0.7, last 0.6; the last task does not count
    accuracy = np.array([[0.9, nan, nan], [0.8, 0.7, nan], [0.85, 0.6, 0.5]])
    assert metrics.average_forgetting(accuracy) == pytest.approx((0.05 + 0.1) / 2)


def test_a_task_that_improves_later_forgets_from_its_best_and_never_less_than_nothing():
    rising = np.array([[0.5, nan, nan], [0.9, 0.4, nan], [0.7, 0.6, 0.5]])
    assert metrics.average_forgetting(rising) == pytest.approx((0.2 + 0.0) / 2)


def test_a_single_task_has_no_forgetting():
    assert metrics.average_forgetting(np.array([[0.7]])) is None


def test_missing_measurements_are_refused_by_name():
    accuracy = np.array([[0.9, nan], [nan, 0.7]])
    with pytest.raises(ValueError, match=r"\[\[1, 0\]\]"):
        metrics.average_forgetting(accuracy)
    with pytest.raises(ValueError, match=r"tasks \[0\]"):
        metrics.average_accuracy(accuracy)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_without_change_after_learning_there_is_no_forgetting_and_the_diagonal_averages_to_the_accuracy(
    num_tasks, seed
):
    just = np.random.default_rng(seed).uniform(size=num_tasks)
    accuracy = np.where(np.tri(num_tasks, dtype=bool), just, nan)
    assert metrics.average_forgetting(accuracy) in (None, 0.0)
    np.testing.assert_array_equal(metrics.just_trained(accuracy), just)
    assert metrics.average_accuracy(accuracy) == pytest.approx(just.mean())
    restored = metrics.matrix_from_json(metrics.matrix_to_json(accuracy))
    np.testing.assert_array_equal(restored, accuracy)


def test_routing_counts_fractions_of_the_true_task():
    true, chosen = np.array([0, 0, 0, 0, 1]), np.array([0, 0, 0, 2, 1])
    confusion = metrics.routing_confusion(true, chosen, 3)
    np.testing.assert_array_equal(confusion, [[0.75, 0, 0.25], [0, 1, 0], [nan, nan, nan]])
    assert metrics.matrix_to_json(confusion)[2] == [None, None, None]
    with pytest.raises(ValueError, match="chosen tasks span 0..3"):
        metrics.routing_confusion(np.array([0, 1]), np.array([0, 3]), 3)
