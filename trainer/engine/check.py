"""Whether a model's losses are what the model says they are."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from trainer.contract import Loss, Model
from trainer.errors import RecipeError


class LossCheck:
    """Looks at the losses of the first step; afterwards nobody has the time.

    Args:
        model: whose ``losses``, ``weigh`` and ``loss_names`` must agree.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.kind = model, type(model).__name__
        self.seen: Counter[str] = Counter()

    def see(self, loss: Loss, batch: Any) -> None:
        """A loss must have a declared name, and report the weight that it is divided by.

        Raises:
            RecipeError: when it does not.
        """
        promised = self.model.weigh(batch)
        if loss.name not in promised or loss.name not in self.model.loss_names:
            raise RecipeError(
                f"{self.kind}: losses() yields {loss.name!r}, loss_names are {', '.join(self.model.loss_names)} and "
                f"weigh() weighs {', '.join(promised)}: use the same names in all three"
            )
        reported = float(loss.counted())
        if not math.isclose(promised[loss.name], reported, rel_tol=1e-6):
            raise RecipeError(
                f"{self.kind}: loss {loss.name!r} reports weight {reported:g} for a micro-batch that weigh() weighed "
                f"{promised[loss.name]:g}: make losses() and weigh() count the same items"
            )
        self.seen[loss.name] += 1

    def end(self, micro_steps: int) -> None:
        """Every declared loss must have come once a micro-batch.

        Raises:
            RecipeError: naming the one that did not.
        """
        for name in self.model.loss_names:
            if self.seen[name] != micro_steps:
                raise RecipeError(
                    f"{self.kind}: losses() yielded {name!r} {self.seen[name]} times in {micro_steps} micro-batches: "
                    "yield every one of loss_names once for each"
                )
