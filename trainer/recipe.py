"""The definition of a run: typed, validated dataclasses. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeVar, get_origin

from trainer.contract import Data, Metric, Model, OptionalAttributes, Settings
from trainer.errors import RecipeError, require, require_choice, require_positive, suggest_name
from trainer.system.field_types import require_types
from trainer.system.text import parse_budget, parse_duration

DecidedPrecision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]
Precision = Literal["auto", DecidedPrecision]
Strategy = Literal["auto", "single", "ddp", "fsdp"]
Schedule = Literal["constant", "cosine", "linear", "one_cycle", "plateau", "range_test"]
Compile = Literal["none", "blocks", "model", "cuda_graphs"]
MatmulPrecision = Literal["highest", "high", "medium"]
ScaleLR = Literal["none", "linear", "sqrt"]
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
_PER_CLASS_METRICS = [f"{name}{mean}" for name in ("f1", "precision", "recall") for mean in ("", "_macro", "_micro")]
_REWARDS, _RANKINGS = ("reward_accuracy", "reward_margin"), ("recall_at_1", "mrr")
_OTHER_METRICS = ("auroc", "average_precision", "mcc", "r2", "pearson", "spearman", *_REWARDS, *_RANKINGS)
_ACCURACIES = ("accuracy", "balanced_accuracy", "top5_accuracy", "subset_accuracy")
HIGHER_IS_BETTER = (*_ACCURACIES, *_PER_CLASS_METRICS, "f1_weighted", *_OTHER_METRICS)
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "mae", "mse", "rmse")
"""The metrics of an evaluation by name: first those where higher is better, then those where lower is better."""
_CLASS_MEANS = (name for name in HIGHER_IS_BETTER if name.endswith(("_macro", "_micro", "_weighted")))
_AVERAGED_METRICS = (*_CLASS_MEANS, "auroc", "average_precision")
_SINGLE_LABEL_METRICS = (*_ACCURACIES[:3], "mcc", "f1", "precision", "recall", *_AVERAGED_METRICS, "perplexity")
REGRESSION_METRICS = ("mae", "mse", "rmse", "r2", "pearson", "spearman")
METRICS_BY_TASK: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("single_label", "token"), _SINGLE_LABEL_METRICS),
    "multi_label": (*_AVERAGED_METRICS, "subset_accuracy"),
    "regression": REGRESSION_METRICS,
    "language": ("perplexity", "bits_per_byte"),
    "masked_language": ("perplexity",),
    "preference": _REWARDS,
    "pairs": _RANKINGS,
}
"""The metrics that each task supports, in addition to the loss."""

T = TypeVar("T")


def within(interval: str, default: T, note: str = "") -> T:
    """Return a field whose value must be null or in ``interval``, such as ``[0, 1)``; ``note`` ends the message."""
    return field(default=default, metadata={"interval": interval, "note": note})


INTERVALS = {"(0, inf)": "greater than 0, and finite", "(0, inf]": "greater than 0", "[0, inf)": "at least 0"}

MAX_WORKERS = 1024  # maximum number of processes of a run on one machine

UNSUPPORTED_VALUES = {
    ("memory.strategy", "dp"): "torch.nn.DataParallel copies the model to every GPU in every forward, and torch itself "
    "advises against it; use ddp: the same gradient, faster",
    ("memory.strategy", "async"): "asynchronous SGD adds gradients to newer weights than they were computed for: not "
    "the gradient of the batch, and not repeatable; use ddp, or fsdp",
    (
        "model.loss",
        "kto",
    ): "its KL term is an estimate from the other samples of a micro-batch, so the loss is not a sum "
    "over samples; use dpo, ipo, orpo or simpo",
}
"""Values that other trainers accept, and the reason why they are rejected here. See docs/techniques/sharding.md."""

OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop", "lion", "muon")
TORCH_OPTIM_PREFIX = "torch.optim."  # every class there is an optimizer, not custom code

GROUP_SETTINGS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr_scale": ("a factor greater than 0; frozen: true is none at all", lambda value: 0 < value < math.inf),
    "weight_decay": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "frozen": ("true or false", lambda value: True),
}
"""The settings of an entry of ``optim.groups``: a description and a check of each."""

VALUE_ALIASES = {
    ("memory.precision", "bf16"): "bf16-mixed",
    ("memory.precision", "fp16"): "16-mixed",
    ("run.accelerator", "gpu"): "cuda",
}
"""Other names of values, accepted as flags, in YAML and in Python."""

VALUE_SUGGESTIONS = {("run.resume", word): "auto" for word in ("yes", "true")}
VALUE_SUGGESTIONS |= {("run.resume", word): "none" for word in ("no", "false", "null")}
"""Wrong values of a key, and the value to suggest."""

MAX_SECONDS = 10**9  # maximum of any timeout, near the limit of threads


@dataclass(frozen=True)
class Optim(OptionalAttributes):
    """The optimizer and its learning rate. See docs/optimizers.md.

    Args:
        name: the optimizer: adamw, adam, sgd, adafactor, adagrad or rmsprop (torch.optim's), lion (timm's), muon (for
            the matrices of blocks; adamw for the rest), or any other by its full name, as in torch.optim.NAdam.
        factory: replaces name, in Python only: a class, or a function of (groups, lr, **arguments) that returns a
            torch.optim.Optimizer.
        arguments: more arguments of an optimizer by its full name, of the factory, or of torch.optim.Muon for muon.
        lr: learning rate at the reference batch size.
        weight_decay: decay of matrices; biases and norm weights (tensors of fewer than 2 dimensions) never decay.
        momentum: momentum of sgd and rmsprop.
        nesterov: Nesterov's momentum, for sgd.
        betas: the two decay rates of the moments of adam, adamw (also in muon) and lion; null is their default.
        eps: term that adam, adamw (also in muon), adagrad and rmsprop add to the denominator; null: their default.
        schedule: constant; cosine or linear, which reach min_lr after the last step; one_cycle, up to lr and down again
            (torch's OneCycleLR, without its momentum); plateau, reduced when evaluations stop improving; or
            range_test, which rises from min_lr to lr to find where training diverges.
        min_lr: final and minimum learning rate of the schedule; for one_cycle, 0 is its default, lr / 250,000.
        warmup_steps: steps over which the learning rate rises, linearly from 0 (one_cycle: by a cosine from lr / 25).
        warmup_ratio: the same as a fraction of all steps, from 0 to 1; null is not set (one_cycle: 0.3).
        plateau_patience: evaluations in a row without a lower validation loss that schedule plateau accepts.
        plateau_factor: factor on the learning rate after the next such evaluation, between 0 and 1.
        layer_decay: factor on the learning rate from each block to the block below it, such as 0.75: 1 for the head,
            the minimum for the embeddings; null is the same rate for all.
        groups: parameters by patterns of their names, with their settings, such as {"*head*": {lr_scale: 10,
            weight_decay: 0}, "*embed*": {frozen: true}}; if several patterns match, the last one wins.
        ema: decay of an exponential moving average of the weights, such as 0.999. Evaluations and the saved model then
            use the average; it takes 4 bytes per weight. null is none.
        ema_warmup: raise its decay from 0 in the first steps, as 1 - (1 + step)^(-2/3), for short runs.
        clip_norm: maximum global gradient norm; null turns clipping off.
        scale_lr: scale lr with batch_size / reference_batch_size: none, linear or sqrt.
        reference_batch_size: the batch size that lr was chosen for; needed by scale_lr.
    """

    name: str = "adamw"
    _: KW_ONLY
    factory: Any = field(default=None, metadata={"setting": False})
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    lr: float = within("(0, inf)", 1e-3)
    weight_decay: float = within("[0, inf)", 0.0)
    momentum: float = within("[0, 1)", 0.0)
    nesterov: bool = False
    betas: list[float] | None = None
    eps: float | None = within("(0, inf)", None)
    schedule: Schedule = "constant"
    min_lr: float = 0.0
    warmup_steps: int = within("[0, inf)", 0)
    warmup_ratio: float | None = within("[0, 1)", None, "; it is a fraction of all steps")
    plateau_patience: int = within("[0, inf)", 10)
    plateau_factor: float = within("(0, 1)", 0.1)
    layer_decay: float | None = within("(0, 1]", None)
    groups: dict[str, Any] = field(default_factory=dict, hash=False)
    ema: float | None = within("[0, 1)", None, "; null is no average")
    ema_warmup: bool = False
    clip_norm: float | None = within("(0, inf]", None, "; null turns clipping off")
    scale_lr: ScaleLR = "none"
    reference_batch_size: int | None = None

    def __post_init__(self) -> None:
        _check("optim.", self, positive=("reference_batch_size",))
        self._check_name()
        self._check_arguments()
        self._check_moments()
        self._check_schedule()
        self._check_groups()
        if self.scale_lr != "none" and self.reference_batch_size is None:
            key = f"optim.scale_lr={self.scale_lr}"
            raise RecipeError(f"{key} needs optim.reference_batch_size, the batch size that optim.lr was chosen for")

    @property
    def kind(self) -> str:
        """The name of the optimizer, or of its factory."""
        return self.name if self.factory is None else getattr(self.factory, "__qualname__", "a factory")

    @property
    def is_custom(self) -> bool:
        """Whether the optimizer is none of the built-in names."""
        return self.factory is not None or self.name not in OPTIMIZERS

    @property
    def is_code(self) -> bool:
        """Whether ``name`` is in a module outside torch: importing it executes user code."""
        is_in_torch = re.fullmatch(re.escape(TORCH_OPTIM_PREFIX) + r"[A-Za-z]\w*", self.name)
        return self.name not in OPTIMIZERS and is_in_torch is None

    def _check_name(self) -> None:
        is_path = "." in self.name and all(word.isidentifier() for word in self.name.split("."))
        if not is_path and self.name not in OPTIMIZERS:
            wanted = f"must be {'|'.join(OPTIMIZERS)}, or a full name such as torch.optim.NAdam"
            hint = suggest_name(self.name, OPTIMIZERS)
            if "8bit" in self.name.lower():
                hint = "; the state of adamw in 8 bits is memory.optimizer_state_bits 8"
            raise RecipeError(f"optim.name={self.name!r} {wanted}{hint}")
        if self.factory is None:
            return
        require(callable(self.factory), f"optim.factory={self.factory!r} must be a function or class")
        require(self.name == "adamw", f"optim.factory and optim.name={self.name} exclude each other: leave out one")

    def _check_arguments(self) -> None:
        if self.arguments and not self.is_custom and self.name != "muon":
            fix = f"set the fields of optim for {self.name}"
            raise RecipeError(f"optim.arguments={self.arguments} are for an optimizer by its full name: {fix}")
        for name in ("params", "lr", "weight_decay"):
            if name in self.arguments:
                what = "what is trained" if name == "params" else f"optim.{name}"
                raise RecipeError(f"optim.arguments has {name}: that is {what}, so leave it out")
        for name in ("momentum", "nesterov", *(("betas", "eps") if self.is_custom else ())):
            if (self.is_custom or self.name == "muon") and getattr(self, name):
                raise RecipeError(f"optim.{name} does not apply to {self.kind}: put it into optim.arguments")

    def _check_moments(self) -> None:
        if self.momentum and self.name not in ("sgd", "rmsprop"):
            raise RecipeError(f"optim.momentum={self.momentum} has no meaning for {self.name}: use sgd or rmsprop")
        if self.nesterov and not (self.name == "sgd" and self.momentum):
            raise RecipeError("optim.nesterov=true needs optim.name sgd and optim.momentum: give both, or use false")
        if self.betas is not None:
            if self.name not in ("adamw", "adam", "lion", "muon"):
                fix = "use null, or adamw, adam, lion or muon"
                raise RecipeError(f"optim.betas={self.betas} has no meaning for {self.name}: {fix}")
            if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
                raise RecipeError(f"optim.betas={self.betas} must be two numbers in [0, 1), such as [0.9, 0.999]")
        if self.eps is not None and self.name not in ("adamw", "adam", "adagrad", "rmsprop", "muon"):
            raise RecipeError(f"optim.eps={self.eps} has no meaning for {self.name}: leave it at null")

    def _check_schedule(self) -> None:
        low, steps, ratio = self.min_lr, self.warmup_steps, self.warmup_ratio
        require(0 <= low <= self.lr, f"optim.min_lr={low} must be between 0 and optim.lr={self.lr}")
        if low and self.schedule == "constant":
            fix = "use 0, or another schedule"
            raise RecipeError(f"optim.min_lr={low} has no meaning for optim.schedule=constant: {fix}")
        if self.schedule == "range_test" and (low == 0 or steps or ratio is not None):
            fix = "set optim.min_lr to more than 0, and no warm-up"
            raise RecipeError(f"optim.schedule=range_test grows from optim.min_lr: {fix}")
        if steps and ratio is not None:
            both = f"optim.warmup_steps={steps} and optim.warmup_ratio={ratio}"
            raise RecipeError(f"{both} exclude each other: leave out one")

    def _check_groups(self) -> None:
        known = ", ".join(GROUP_SETTINGS)
        for pattern, settings in self.groups.items():
            key = f"optim.groups[{pattern!r}]"
            if not isinstance(settings, Mapping) or not settings:
                raise RecipeError(f"{key}={settings!r} must be a mapping with any of {known}")
            for name, value in settings.items():
                if name not in GROUP_SETTINGS:
                    hint = suggest_name(str(name), GROUP_SETTINGS, 0.3) or f"; there are {known}"
                    raise RecipeError(f"{key} has no {name}{hint}")
                wanted, fits = GROUP_SETTINGS[name]
                is_right = isinstance(value, bool) if name == "frozen" else type(value) in (int, float) and fits(value)
                require(is_right, f"{key}.{name}={value!r} must be {wanted}")


@dataclass(frozen=True)
class Memory(Settings):
    """Settings of memory. The plan resolves the open ones. See docs/techniques/ for the cost of each.

    Args:
        budget: maximum memory of torch on each device, such as 2GB, 1.5GiB or 90%. The planner then decides all
            lossless settings that have their defaults, and takes the fastest plan that fits. See docs/planner/index.md.
        micro_batch_size: samples in one forward and backward pass; auto is the largest size for the batch, the ranks
            and accumulate that fits, found by trying the longest samples before training.
        micro_batch_tokens: maximum tokens of a micro-batch of text, with padding; micro_batch_size is a limit, too.
        precision: 32-true, 64-true, bf16-mixed (or bf16), 16-mixed (or fp16), bf16-true, 16-true, or auto: bf16-mixed
            on GPUs that support it (compute capability 8.0 or higher), 32-true on others and on a CPU.
        matmul_precision: arithmetic of fp32 products and convolutions on a GPU: highest (fp32), or, lossy, high (inputs
            rounded to the 10 bits of TF32) or medium (inputs of products rounded to the 7 bits of bfloat16).
        strategy: auto, single, ddp or fsdp; auto is single on one rank and ddp on several.
        tensor_parallel: number of ranks that share every block: each has a part of the attention heads and of the MLP's
            width, and all have the same samples. ddp or fsdp is used over the other ranks. 1 is off.
        sequence_parallel: with tensor_parallel, also split norms, residuals and dropout: each rank has its share of the
            tokens, and keeps fewer activations.
        replicas: copies of the sharded model under fsdp (hybrid sharding): the ranks of each copy share its shards.
        reshard_after_forward: under fsdp, free a block's whole weights after its forward and gather them again for
            its backward; false keeps them: faster, more memory.
        sync_every_micro_step: under fsdp, reduce gradients to shards after every micro-step instead of after the last:
            more communication, but no rank keeps whole gradients. null is true with cpu_offload, and false otherwise.
        activation_checkpointing: none, full (keep only the inputs of blocks, and recompute the rest in backward),
            selective (also keep the outputs of matrix products and attention), a fraction of the blocks to checkpoint
            fully, or auto (the planner decides).
        activation_offload: move large saved activations to host memory until backward needs them; or auto.
        cpu_offload: none; optimizer (gradients, fp32 master weights and optimizer state live in host memory);
            parameters (also all weights: the device holds one or two blocks at a time, by fsdp); or auto.
        optimizer_state_bits: 32, 8 or 4 bits for the state of adam and adamw; 8 and 4 are lossy.
        stochastic_rounding: for adam and adamw with bf16-true, round updates at random: small ones are kept on average.
        optimizer_in_backward: update each weight as soon as its gradient is ready, and free the gradient; null lets the
            planner decide, or is false.
        init: device creates weights on the device in their type; meta allocates memory only when model.weights are
            read, and each rank reads only its slices.
        compile: none, blocks, model or cuda_graphs: compile each block, or the whole model, with torch.compile;
            cuda_graphs also replays each block as one graph, for tiny micro-batches (not yet run on a GPU).
        expandable_segments: true makes torch's allocator on a GPU grow its segments of memory, which leaves fewer
            gaps; null keeps PYTORCH_ALLOC_CONF, and with a budget the planner chooses true for plans that need it.
        correct_batchnorm: null rejects BatchNorm in a batch that is cut: each micro-batch would be normalized alone.
            true and false accept that; true rescales the momentum to m' = 1 - (1 - m)^(1/k) for k micro-steps per step,
            without which the running statistics forget k times faster.
    """

    _: KW_ONLY
    budget: str | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    micro_batch_tokens: int | None = None
    precision: Precision = "32-true"
    matmul_precision: MatmulPrecision = "highest"
    strategy: Strategy = "auto"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    replicas: int = 1
    reshard_after_forward: bool = True
    sync_every_micro_step: bool | None = None
    activation_checkpointing: Literal["none", "selective", "full", "auto"] | float = "none"
    activation_offload: bool | Literal["auto"] = False
    cpu_offload: Literal["none", "optimizer", "parameters", "auto"] = "none"
    optimizer_state_bits: Literal[32, 8, 4] = 32
    stochastic_rounding: bool = False
    optimizer_in_backward: bool | None = None
    init: Literal["device", "meta"] = "device"
    compile: Compile = "none"
    expandable_segments: bool | None = None
    correct_batchnorm: bool | None = None

    def __post_init__(self) -> None:
        _check("memory.", self, positive=("tensor_parallel", "replicas", "micro_batch_size", "micro_batch_tokens"))
        if self.budget is not None:
            parse_budget(self.budget, 0)
        kept = self.activation_checkpointing
        is_fraction = isinstance(kept, int | float) and not isinstance(kept, bool) and 0 <= kept <= 1
        if not is_fraction and kept not in ("none", "selective", "full", "auto"):
            wanted = "must be none, selective, full, auto or a fraction of the blocks from 0 to 1"
            raise RecipeError(f"memory.activation_checkpointing={kept!r} {wanted}")


@dataclass(frozen=True)
class Checkpoint(Settings):
    """When the state of training is saved, so that the run can be resumed. See docs/checkpoints.md.

    Args:
        every: steps between checkpoints, or a time such as 15min or 1h; null saves only when the run is asked to stop.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the best evaluations to keep in addition.
        asynchronous: continue training while a checkpoint is written; false waits until it is on disk.
    """

    _: KW_ONLY
    every: int | str | None = "15min"
    keep_last: int = 2
    keep_best: int = within("[0, inf)", 0)
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _check("checkpoint.", self, positive=("keep_last",))
        if isinstance(self.every, str):
            parse_duration(self.every)
        elif self.every is not None:
            require_positive("checkpoint.every", self.every)


@dataclass(frozen=True)
class Run(OptionalAttributes):
    """Devices, logging, evaluation and recovery of a run.

    Args:
        dir: the run directory; by default runs/RECIPE/DATE-TIME.
        devices: devices on this machine, an integer or auto (all GPUs, or one CPU process).
        accelerator: auto, cpu or cuda.
        logger: loggers of metrics in addition to metrics.csv: any of csv, tensorboard, wandb, mlflow.
        project: the project of wandb, and the experiment of mlflow.
        entity: the user or team of wandb; null is the default of wandb.
        tags: tags of the run in wandb and mlflow.
        tracking_uri: where mlflow stores runs: a server's URL or a folder; null is MLFLOW_TRACKING_URI, or mlflow.db in
            the run directory.
        metrics: metrics of every evaluation in addition to those of the task, such as f1_macro, auroc, mcc, mae, r2 or
            perplexity; see docs/evaluation.md for all. In Python also custom ones, subclasses of trainer.Metric.
        best: metric that chooses the weights in model/: loss, accuracy or any of metrics, on the validation set; or
            last for the last step. null is the accuracy, or the loss if the task has none; without a validation set,
            the last step. A test set is used only by its name, such as test_accuracy.
        patience: end training after this many evaluations in a row without a better value of run.best; null never.
        progress: show a progress bar on a terminal and plain lines elsewhere; warnings, recoveries and the source of a
            resumed run are always shown.
        max_skipped_steps: stop after this many steps in a row with a non-finite loss or gradient; fp16 needs up to 16
            at its start to find the loss scale.
        snapshot: record every allocation on the GPU and write memory_snapshot.pickle to the run directory at the end,
            also when memory runs out; open it on pytorch.org/memory_viz.
        profile: record this many steps, after three to warm up, with torch's profiler: profile.txt summarizes the time,
            and profile.json.gz is a trace for ui.perfetto.dev.
        evaluate: evaluate after every epoch and at the end; false trains only, to measure memory and speed.
        predict: predict the memory in a separate process, to compare it with the measured memory.
        recover: when memory runs out, repeat the step with micro-batches of half the size; false, or deterministic,
            ends the run.
        resume: none; auto, from the newest valid checkpoint in run.dir, or from the start if there is none; or the path
            of a checkpoint or of a run directory.
        allow_change: settings (optim.lr) or sections (memory) that may differ from the resumed run; data, tokenizer and
            base stand for the content of the dataset, of the tokenizer and of the frozen weights under adapters.
        hang_after: maximum seconds of a step, of a micro-batch of an evaluation or of a checkpoint; then the run ends
            and names the cause.
        deterministic: the same weights, bit for bit, on 1, 2, 4, ... ranks: slower, with more communication.
    """

    _: KW_ONLY
    dir: str | None = None
    devices: int | Literal["auto"] = "auto"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    logger: list[LoggerName] = field(default_factory=lambda: ["csv"])
    project: str = "trainer"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    tracking_uri: str | None = None
    metrics: list[str | Metric] = field(default_factory=list)
    best: str | None = None
    patience: int | None = None
    progress: bool = True
    max_skipped_steps: int = 20
    snapshot: bool = False
    profile: int | None = None
    evaluate: bool = True
    predict: bool = True
    recover: bool = True
    resume: str = "none"
    allow_change: list[str] = field(default_factory=list)
    hang_after: float = within(f"(0, {MAX_SECONDS}]", 600.0, " seconds")
    deterministic: bool = False

    def __post_init__(self) -> None:
        _check("run.", self, positive=("max_skipped_steps", "profile", "patience"))
        for logger in self.logger:
            require_choice("run.logger", logger, LoggerName)
        require(bool(self.project.strip()), "run.project is empty: give a name, such as trainer")
        if self.devices != "auto":
            require_positive("run.devices", self.devices, MAX_WORKERS)
        known = "auto, none or the path of a checkpoint or run directory"
        require(bool(self.resume), f"run.resume is empty: give {known}")
        if (meant := VALUE_SUGGESTIONS.get(("run.resume", str(self.resume).lower()))) is not None:
            raise RecipeError(f"run.resume={self.resume!r} must be {known}; did you mean {meant}?")
        self._check_metrics()

    def _check_metrics(self) -> None:
        names = [*HIGHER_IS_BETTER, *LOWER_IS_BETTER]
        for metric in self.metrics:
            if isinstance(metric, Metric):
                name = str(getattr(metric, "name", ""))
                if not name.isidentifier() or name in (*names, "last"):
                    key = f"run.metrics: {type(metric).__name__}.name={name!r}"
                    raise RecipeError(f"{key} must be a new identifier, such as top3")
                names.append(name)
        for metric in self.metrics:
            if isinstance(metric, str):
                _require_metric(f"run.metrics={metric!r}", metric, names)
        best = self.best_metric()
        if best not in (None, "last"):
            _require_metric(f"run.best={self.best!r}", str(best), names)
        if self.patience is not None and (best == "last" or not self.evaluate):
            fix = "best=last" if best == "last" else "evaluate=false"
            raise RecipeError(f"run.patience={self.patience} needs evaluations to compare: leave out run.{fix}")
        if not self.evaluate and best not in (None, "last"):
            raise RecipeError(f"run.best={self.best!r} needs evaluations: leave out run.evaluate=false")

    def best_metric(self) -> str | None:
        """Return the metric that ``best`` names, without the prefix for its split."""
        return self.best if self.best is None else self.best.removeprefix("val_").removeprefix("test_")

    def requested_metrics(self) -> list[str | Metric]:
        """Return the metrics of every evaluation, without those of the task: ``metrics``, and that of ``best``."""
        names = {metric if isinstance(metric, str) else metric.name for metric in self.metrics}
        best = self.best_metric()
        return [*self.metrics, *([] if best in (None, "last", *names) else [str(best)])]

    def validate_metrics(self, task: str | None, num_classes: int | None) -> None:
        """Reject metrics that a model of ``task`` cannot have; ``None`` is a custom model without a ``task``."""
        task = task or ("single_label" if num_classes else None)
        offered = METRICS_BY_TASK.get(task or "", (*HIGHER_IS_BETTER, *LOWER_IS_BETTER))
        for name in (metric for metric in self.requested_metrics() if isinstance(metric, str)):
            key = f"run.metrics={name}" if name in self.metrics else f"run.best={self.best}"
            if name != "loss" and name not in offered:
                raise RecipeError(f"{key} is not for {task} models: choose one of {', '.join(sorted(offered))}")
            if name in ("f1", "precision", "recall") and num_classes not in (None, 2):
                fix = f"use {name}_macro, the mean over the classes, or {name}_micro"
                raise RecipeError(f"{key} needs 2 classes, and there are {num_classes}: {fix}")


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Everything that defines a run.

    Args:
        model: the model to train.
        data: the dataset.
        optim: the optimizer and its learning rate.
        batch_size: samples per optimizer step over all ranks; null if accumulate and memory.micro_batch_size determine
            it.
        accumulate: micro-batches per step and rank: an integer, or a schedule by epoch such as {0: 8, 4: 2}.
        epochs: passes over the training set.
        max_steps: stop after this many steps, if earlier than epochs.
        seed: seed of initial weights, sample order, dropout and augmentation.
        eval_every: steps between evaluations, in addition to the end of every epoch.
        memory: settings about memory.
        checkpoint: when the state of training is saved.

        run: devices, logging, evaluation and recovery.
        listeners: objects of trainer.Listener, called during training; in Python only. See docs/evaluation.md.
    """

    model: Model
    data: Data
    optim: Optim = field(default_factory=Optim)
    batch_size: int | None = None
    accumulate: int | dict[int, int] | None = None
    epochs: int = 1
    max_steps: int | None = None
    seed: int = within(f"[0, {2**63})", 0)
    eval_every: int | None = None
    memory: Memory = field(default_factory=Memory)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    listeners: list[Any] = field(default_factory=list, metadata={"setting": False})

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise RecipeError(f"model={self.model!r} must be a trainer.Model: subclass it, define build() and losses()")
        if not isinstance(self.data, Data):
            raise RecipeError(f"data={self.data!r} must be a trainer.Data: subclass it and define prepare()")
        _check("", self, positive=("batch_size", "max_steps", "eval_every", "epochs"))
        self._check_task()
        self._check_batch()
        workers = self.data.workers
        if workers is not None and not (isinstance(workers, int) and workers <= MAX_WORKERS):
            raise RecipeError(f"data.workers={workers} must be an integer of at most {MAX_WORKERS}: each is a process")
        if self.optim.schedule == "plateau" and not self.run.evaluate:
            fix = "use true, or another schedule"
            raise RecipeError(f"optim.schedule=plateau needs evaluations, and run.evaluate is false: {fix}")

    def _check_task(self) -> None:
        task, known = self.model.task, self.data.tasks
        if task is not None and known and task not in known:
            has = f"{type(self.data).__name__} has labels for {' and '.join(known)}"
            fix = "use Preferences" if task == "preference" else "use one of these, or other data (docs/tasks.md)"
            raise RecipeError(f"model.task={task} does not fit the data, {has}: {fix}")
        self.run.validate_metrics(task, self.model.num_classes)

    def _check_batch(self) -> None:
        accumulate = self.accumulate
        if isinstance(accumulate, Mapping):
            require(0 in accumulate, f"accumulate={accumulate} must have an entry for epoch 0, such as {{0: 8, 4: 2}}")
            for epoch, count in accumulate.items():
                if not isinstance(epoch, int) or epoch < 0:
                    raise RecipeError(f"accumulate={accumulate}: epoch {epoch!r} must be an integer of at least 0")
                require_positive(f"accumulate[{epoch}]", count)
        elif accumulate is not None:
            require_positive("accumulate", accumulate)
        if self.batch_size is None and (accumulate is None or self.memory.micro_batch_size == "auto"):
            fix = "give it, or give accumulate and memory.micro_batch_size"
            raise RecipeError(f"batch_size is missing: {fix} (batch_size = micro_batch_size × accumulate × ranks)")

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with ``changes``, checked like a new recipe."""
        return dataclasses.replace(self, **changes)


def _require_metric(setting: str, name: str, known: list[str]) -> None:
    if name not in known:
        begun = [f"; did you mean {one}?" for one in known if one.startswith(name)]  # acc
        hint = begun[0] if begun else suggest_name(name, known)
        raise RecipeError(f"{setting} is not a known metric{hint} (there are {', '.join(known)})")


def _check(section: str, settings: Any, positive: tuple[str, ...]) -> None:
    """Check the types, choices and ranges of all fields, and that the ``positive`` ones are integers from 1."""
    for (key, alias), meant in VALUE_ALIASES.items():
        name = key.removeprefix(section)
        if getattr(settings, name, None) == alias:
            object.__setattr__(settings, name, meant)
    for name, hint in require_types(section, settings).items():
        if get_origin(hint) is Literal:
            key, value = section + name, getattr(settings, name)
            if (key, value) in UNSUPPORTED_VALUES:
                raise RecipeError(f"{key}={value} is not supported: {UNSUPPORTED_VALUES[key, value]}")
            require_choice(key, value, hint)
    for name in positive:
        if getattr(settings, name) not in (None, "auto"):
            require_positive(section + name, getattr(settings, name))
    for one in dataclasses.fields(settings):
        value, interval = getattr(settings, one.name), one.metadata.get("interval")
        if interval is not None and value is not None and not _is_within(value, interval):
            allowed = INTERVALS.get(interval, f"in {interval}") + one.metadata["note"]
            raise RecipeError(f"{section}{one.name}={value} must be {allowed}")


def _is_within(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    is_above = low < value or (interval[0] == "[" and value == low)
    return is_above and (value < high or (interval[-1] == "]" and value == high))
