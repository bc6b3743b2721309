"""``python benchmarks/fake_ranks.py RANKS fit RECIPE ... --run.dir=DIR``: the first of many ranks, on one real GPU.

The other ranks are not there: torch's fake process group answers at once, with this rank's own values. Launch, model,
sharding, steps and the gathering of the weights are those of ``trainer fit``, on real tensors and streams, so that the
memory is that of a rank; only NCCL's own buffers, which torch's allocator does not give, are missing. The samples are
the planner's: the first batch of the run, the longest micro-batch, the first batch. ``DIR/summary.json`` has the peaks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from common import resolve
from lightning_fabric import Fabric
from torch.distributed import ReduceOp

from trainer.engine.memory_rehearsal import rehearse
from trainer.engine.step import Stepper
from trainer.errors import RecipeError, require
from trainer.fakegpu.fake_process_group import fake_ranks
from trainer.launching.start import launch
from trainer.launching.world import World
from trainer.memory.initialize import build_module
from trainer.memory.monitor import MemoryMonitor
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.stack import apply_stack, build_optimizer_and_sync, full_state_dict
from trainer.planner.predict import prepare_recipe
from trainer.planner.traced_run import draw_samples
from trainer.recipe import Recipe


def take_steps(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """What ``trainer fit`` does on one of ``ranks``, for three steps; returns the content of ``summary.json``.

    Raises:
        RecipeError: for a recipe that is not sharded: DDP's reducer in C++ wants answers that a fake group has not.
    """
    recipe = prepare_recipe(recipe)
    plan = decide_plan(recipe, ranks)
    require(plan.strategy == "fsdp", f"memory.strategy={plan.strategy} cannot be measured with fake ranks: use fsdp")
    print(f"plan: {plan.describe()}", flush=True)
    samples = draw_samples(recipe, plan)
    fake_ranks(ranks, nodes=ranks)
    _answer_reductions()
    fabric = launch(plan, World("torchrun", recipe.run.accelerator, devices=1, nodes=ranks))
    monitor = MemoryMonitor(fabric.device)
    stepper, stack = build_stepper(fabric, recipe, plan, monitor)
    stepper.module.train()
    monitor.enter(None)
    if recipe.memory.micro_batch_size == "auto" and not stepper.sync.updates_in_backward:
        rehearse(stepper, samples.longest)
    for window in (samples.first, samples.longest, samples.first):
        stepper.step(window)
    full_state_dict(stack)
    memory = monitor.report(all_ranks=False)
    return {"steps": 3, "skipped_steps": stepper.skipped_steps, "memory": memory}


def build_stepper(
    fabric: Fabric, recipe: Recipe, plan: Plan, monitor: MemoryMonitor | None = None
) -> tuple[Stepper, Any]:
    """The stepper and the stack, as ``trainer.fit`` makes them."""
    module = build_module(fabric, recipe.model, recipe.seed, plan)
    stack = apply_stack(fabric, recipe.model, module, plan, recipe.seed)
    optimizer, sync = build_optimizer_and_sync(fabric, recipe.model, stack, recipe.optim, plan)
    stepper = Stepper(
        fabric,
        recipe.model,
        stack.wrapped,
        optimizer,
        sync=sync,
        clip_norm=recipe.optim.clip_norm,
        correct_batchnorm=recipe.memory.correct_batchnorm,
        phases=monitor,
    )
    return stepper, stack


def _answer_reductions() -> None:
    """Let reductions answer as if every rank had this one's values: a fake group only says that it is done.

    Without it the sum over the ranks would show that the others are missing, and reduce-scatter of torch 2.11 would
    leave garbage for gradients. Nothing is allocated for it.
    """
    torch.distributed.all_reduce = _summed(torch.distributed.all_reduce)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the second is what newer versions call it
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, _scattered(getattr(torch.distributed, name)))


def _summed(all_reduce: Any) -> Any:
    def summed(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = all_reduce(tensor, op, group, async_op)
        if op == ReduceOp.SUM:
            tensor.mul_(torch.distributed.get_world_size(group))
        return work

    return torch.no_grad()(summed)


def _scattered(reduce_scatter: Any) -> Any:
    def scattered(
        output: torch.Tensor, input: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        work = reduce_scatter(output, input, op, group, async_op)
        output.copy_(input.view(-1)[: output.numel()].view(output.shape))
        if op == ReduceOp.SUM:
            output.mul_(torch.distributed.get_world_size(group))
        return work

    return torch.no_grad()(scattered)


def main(argv: list[str]) -> int:
    """The command line; returns the exit code of ``trainer fit``: 2 for a recipe that cannot work."""
    ranks, arguments = int(argv[0]), argv[2:]
    try:
        recipe = resolve(arguments)
        summary = take_steps(recipe, ranks)
    except RecipeError as error:
        print(f"trainer: error: {error}", file=sys.stderr)
        return 2
    folder = Path(str(recipe.run.dir))
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
