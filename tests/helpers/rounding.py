"""How far apart rounding alone may take two computations of the same numbers.

Two computations may be required to give equal bits only if they call the same kernels on the same shapes in the same
order: what is saved and loaded, a resumed run, a copy, the same cut of the same batch on one rank. Anything else adds
in another order: other micro-batches, other ranks, packed rows, a fused kernel, a formula written out. How it adds
depends on the processor too. The tolerance of such a comparison comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

EPS = 1e-4
"""What Adam adds to the root that it divides by, in most tests: its usual 1e-8 magnifies rounding 10,000 times more."""


def rounding(terms: int, condition: float = 1.0, dtype: torch.dtype = torch.float64) -> float:
    """The largest relative difference between two sums of the same ``terms`` numbers, in any two orders.

    Each of the ``terms - 1`` additions rounds by at most eps / 2, and both sums round. For a chain of sums, as in the
    layers of a model, the terms add up. ``condition`` is how much what is compared magnifies a relative error of the
    sums. For one sum it is the sum of the magnitudes of its terms, divided by the magnitude of the sum.
    """
    return terms * condition * torch.finfo(dtype).eps


ROUNDING = rounding(4096)
"""For a few steps of the small models of the tests in fp64: 9e-13.

No chain of sums is longer: at most 4 layers sum over some 150 numbers each, forward and again backward; a gradient sums
over up to 700 tokens, a softmax over 120 words. SGD has the condition 1, and so has Adam with ``EPS``.
"""


def round_otherwise(gradients: Iterable[Tensor], terms: int) -> None:
    """Change gradients as much as another order of their sums may: a reference that runs with it shows the condition.

    Each number changes by up to ``rounding(terms)`` of the root mean square of all gradients. Relative to itself, a
    number near zero changes by any amount: it is what rounding leaves of terms that cancel. The gradient of the biases
    of attention's keys is nothing else. Adam, NAdam and RMSprop divide by the size of a gradient, so they move the
    weight of such a number by up to the learning rate over eps times the change. No constant tolerance covers that.
    A gradient of zeros, as behind a head of zeros, stays one: sums of zeros are zero in any order.
    """
    gradients = list(gradients)
    size = torch.cat([gradient.flatten() for gradient in gradients]).square().mean().sqrt()
    generator = torch.Generator().manual_seed(0)
    for gradient in gradients:
        noise = torch.rand(gradient.shape, generator=generator, dtype=torch.float64) * 2 - 1
        scale = size * rounding(terms, dtype=gradient.dtype) * gradient.any()
        gradient.add_(noise.to(gradient.dtype) * scale)
