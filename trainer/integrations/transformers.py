"""Exact accumulated gradients in transformers' own ``Trainer``."""

from __future__ import annotations

import inspect
import math
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

IGNORED_LABEL = -100
FILLER = "_is_filler"  # key of a repeated micro-batch of weight 0, for a rank that has fewer than others
CUSTOM = "override loss_sum and loss_weight of ExactGradients"


class ExactGradients:
    """Mixin for ``Trainer`` and its subclasses: a step's gradient is that of its whole batch.

    The loss of a micro-batch is a sum over its items, divided by the weight of the window over all ranks. It is
    computed from the logits: cross entropy of integer labels (of the next tokens for causal language models), squared
    error for regression, binary cross entropy for multi-label classification. The first step compares it with the
    model's own loss. For another loss override :meth:`loss_sum` and :meth:`loss_weight`. No sample is repeated.

    Args:
        class_weights: weights of the classes, shape ``(classes,)``, as in ``torch.nn.CrossEntropyLoss``.

    Raises:
        ValueError: if an argument, the model or the data prevents exact gradients.
    """

    def __init__(self: Any, *args: Any, class_weights: Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_weights, self._spare = class_weights, None
        whole = self.accelerator.unwrap_model(self.model)
        self._base = whole.get_base_model() if hasattr(whole, "get_base_model") else whole  # without adapters
        is_causal = type(self._base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self._predicts_next, self._config = is_causal or self._loss_shifts_labels, getattr(self._base, "config", None)
        self._check_settings()
        self.compute_loss_func = self._share_of_window

    def loss_sum(self: Any, outputs: Any, labels: Tensor) -> Tensor:
        """Return the sum of the losses of the items of a micro-batch."""
        return self._sum(outputs["logits"], labels, self.class_weights, self.args.label_smoothing_factor)

    def loss_weight(self: Any, labels: Tensor) -> Tensor:
        """Return how many items :meth:`loss_sum` adds up, or the sum of the weights of their classes."""
        return self._weight(labels, self.class_weights)

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        """Compute a micro-batch's share of the window's mean loss; in evaluation the mean loss of the batch."""
        is_filler, weight = inputs.pop(FILLER, False), num_items_in_batch if model.training else None
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=weight)  # type: ignore[misc]
        return loss * 0 if is_filler else loss

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of this rank's window, and the weight of the window over all ranks."""
        batches, is_first = list(islice(epoch_iterator, num_batches)), self._spare is None
        if is_first and batches:
            self._check_batch(batches[0])
        rows = [[float(sum(self.loss_weight(batch["labels"]) for batch in batches)), len(batches)]]
        if self.accelerator.num_processes > 1:
            rows = self.accelerator.gather(torch.tensor(rows, dtype=torch.float64, device=device)).tolist()
        weights, counts = zip(*rows, strict=True)
        is_missing = is_first and min(counts) == 0 < max(counts)
        _reject(is_missing, "train_dataset: it has fewer micro-batches than there are ranks: use fewer ranks")
        self._spare = batches[0] if batches else self._spare
        if max(counts) > 0:  # otherwise data without a length has ended
            batches += [{**self._spare, FILLER: True}] * (num_batches - len(batches))
        return batches, sum(weights) or 1.0

    def set_initial_training_values(self: Any, args: Any, dataloader: Any) -> Any:
        """Count an epoch's micro-batches as the rank with the largest number of them does; repeat no sample."""
        if self.accelerator.num_processes == 1:
            return super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        shard: Any = getattr(dataloader, "batch_sampler", None)
        is_split = getattr(shard, "num_processes", 1) > 1  # accelerate's BatchSamplerShard
        _reject(not is_split, "train_dataset: use one with a length, without dispatch_batches and batch_rebalance")
        shard.even_batches = True  # its length is then the same on all ranks
        values = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        shard.even_batches = False
        return values

    def _share_of_window(self: Any, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        weight = self.loss_weight(labels) if num_items_in_batch is None else num_items_in_batch
        return self.loss_sum(outputs, labels) / weight

    def _sum(self: Any, logits: Tensor, labels: Tensor, class_weights: Tensor | None, smoothing: float) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        is_regression = logits.shape[-1] == 1 or getattr(self._config, "problem_type", None) == "regression"
        if is_regression or labels.is_floating_point():
            loss = mse_loss if is_regression else binary_cross_entropy_with_logits
            return loss(logits.reshape(labels.shape), labels.to(logits.dtype), reduction="sum")
        if self._predicts_next:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        weights = None if class_weights is None else class_weights.to(logits)
        logits, labels = logits.flatten(0, -2), labels.flatten()
        return cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)

    def _weight(self: Any, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        if labels.is_floating_point():
            return torch.tensor(labels.numel())
        labels = labels[..., 1:] if self._predicts_next else labels
        counts = labels != IGNORED_LABEL
        weights = 1 if class_weights is None else class_weights.to(labels.device)[labels * counts]
        return (weights * counts).sum()

    def _check_settings(self: Any) -> None:
        args, strategy = self.args, self.accelerator.distributed_type.value
        is_averaged = self.accelerator.num_processes > 1 and not args.average_tokens_across_devices
        is_sharded = strategy not in ("NO", "MULTI_CPU", "MULTI_GPU") or self.accelerator.parallelism_config
        owners = [cls for cls in type(self).__mro__ if "compute_loss" in vars(cls)]
        custom = [cls for cls in owners if cls.__module__.split(".")[0] not in ("trainer", "transformers", "trl")]
        is_mixing = any(isinstance(module, _BatchNorm) for module in self._base.modules())
        labels = inspect.signature(self._base.forward).parameters.get("labels")
        _reject(self.compute_loss_func, f"compute_loss_func: it may return a mean: {CUSTOM}")
        _reject(custom, f"compute_loss of a subclass: it may return a mean: {CUSTOM}")
        _reject(getattr(args, "loss_type", "nll") != "nll", "loss_type: use 'nll'")
        _reject(is_averaged, "average_tokens_across_devices=False divides by the items of one rank: leave it out")
        _reject(args.use_liger_kernel, "use_liger_kernel: it computes no logits: set it to False")
        _reject("lomo" in args.optim, "optim: LOMO updates the weights in each backward: use another")
        _reject(args.n_gpu > 1, "DataParallel: start one process per GPU, with torchrun")
        _reject(is_sharded, f"{strategy}: use DDP, without deepspeed, fsdp and parallelism_config")
        has_router = getattr(self._config, "output_router_logits", False)
        _reject(has_router, "output_router_logits: a router's loss is no sum over items: set it to False")
        _reject(is_mixing, "model: batch normalization makes samples depend on each other: use another normalization")
        _reject(labels and labels.default is labels.empty, "model: forward needs labels: give them the default None")

    def _check_batch(self: Any, batch: Any) -> None:
        """Compare the loss with the model's own, on one micro-batch and without dropout."""
        _reject("labels" not in batch or "shift_labels" in batch, "train_dataset: rename its labels to 'labels'")
        inputs, smoothing = self._prepare_inputs(batch), self.args.label_smoothing_factor
        labels, model = inputs["labels"], self.model_wrapped.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        model.train()
        has_logits = isinstance(outputs, dict) and outputs.get("logits") is not None
        _reject(not has_logits, "model: its forward must return a dict with logits")
        _reject(smoothing and labels.is_floating_point(), "label_smoothing_factor: it needs integer labels")
        own, is_custom = outputs.get("loss"), type(self).loss_sum is not ExactGradients.loss_sum
        if own is None or is_custom or not self.loss_weight(labels):
            return
        tolerance = max(1e-5, 4 * torch.finfo(own.dtype).eps)
        found = [
            float(self._sum(outputs["logits"], labels, weights, smooth) / self._weight(labels, weights))
            for weights, smooth in product((self.class_weights, None), (smoothing, 0.0))
        ]
        is_known = any(math.isclose(loss, own, rel_tol=tolerance) for loss in found)
        detail = f"the model's own loss is {float(own):.6g}, that of its logits {found[0]:.6g}"
        _reject(not is_known, f"model: {detail}: pass class_weights=, or {CUSTOM}")


class ExactTrainer(ExactGradients, Trainer):
    """transformers' ``Trainer`` with exact gradients: see :class:`ExactGradients`."""


def _reject(is_present: Any, message: str) -> None:
    if is_present:
        raise ValueError(message)
