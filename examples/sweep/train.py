#!/usr/bin/env python3
"""Train a softmax regression with NumPy and tell the sweep its accuracy: one configuration's job.

It is real training, and NumPy rather than PyTorch for one reason: forty processes that import PyTorch at once keep
two processor cores busy for longer than the whole search takes. ``--step-s`` paces the steps, as in ``../train.py``.
"""

from __future__ import annotations

import argparse
import time  # noqa: TID251 (a training script of a user)
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cadenza.sidecar import client

Array = NDArray[np.float64]
FEATURES, CLASSES, BATCH = 32, 10, 64
MOMENTUM = 0.9
STEPS = 2400
EVERY = 5
"""Steps between two results."""


def data(seed: int, rows: int) -> tuple[Array, NDArray[np.int64]]:
    """Return features, (rows, FEATURES), on scales from 1 to 0.1, and the classes that a fixed teacher gives them."""
    teacher = np.random.default_rng(7).normal(size=(FEATURES, CLASSES))
    plain = np.random.default_rng(seed).normal(size=(rows, FEATURES))
    return plain * np.logspace(0, -1, FEATURES), (plain @ teacher).argmax(axis=1)


def slope(weights: Array, inputs: Array, classes: NDArray[np.int64]) -> Array:
    """Return the gradient of the mean cross-entropy."""
    scores = inputs @ weights
    guess = np.exp(scores - scores.max(axis=1, keepdims=True))
    guess /= guess.sum(axis=1, keepdims=True)
    guess[np.arange(len(classes)), classes] -= 1
    return np.asarray(inputs.T @ guess / len(classes))


def training(lr: float, decay: float, steps: int = STEPS) -> Iterator[float]:
    """Train; yield the accuracy on rows that are not trained on, after each step."""
    (inputs, classes), (held_out, wanted) = data(1, 4000), data(2, 1000)
    weights = np.zeros((FEATURES, CLASSES))
    speed = np.zeros_like(weights)
    draws = np.random.default_rng(0)
    for _ in range(steps):
        batch = draws.integers(0, len(classes), BATCH)
        speed = MOMENTUM * speed - lr * (slope(weights, inputs[batch], classes[batch]) + decay * weights)
        weights = weights + speed
        yield float(np.mean((held_out @ weights).argmax(axis=1) == wanted))


def main() -> None:
    """Train one configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--decay", type=float, required=True, help="weight decay")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--step-s", type=float, default=0.0, help="pace: least duration of a step")
    options = parser.parse_args()
    client.attach()
    began = time.monotonic()
    for step, accuracy in enumerate(training(options.lr, options.decay, options.steps), 1):
        time.sleep(max(0.0, began + options.step_s - time.monotonic()))
        if step % EVERY == 0:
            client.report(accuracy, step)
        client.boundary()
        began = time.monotonic()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
