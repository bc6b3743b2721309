"""Peak memory and step time of a recipe, predicted without a GPU, and the fastest plan that fits a budget.

For training loops outside this package, use :func:`fake_gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.fakegpu.user_loop import FakeGPU, fake_gpu

__all__ = ["FakeGPU", "fake_gpu"]


def __getattr__(name: str) -> Any:  # imported on use: they load torch and much of it
    if name not in __all__:
        raise AttributeError(f"module 'trainer.planner' has no attribute {name!r}")
    from trainer.fakegpu import user_loop
    from trainer.report.plots import plot_plan

    user_loop.draw = plot_plan
    return getattr(user_loop, name)
