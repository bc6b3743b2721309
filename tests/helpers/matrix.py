"""The same three AdamW steps, by a plain PyTorch loop and by our engine with any combination of memory techniques."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from helpers.problems import Problem as Samples
from helpers.problems import collate, host_sum, launched_fabric, make_model, make_samples
from helpers.rounding import EPS
from trainer.contract import Data, DrawnInputs, Model, Packable, WholeBatch, capability
from trainer.engine.cut import cut_at, cut_batch, data_parallel_rank
from trainer.engine.order import batch_indices, derive_seed
from trainer.engine.step import Stepper
from trainer.engine.window import Windows
from trainer.memory import activation_offload
from trainer.memory.initialize import build_module
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.sharding import fabric_strategy
from trainer.memory.stack import apply_stack, build_optimizer_and_sync, full_state_dict
from trainer.recipe import Memory, Optim, Recipe
from trainer.run.collectives import sum_over_data_parallel
from trainer.values import Request

STEPS = 3
ADAMW = Optim("adamw", lr=1e-3, weight_decay=0.1, eps=EPS, clip_norm=1.0)
OPTIM = {"sgd": Optim("sgd", lr=0.1), "adamw": ADAMW}
"""SGD moves weights by as much as a gradient is wrong, of which AdamW and clipping take out a factor."""
AUTOCAST = {"bf16-mixed": torch.bfloat16}
TYPES = {"64-true": torch.float64}


@dataclass(frozen=True)
class Case:
    """What is trained, how; picklable, so that every rank can set it up."""

    name: str  # of the model, for ``make_model``
    memory: Memory  # also decides how the batches are cut
    world_size: int = 1
    dropout: float = 0.0
    size: int = 19  # training samples; the last batch of an epoch may be smaller
    batch_size: int = 8
    optim: Optim = ADAMW
    accumulate: int | None = None

    @property
    def model(self) -> Model:
        """The model, with its dropout."""
        model = make_model(self.name)
        return dataclasses.replace(model, dropout=self.dropout)  # type: ignore[type-var]

    @property
    def recipe(self) -> Recipe:
        """The recipe that a user would write."""
        settings = {"batch_size": self.batch_size, "accumulate": self.accumulate, "epochs": 9}
        return Recipe(model=self.model, data=Data(), optim=self.optim, memory=self.memory, **settings)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        """The training set."""
        return make_samples(Samples(self.name, self.size, self.batch_size, 1))

    @property
    def lengths(self) -> list[int] | None:
        """The tokens of each sample, if samples are texts."""
        samples = self.samples
        return [len(sample["input_ids"]) for sample in samples] if "input_ids" in samples[0] else None

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """A micro-batch of these samples."""
        return collate(samples)

    def prepared(self, module: nn.Module) -> nn.Module:
        """What to do to a module that was built."""
        return perturbed(module)


def perturbed(module: nn.Module, scale: float = 0.05) -> nn.Module:
    """Add noise to all parameters except NF4 codes: a head that starts at zero would hide errors behind it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, module.parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype) * scale)
    return module


def steps_of(case: Case, steps: Sequence[int] = range(STEPS)) -> list[tuple[int, int]]:
    """Epoch and step within it, of ``steps``."""
    per_epoch = -(-case.size // case.batch_size)
    return [divmod(step, per_epoch) for step in steps]


def plain_run(
    case: Case, steps: Sequence[int] = range(STEPS), decay: float = 1.0, kind: type | None = None
) -> dict[str, Any]:
    """The reference: plain PyTorch, one process, no technique; the micro-batches one after the other.

    They are those of the run that it is compared with, and dropout is seeded alike, as masks depend on the cut. The
    optimizer is of the class ``kind``, AdamW by default; its rate is multiplied by ``decay`` after each step.
    """
    precision = case.memory.precision
    torch.manual_seed(0)
    torch.set_default_dtype(TYPES.get(precision, torch.float32))
    module = case.prepared(case.model.build()).train()
    torch.set_default_dtype(torch.float32)
    optimizer = plain_optimizer(module, case, kind)
    samples, losses = case.samples, []
    for epoch, step in steps_of(case, steps):
        indices = batch_indices(0, epoch, step, case.size, case.batch_size)
        shares = data_parallel_rank(case.memory, 0, case.world_size)[1]
        pieces = cut_batch(indices, cut_at(case.recipe, case.world_size, epoch), shares, case.lengths)
        total = 0.0
        for number, piece in enumerate(pieces):
            if not piece:
                continue
            torch.manual_seed(derive_seed(0, epoch, step, number))
            collated = collate([samples[index] for index in piece])
            batch = capability(case.model, Packable).packed(collated)  # dropout is drawn for its tokens
            loss = plain_loss(module, batch, precision) / len(indices)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), case.optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= decay
        losses.append(total)
    return {"state": module.state_dict(), "losses": losses}


def plain_loss(module: nn.Module, batch: dict[str, Tensor], precision: str) -> Tensor:
    """The summed cross entropy, as a textbook writes it."""
    labels = batch.pop("labels")
    dtype = TYPES.get(precision, torch.float32)
    floating = {key for key, value in batch.items() if isinstance(value, Tensor) and value.is_floating_point()}
    batch = {key: value.to(dtype) if key in floating else value for key, value in batch.items()}
    with torch.autocast("cpu", AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST):
        logits = module(batch["pixel_values"]) if "pixel_values" in batch else module(**batch).logits
    return nn.functional.cross_entropy(logits.to(dtype), labels, reduction="sum")


def stacked_run(case: Case) -> dict[str, Any]:
    """Our engine's answer; the state is whole on the first rank."""
    plan = decide_plan(case.recipe, case.world_size)
    _, stepper, windows, stack = set_up(case, plan)
    losses = []
    for epoch, step in steps_of(case):
        (window,) = windows.epoch(epoch, step, step + 1)
        result = stepper.step(window)
        assert not result.skipped
        losses.append(result.loss)
    return {"state": {name: tensor.cpu() for name, tensor in full_state_dict(stack).items()}, "losses": losses}


def launched(plan: Plan) -> Fabric:
    """Fabric as a run of ``plan`` has it."""
    return launched_fabric(plan.memory, plan.world_size, fabric_strategy(plan, "cpu"))


def set_up(case: Case, plan: Plan) -> tuple[Fabric, Stepper, Windows, Any]:
    """Everything that takes steps."""
    activation_offload.MIN_OFFLOAD_BYTES = 0  # the tensors of these models are small
    fabric = launched(plan)
    recipe, samples = case.recipe, case.samples
    module = case.prepared(build_module(fabric, recipe.model, 0, plan))
    stack = apply_stack(fabric, recipe.model, module, plan)
    optimizer, sync = build_optimizer_and_sync(fabric, recipe.model, stack, recipe.optim, plan)
    copies, clip_norm = recipe.memory.tensor_parallel, recipe.optim.clip_norm
    stepper = Stepper(fabric, recipe.model, stack.wrapped, optimizer, sync=sync, clip_norm=clip_norm, copies=copies)
    once = sum_over_data_parallel(recipe.memory, fabric.global_rank, host_sum)
    share, shares = data_parallel_rank(recipe.memory, fabric.global_rank, case.world_size)
    windows = Windows(
        size=case.size,
        cut_at=partial(cut_at, recipe, case.world_size),
        fetch=lambda requests: (fetched(samples, request, case.collate) for request in requests),
        weigh=recipe.model.weigh,
        seed=0,
        rank=share,
        world_size=shares,
        reduce=list if case.world_size == 1 else once,
        lengths=case.lengths,
        augmented=capability(recipe.model, DrawnInputs).seeded,
        whole=isinstance(recipe.model, WholeBatch),
    )
    return fabric, stepper, windows, stack


def fetched(samples: Sequence[dict[str, Tensor]], request: Request, collate: Callable[..., Any]) -> dict[str, Tensor]:
    """The micro-batch of a request, with its seeds if the model asks for some."""
    batch = collate([samples[index] for index in request.indices])
    return batch if request.seeds is None else {**batch, "seeds": torch.tensor(request.seeds)}


def difference(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the parameters and of the losses."""
    assert ours["state"].keys() == plain["state"].keys()
    a, b = (_flat(run["state"]) for run in (ours, plain))
    losses = [torch.tensor(run["losses"], dtype=torch.float64) for run in (ours, plain)]
    return {
        "parameters": float((a - b).norm() / b.norm()),
        "losses": float((losses[0] - losses[1]).norm() / losses[1].norm()),
    }


def _flat(state: dict[str, Tensor]) -> Tensor:
    """All parameters in one vector, without the biases of attention's keys in fp32 and below.

    Softmax does not see what all keys have in common, so the gradient of their biases is rounding and nothing else.
    Some optimizers make steps of full length of it (Lion). In fp64 AdamW does not: its eps is far above the rounding.
    """
    parts = []
    for name, tensor in sorted(state.items()):
        flat = tensor.double().flatten()
        if tensor.dtype == torch.float64 or not name.endswith(("in_proj_bias", "k_lin.bias", "key.bias")):
            parts.append(flat)
        elif name.endswith("in_proj_bias"):
            queries, _, values = flat.chunk(3)
            parts += [queries, values]
    return torch.cat(parts)


def exact_memory(cut: Any, place: Any, checkpointing: str = "none", offload: str = "none") -> Memory:
    """Memory settings in fp64: ``cut`` is samples and tokens of a micro-batch, ``place`` begins with the strategy."""
    samples, tokens = cut
    settings = {"activation_checkpointing": checkpointing, "cpu_offload": offload, "micro_batch_tokens": tokens}
    return Memory(precision="64-true", strategy=place[0], micro_batch_size=samples, **settings)


def name_of(values: dict[str, Any]) -> str:
    """The identifier of a test with these arguments."""
    return ",".join(f"{key}={value}" for key, value in values.items()).replace(" ", "")


def plain_optimizer(module: nn.Module, case: Case, kind: Any = None) -> Any:
    """The optimizer of a plain loop: of the class ``kind``, by default torch's SGD or AdamW; only matrices decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": case.optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    eps = {} if case.optim.eps is None else {"eps": case.optim.eps}
    kind = kind or (torch.optim.SGD if case.optim.name == "sgd" else torch.optim.AdamW)
    return kind(groups, lr=case.optim.lr, **eps)
