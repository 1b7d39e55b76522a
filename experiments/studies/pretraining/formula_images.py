"""Images made from formulas, for pretraining without photographs: 480 classes in six families.

A class is a set of formula parameters; its images differ in jittered parameters, pose, colours,
background and noise. The idea is formula-driven supervised learning (databases of fractals, radial
contours and tilings); these families are small and designed for 32x32 pixels.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32, UInt8

SIZE = 32
"""Pixels of a side."""
Fields = Float[np.ndarray, "N S S"]
"""Values in [0, 1]; pixel positions are in [-1, 1]^2."""
Colours = Float[np.ndarray, "N S S 3"]


def grid(rng: np.random.Generator, count: int, *, turn: float, zoom: float, shift: float):
    """x and y of every pixel [N S S] in a randomly rotated (radians), zoomed (log) and shifted
    frame."""
    line = (np.arange(SIZE, dtype=np.float32) + 0.5) * (2 / SIZE) - 1
    angle = rng.uniform(-turn, turn, (count, 1, 1)).astype(np.float32)
    scale = np.exp(rng.uniform(-zoom, zoom, (2, count, 1, 1))).astype(np.float32)
    x0, y0 = rng.uniform(-shift, shift, (2, count, 1, 1)).astype(np.float32)
    x, y = line[None, None, :] - x0, line[None, :, None] - y0
    return (np.cos(angle) * x + np.sin(angle) * y) * scale[0], (
        np.cos(angle) * y - np.sin(angle) * x
    ) * scale[1]


def two_colours(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two colours [N 1 1 3] of different lightness; a quarter are grey, a tenth white on black."""
    back, front = rng.uniform(0, 1, (2, count, 1, 1, 3)).astype(np.float32)
    grey = rng.uniform(0, 1, (count, 1, 1, 1)) < 0.25
    back = np.where(grey, back.mean(-1, keepdims=True), back)
    front = np.where(grey, front.mean(-1, keepdims=True), front)
    light = back.mean(-1, keepdims=True)
    other = front.mean(-1, keepdims=True)
    near = np.abs(light - other) < 0.3
    front = np.where(near, front + 0.65 * ((light < 0.5) - front), front)
    plain = rng.uniform(0, 1, (count, 1, 1, 1)) < 0.1
    return np.where(plain, 0, back).astype(np.float32), np.where(plain, 1, front).astype(np.float32)


def rough(rng: np.random.Generator, power: np.ndarray) -> Fields:
    """Random-phase noise with spectrum 1/f^power, scaled to mean 0 and deviation 1."""
    fy = np.fft.fftfreq(SIZE)[:, None]
    fx = np.fft.rfftfreq(SIZE)[None]
    radius = np.maximum(np.hypot(fy, fx), 1 / SIZE)
    return filtered(rng, radius ** -power[:, None, None])


def filtered(rng: np.random.Generator, gain: np.ndarray) -> Fields:
    white = np.fft.rfft2(rng.normal(0, 1, (len(gain), SIZE, SIZE)))
    field = np.fft.irfft2(white * gain, (SIZE, SIZE))
    field -= field.mean((1, 2), keepdims=True)
    return (field / (field.std((1, 2), keepdims=True) + 1e-6)).astype(np.float32)


def figure(rng: np.random.Generator, mask: Fields) -> Colours:
    """A coloured figure on a flat, shaded or rough background."""
    count = len(mask)
    back, front = two_colours(rng, count)
    x, y = grid(rng, count, turn=np.pi, zoom=0.0, shift=0.0)
    shade = 0.15 * rng.normal(0, 1, (count, 1, 1)) * x
    amount = rng.uniform(0, 0.16, (count, 1, 1)) * (rng.uniform(0, 1, (count, 1, 1)) < 0.6)
    shade = shade + amount * rough(rng, rng.uniform(0.3, 2.0, count))
    colour = back + (front - back) * mask[..., None]
    return (colour + (shade * (1 - 0.7 * mask))[..., None]).astype(np.float32)


def ramp(rng: np.random.Generator, field: Fields) -> Colours:
    """A texture between two colours, with a third colour in the middle for a third of the
    images."""
    back, front = two_colours(rng, len(field))
    middle = rng.uniform(0, 1, (len(field), 1, 1, 3)).astype(np.float32)
    amount = (rng.uniform(0, 1, (len(field), 1, 1, 1)) < 0.33) * (4 * field * (1 - field))[
        ..., None
    ]
    colour = back + (front - back) * field[..., None]
    return (colour + amount * (middle - colour)).astype(np.float32)


Params = dict[str, np.ndarray]


class Family(NamedTuple):
    """`draw(rng, count)` returns the classes' parameters, `render(rng, rows)` one image per row."""

    name: str
    num_classes: int
    draw: Callable[[np.random.Generator, int], Params]
    render: Callable[[np.random.Generator, Params], Colours]


# Iterated function systems: points of random affine maps


def draw_fractals(rng: np.random.Generator, count: int) -> Params:
    """Systems of 2 to 5 contracting maps whose image fills 12 to 60 % of the pixels."""
    tried = 8 * count
    turns, flips = rng.uniform(-np.pi, np.pi, (2, tried, 5))
    first, second = rng.uniform(0.25, 0.85, (2, tried, 5))
    second = second * rng.choice([-1, 1], (tried, 5))
    left, right = _rotation(turns), _rotation(flips)
    maps = np.einsum("nkab,nkb,nkbc->nkac", left, np.stack([first, second], -1), right)
    moves = rng.uniform(-1, 1, (tried, 5, 2))
    weight = np.abs(np.linalg.det(maps)) + 0.03
    weight *= np.arange(5) < rng.integers(2, 6, (tried, 1))
    params = {
        "maps": maps,
        "moves": moves,
        "chance": np.cumsum(weight / weight.sum(-1, keepdims=True), -1),
    }
    filled = (fractal_masks(rng, params, jitter=0.0) > 0.1).mean((1, 2))
    good = np.flatnonzero((filled > 0.12) & (filled < 0.6))[:count]
    return {name: value[good] for name, value in params.items()}


def fractal_masks(rng: np.random.Generator, params: Params, *, jitter: float) -> Fields:
    """The chaos game: 60 random maps for each of 48 points per image; the first 10 points are not
    shown."""
    count = len(params["maps"])
    chains = 48
    maps = params["maps"] + jitter * rng.normal(0, 1, params["maps"].shape)
    maps = np.concatenate([maps, params["moves"][..., None]], -1).astype(np.float32)  # [N K 2 3]
    maps = maps.reshape(-1, 6)
    chance = params["chance"][:, None]
    points = np.zeros((60, count, chains, 2), np.float32)
    rows = 5 * np.arange(count)[:, None]
    for step in range(1, 60):
        chosen = (rng.random((count, chains, 1), np.float32) > chance[..., :-1]).sum(-1)
        a, b, tx, c, d, ty = np.moveaxis(maps[rows + chosen], -1, 0)
        x, y = points[step - 1, ..., 0], points[step - 1, ..., 1]
        points[step, ..., 0] = np.clip(a * x + b * y + tx, -9, 9)
        points[step, ..., 1] = np.clip(c * x + d * y + ty, -9, 9)
    points = points[10:].transpose(1, 0, 2, 3).reshape(count, -1, 2)
    points -= points.mean(1, keepdims=True)
    points /= 2.1 * points.std(1, keepdims=True) + 1e-6
    points = np.einsum("nab,npb->npa", _rotation(rng.uniform(-4, 4, count) * jitter), points)
    points *= np.exp(rng.uniform(-5, 5, (count, 1, 2)) * jitter)
    fine = 2 * SIZE
    cells = np.floor((points + 1) * SIZE).astype(np.int64)
    inside = ((cells >= 0) & (cells < fine)).all(-1)
    flat = (np.arange(count)[:, None] * fine + cells[..., 1]) * fine + cells[..., 0]
    hits = np.bincount(flat[inside], minlength=count * fine * fine).reshape(count, SIZE, 2, SIZE, 2)
    return np.minimum(1, 1.3 * (1 - np.exp(-0.9 * hits)).mean((2, 4))).astype(np.float32)


def _rotation(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(
        *angle.shape, 2, 2
    )


# Radial contours: polygons, stars and blobs, filled or in rings


def draw_contours(rng: np.random.Generator, count: int) -> Params:
    return {
        "sides": rng.integers(2, 9, count),  # 2: a disc
        "waves": rng.normal(0, 0.13, (count, 6)) * (rng.uniform(0, 1, (count, 6)) < 0.4),
        "phases": rng.uniform(-np.pi, np.pi, (count, 6)),
        "rings": rng.choice([0, 0, 0, 1, 1, 2, 3], count),  # 0: filled
        "thick": rng.uniform(0.25, 0.75, count),
        "aspect": np.exp(rng.normal(0, 0.25, count)),
        "turn": rng.uniform(-np.pi, np.pi, count),
    }


def render_contours(rng: np.random.Generator, params: Params) -> Colours:
    p = {
        name: value.astype(np.float32)[:, None, None]
        for name, value in params.items()
        if value.ndim == 1
    }
    x, y = grid(rng, len(params["sides"]), turn=0.4, zoom=0.25, shift=0.25)
    angle = np.arctan2(y, x * p["aspect"]) + p["turn"]
    wedge = 2 * np.pi / np.maximum(p["sides"], 3)
    polygon = np.cos(wedge / 2) / np.cos(angle % wedge - wedge / 2)
    reach = 0.72 * np.where(p["sides"] < 3, 0.85, polygon)
    waves = params["waves"] + 0.02 * rng.normal(0, 1, params["waves"].shape)
    for k in range(6):
        reach = reach * (
            1
            + waves[:, k, None, None] * np.cos((k + 1) * angle + params["phases"][:, k, None, None])
        )
    depth = 1 - np.hypot(x, y * 1.0) / reach  # 1 in the middle, 0 on the outline
    edge = np.clip(0.5 + depth * 0.6 * SIZE / 2, 0, 1)
    phase = (depth * (p["rings"] + 0.5 * (p["rings"] < 2))) % 1
    ring = np.clip(0.5 + (p["thick"] - phase) * SIZE / (5 * np.maximum(p["rings"], 1)), 0, 1)
    return figure(rng, (edge * np.where(p["rings"] == 0, 1, ring)).astype(np.float32))


# Strokes: signs of one to three Bezier curves


def draw_strokes(rng: np.random.Generator, count: int) -> Params:
    points = rng.uniform(-0.8, 0.8, (count, 3, 4, 2))
    joined = (
        rng.uniform(0, 1, (count, 2)) < 0.5
    )  # a stroke can start at the end of the previous one
    for k in (1, 2):
        points[:, k, 0] = np.where(joined[:, k - 1, None], points[:, k - 1, 3], points[:, k, 0])
    straight = rng.uniform(0, 1, (count, 3, 1)) < 0.4
    for k in (1, 2):
        line = points[:, :, 0] + (points[:, :, 3] - points[:, :, 0]) * k / 3
        points[:, :, k] = np.where(straight, line, 1.3 * points[:, :, k])
    used = np.arange(3) < rng.choice([1, 2, 2, 3], (count, 1))
    points = np.where(used[..., None, None], points, points[:, :1])  # unused: repeat the first
    low = points.min((1, 2), keepdims=True)
    high = points.max((1, 2), keepdims=True)
    points = (points - (low + high) / 2) * 0.72 / (np.max(high - low, -1, keepdims=True) / 2 + 1e-6)
    return {"points": points}


def render_strokes(rng: np.random.Generator, params: Params) -> Colours:
    points = params["points"]
    count = len(points)
    segments = 7
    jittered = points + rng.normal(0, 0.06, points.shape)
    same = (points == points[:, :1]).all((2, 3))[..., None, None]  # repeated strokes stay equal
    jittered = np.where(same, jittered[:, :1], jittered)
    t = np.linspace(0, 1, segments + 1)[:, None]
    basis = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], -1)
    curve = np.einsum("tk,nskd->nstd", basis, jittered).astype(np.float32)
    x, y = grid(rng, count, turn=0.25, zoom=0.25, shift=0.15)
    lean = rng.normal(0, 0.15, (count, 1, 1)).astype(np.float32)
    x = x + lean * y
    nearest = np.full_like(x, np.inf)
    starts = curve[:, :, :-1].reshape(count, -1, 2)
    ends = curve[:, :, 1:].reshape(count, -1, 2)
    for start, end in zip(starts.transpose(1, 0, 2), ends.transpose(1, 0, 2), strict=True):
        ax, ay = start[:, 0, None, None], start[:, 1, None, None]
        dx, dy = end[:, 0, None, None] - ax, end[:, 1, None, None] - ay
        along = ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy + 1e-6)
        along = np.clip(along, 0, 1)
        nearest = np.minimum(nearest, (x - ax - along * dx) ** 2 + (y - ay - along * dy) ** 2)
    width = rng.uniform(0.05, 0.17, (count, 1, 1)).astype(np.float32)
    soft = rng.uniform(6, 16, (count, 1, 1)).astype(np.float32)
    return figure(rng, np.clip(0.5 + (width - np.sqrt(nearest)) * soft, 0, 1))


# Textures: sums of plane waves, and filtered noise


def draw_waves(rng: np.random.Generator, count: int) -> Params:
    angle = rng.uniform(0, np.pi, (count, 3))
    cycles = np.exp(rng.uniform(np.log(1.0), np.log(5.5), (count, 3)))
    size = rng.uniform(0.4, 1, (count, 3)) * (np.arange(3) < rng.integers(1, 4, (count, 1)))
    return {"angle": angle, "cycles": cycles, "size": size, "shape": rng.integers(0, 4, count)}


def render_waves(rng: np.random.Generator, params: Params) -> Colours:
    x, y = grid(rng, len(params["shape"]), turn=0.2, zoom=0.15, shift=0.5)
    x = x + rng.uniform(0, 0.12, (len(x), 1, 1)) * rough(rng, np.full(len(x), 2.5)) * 0.3
    waves = []
    for k in range(3):
        fx, fy = (
            np.pi
            * params["cycles"][:, k]
            * (np.cos(params["angle"][:, k]), np.sin(params["angle"][:, k]))
        )
        phase = rng.uniform(-np.pi, np.pi, (len(x), 1, 1))
        waves.append(
            params["size"][:, k, None, None]
            * np.sin(fx[:, None, None] * x + fy[:, None, None] * y + phase)
        )
    total = sum(waves) / params["size"].sum(-1)[:, None, None]
    shape = params["shape"][:, None, None]
    smooth, sharp = 0.5 + 0.5 * total, 0.5 + 0.5 * np.tanh(6 * total)
    field = np.select(
        [shape == 0, shape == 1, shape == 2], [smooth, sharp, np.abs(total)], np.maximum(total, 0)
    )
    return ramp(rng, np.clip(field, 0, 1).astype(np.float32))


def draw_noises(rng: np.random.Generator, count: int) -> Params:
    return {
        "angle": rng.uniform(0, np.pi, count),
        "stretch": np.exp(rng.uniform(0, 1.6, count)),
        "centre": np.exp(rng.uniform(np.log(1.5), np.log(10), count)),  # cycles per image
        "band": rng.uniform(0.2, 0.8, count),
        "shape": rng.integers(0, 4, count),
    }


def render_noises(rng: np.random.Generator, params: Params) -> Colours:
    p = {name: value[:, None, None] for name, value in params.items()}
    angle = p["angle"] + rng.uniform(-0.2, 0.2, p["angle"].shape)
    fy = np.fft.fftfreq(SIZE, 1 / SIZE)[:, None]
    fx = np.fft.rfftfreq(SIZE, 1 / SIZE)[None]
    u = np.cos(angle) * fx + np.sin(angle) * fy
    v = np.cos(angle) * fy - np.sin(angle) * fx
    radius = np.hypot(u * p["stretch"], v / np.sqrt(p["stretch"])) * np.exp(
        rng.uniform(-0.1, 0.1, angle.shape)
    )
    field = filtered(
        rng, np.exp(-0.5 * (np.log(np.maximum(radius, 0.3) / p["centre"]) / p["band"]) ** 2)
    )
    shape = p["shape"]
    field = np.select(
        [shape == 0, shape == 1, shape == 2],
        [0.5 + 0.25 * field, 0.5 + 0.5 * np.tanh(4 * field), 1 - 0.7 * np.abs(field)],
        np.clip(field - 0.6, 0, 1),
    )
    return ramp(rng, np.clip(field, 0, 1).astype(np.float32))


# Mosaics: Voronoi cells in colours of the class


def draw_mosaics(rng: np.random.Generator, count: int) -> Params:
    return {
        "cells": rng.integers(3, 22, count),
        "palette": rng.uniform(0, 1, (count, 3, 3)),
        "block": rng.uniform(0, 1, count) < 0.5,  # city-block distance
        "joint": rng.choice([0.0, 0.0, 0.06, 0.12], count),
    }


def render_mosaics(rng: np.random.Generator, params: Params) -> Colours:
    count = len(params["cells"])
    most = 22
    x, y = grid(rng, count, turn=0.6, zoom=0.2, shift=0.0)
    sites = rng.uniform(-1.2, 1.2, (count, most, 2)).astype(np.float32)
    dx, dy = (
        np.abs(x[:, None] - sites[..., 0, None, None]),
        np.abs(y[:, None] - sites[..., 1, None, None]),
    )
    distance = np.where(params["block"][:, None, None, None], dx + dy, np.hypot(dx, dy))
    distance = np.where((np.arange(most) < params["cells"][:, None])[..., None, None], distance, 99)
    cell = distance.argmin(1)
    first, second = np.moveaxis(np.partition(distance, 1, axis=1)[:, :2], 1, 0)
    palette = np.clip(params["palette"] + rng.normal(0, 0.06, (count, 3, 3)), 0, 1)
    palette = palette * rng.uniform(0.75, 1.15, (count, 1, 1))
    colour_of_cell = palette[np.arange(count)[:, None], rng.integers(0, 3, (count, most))]
    colour = colour_of_cell[np.arange(count)[:, None, None], cell]
    joint = ((second - first) < params["joint"][:, None, None])[..., None]
    return np.where(joint, rng.choice([0.05, 0.95], (count, 1, 1, 1)), colour).astype(np.float32)


FAMILIES: tuple[Family, ...] = (
    Family(
        "fractals",
        110,
        draw_fractals,
        lambda rng, p: figure(rng, fractal_masks(rng, p, jitter=0.05)),
    ),
    Family("contours", 100, draw_contours, render_contours),
    Family("strokes", 130, draw_strokes, render_strokes),
    Family("waves", 50, draw_waves, render_waves),
    Family("noises", 40, draw_noises, render_noises),
    Family("mosaics", 50, draw_mosaics, render_mosaics),
)
NUM_CLASSES = sum(family.num_classes for family in FAMILIES)


def formula_images(
    seed: int, per_class: int, *, chunk: int = 512
) -> tuple[UInt8[np.ndarray, "N 32 32 3"], Int32[np.ndarray, "N"]]:
    """`per_class` images of every class, class by class, a function of its arguments alone."""
    jobs = []
    first = 0
    for index, family in enumerate(FAMILIES):
        params = family.draw(np.random.default_rng([seed, index]), family.num_classes)
        own = np.repeat(np.arange(family.num_classes), per_class)
        for start in range(0, len(own), chunk):
            rows = own[start : start + chunk]
            jobs.append(
                (family, params, rows, first + rows, np.random.default_rng([seed, index, start]))
            )
        first += family.num_classes

    def make(job) -> np.ndarray:
        family, params, rows, _, rng = job
        images = family.render(rng, {name: value[rows] for name, value in params.items()})
        images += rng.normal(0, 1, images.shape) * rng.uniform(0, 0.06, (len(rows), 1, 1, 1))
        return np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy releases the lock in its loops
        images = np.concatenate(list(threads.map(make, jobs)))
    return images, np.concatenate([labels for _, _, _, labels, _ in jobs]).astype(np.int32)
