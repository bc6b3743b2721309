"""The loss of a language model, computed inside its forward, where the weights are available also if sharded.

The logits of some thousand tokens may take more memory than the model. Therefore the cross entropy is computed for one
chunk of tokens at a time, and only the log-sum-exp of each token is kept. Backward recomputes the logits, as in Cut
Cross-Entropy (Wijmans et al. 2024): for all tokens and as many words as fit in the memory of a chunk. Each row of the
gradient of the head's weight is then one product over all tokens, as without chunks. A sum over chunks (Liger Kernel,
Hsu et al. 2024; torch's ``linear_cross_entropy``) would round once per chunk in half precision, or need an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, pad

from trainer.errors import RecipeError
from trainer.models.base import widened
from trainer.values import IGNORED_LABEL
from trainer.weights.fused import has_kernels

MAX_LOGITS = 2**24  # logits held at once by default: 64 MiB in fp32, plus the products they are computed from
FUSED = 2**27  # bytes of products held at once by default with our kernels, which need no further memory

SCALE_CONFIG_KEYS: dict[str, int] = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
SOFTCAP_CONFIG_KEYS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings of configurations that scale the products of a head (with the power of each), and that cap them."""


class LogitTransform(NamedTuple):
    """The function from a head's products to logits: times ``scale``, then ``cap`` tanh(logit / ``cap``)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Transform products in at least fp32, possibly in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def backward(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Backpropagate ``gradient`` in place. ``logits`` are the outputs, needed only with a cap."""
        if self.cap is not None and logits is not None:
            gradient.mul_(1 - (logits / self.cap).square_())
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


NO_TRANSFORM = LogitTransform()


def patch_forward_to_return_loss(module: nn.Module, chunk: int | None) -> None:
    """Make ``module``, a causal language model of transformers, return the summed loss if it gets labels.

    Swapping ``__class__`` keeps parameters, names and hooks, and FSDP gathers the head's weight as in any forward.
    Without labels the module is unchanged.

    Args:
        module: may be on meta.
        chunk: number of tokens whose logits are held at once; 0 holds all. ``None``: see :func:`default_chunk`, or all
            if the logits do not come from a linear layer and a :class:`LogitTransform`; for those a number is rejected.
    """
    kind: Any = type(module)
    found = detect_logit_transform(module) if chunk != 0 else None
    config = module.config.to_dict()  # type: ignore[union-attr, operator]
    odd = [key for key in config if ("logit" in key or "head_mult" in key) and config[key] not in (None, False, 1.0)]
    named = f" (its configuration has {', '.join(f'{key}={config[key]}' for key in odd)})" if odd else ""
    if chunk and found is None:
        cause = f"{kind.__name__} computes more than a linear head and a known scale or cap{named}"
        raise RecipeError(f"model.loss_chunk={chunk}: {cause}: use 0, which holds the logits of all tokens, or null")
    module.loss_chunk, module.logit_transform = chunk, found  # type: ignore[assignment]
    module.__class__ = _make_loss_class(kind)


@cache
def _make_loss_class(kind: type[nn.Module]) -> type[nn.Module]:
    plain: Callable[..., Any] = kind.forward

    @wraps(plain)
    def forward(
        self: Any,
        *args: Any,
        labels: Tensor | None = None,
        places: Tensor | None = None,
        parts: Any = None,  # tensor with the number of the part, such as an answer, of each predicted token
        num_parts: int = 0,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return plain(self, *args, **kwargs)
        if self.logit_transform is None and parts is None:
            return token_loss(plain(self, *args, **kwargs).logits, labels)
        places = target_positions(labels) if places is None else places
        if self.logit_transform is None:
            losses = token_loss(plain(self, *args, **kwargs).logits, labels, "none").index_select(0, places)
        else:
            hidden = self.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1).index_select(0, places)
            targets = labels.flatten().index_select(0, places + 1)
            inputs = hidden, self.get_output_embeddings(), targets, self.logit_transform, self.loss_chunk
            if parts is None:
                return chunked_loss(*inputs)
            losses = chunked_losses(*inputs)
        # In float64: the terms are added one at a time, and a loss subtracts sums of thousands from one another.
        return losses.new_zeros(num_parts, dtype=torch.float64).index_add(0, parts, losses.double())

    # Keep the class name: transformers writes it to config.json and uses it to find modules that must not be split.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def target_positions(labels: Tensor) -> Tensor:
    """Return the int64 positions in the flattened ``labels``, ``(n, length)``, that predict a token. Syncs on GPUs."""
    return pad(labels[:, 1:] != IGNORED_LABEL, (0, 1)).flatten().nonzero().flatten()


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Sum the next-token loss in at least fp32: ``logits`` (n, length, words), int64 ``labels`` (n, length) or -100."""
    following = pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).flatten()
    logits = widened(logits.flatten(0, 1))
    return cross_entropy(logits, following, ignore_index=IGNORED_LABEL, reduction=reduction)


def chunked_loss(
    hidden: Tensor, head: nn.Module, targets: Tensor, transform: LogitTransform = NO_TRANSFORM, chunk: int | None = None
) -> Tensor:
    """Return the sum of :func:`chunked_losses`, a scalar."""
    return chunked_losses(hidden, head, targets, transform, chunk).sum()


@torch.compiler.disable  # the number of predicted tokens differs in every micro-batch
def chunked_losses(
    hidden: Tensor, head: nn.Module, targets: Tensor, transform: LogitTransform = NO_TRANSFORM, chunk: int | None = None
) -> Tensor:
    """Return the cross entropy of each of ``targets``, in at least fp32, without holding all logits.

    Args:
        hidden: input of the head, shape ``(tokens, width)``.
        head: an ``nn.Linear`` from width to words, optionally with LoRA adapters by peft. If it has ``take_rows``, a
            function of a start row and the rows from there, it receives the weight's gradient piece by piece.
        targets: int64, shape ``(tokens,)``.
        transform: the function from the head's products to logits.
        chunk: number of tokens whose logits are held at once; ``None``: see :func:`default_chunk`.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    dtype = hidden.dtype if hidden.dtype == torch.float64 else dtype  # autocast leaves float64 unchanged
    adapted: Any = head
    layer = getattr(adapted, "base_layer", adapted)
    terms = [hidden.to(dtype), layer.weight]
    for name in getattr(adapted, "active_adapters", ()):
        down = adapted.lora_A[name]
        low = adapted.scaling[name] * down(adapted.lora_dropout[name](hidden.to(down.weight.dtype)))
        terms += [low.to(dtype), adapted.lora_B[name].weight]
    kernels = _kernels(terms[0], layer.bias)
    chunk = chunk or default_chunk(layer.weight.shape[0], dtype, fused=kernels is not None)
    use = getattr(head, "take_rows", None), kernels
    losses: Tensor = _ChunkedLosses.apply(targets, chunk, transform, use, layer.bias, *terms)
    return losses


def default_chunk(words: int, dtype: torch.dtype, fused: bool) -> int:
    """Return the tokens held at once: ``MAX_LOGITS`` logits or ``FUSED`` bytes, so that products are compute-bound."""
    tokens = max(1, FUSED // (words * dtype.itemsize) if fused else MAX_LOGITS // words)
    return tokens - tokens % 128 if fused and tokens > 128 else tokens


def _kernels(states: Tensor, bias: Tensor | None) -> Any:
    """Return our kernels if they apply. A trainable bias needs the sum of unrounded errors, which they lack."""
    if states.dtype == torch.float64 or (bias is not None and bias.requires_grad) or not has_kernels(states):
        return None
    from trainer.models import loss_kernel  # imports Triton

    return loss_kernel


class _ChunkedLosses(torch.autograd.Function):
    """The losses of tokens, whose logits are a sum of products of states ``(tokens, width)`` and weights."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, chunk: int, transform: LogitTransform, use: Any, bias: Tensor | None, *terms: Tensor
    ) -> Tensor:
        ctx.chunk, ctx.transform, (ctx.take, ctx.kernels) = chunk, transform, use
        states, dtype = terms[::2], terms[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        weights = [weight.to(dtype) for weight in terms[1::2]]
        parts: list[tuple[Tensor, Tensor]] = [(targets.new_zeros(0, 1, dtype=wide),) * 2]
        with torch.autocast(targets.device.type, enabled=False):
            for start in range(0, len(targets), chunk):
                rows = slice(start, start + chunk)
                logits = _head_logits([state[rows] for state in states], weights, bias)
                if ctx.kernels is not None:
                    found = ctx.kernels.token_losses(logits, targets[rows], *transform)
                else:
                    logits = transform(logits.to(wide))
                    largest = logits.amax(1, keepdim=True)
                    own = logits.gather(1, targets[rows, None])
                    log_sum = logits.sub_(largest).exp_().sum(1, keepdim=True).log_().add_(largest)
                    found = log_sum, log_sum - own
                parts.append(found)
                del logits  # before the next logits are allocated
        log_sums, losses = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(targets, log_sums, bias, *terms)
        return losses.flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        targets, log_sums, bias, *terms = ctx.saved_tensors
        states, weights, dtype = terms[::2], terms[1::2], terms[0].dtype
        gradient = gradient.to(log_sums.dtype)[:, None].contiguous()
        tokens, words = len(targets), len(weights[0])
        size = words if tokens <= ctx.chunk else max(1, ctx.chunk * words // tokens)
        size -= size % 64 if size < words and size > 64 else 0  # a multiple for tensor cores
        needs, of_bias = [*ctx.needs_input_grad[5:]], torch.zeros_like(bias) if ctx.needs_input_grad[4] else None
        needs[1] = needs[1] and ctx.take is None
        of_states = [
            torch.zeros_like(x, dtype=log_sums.dtype) if need else None
            for x, need in zip(states, needs[::2], strict=True)
        ]
        of_weights = [torch.empty_like(w) if need else None for w, need in zip(weights, needs[1::2], strict=True)]
        with torch.autocast(targets.device.type, enabled=False):
            for start, stop in pairwise([*range(0, words, size), words]):
                parts = [weight[start:stop].to(dtype) for weight in weights]
                logits = _head_logits(states, parts, None if bias is None else bias[start:stop])
                if ctx.kernels is not None:
                    ctx.kernels.token_errors_(logits, log_sums, targets, gradient, start, *ctx.transform)
                    errors, capped = logits, None
                else:
                    logits = ctx.transform(logits.to(log_sums.dtype))
                    capped = logits.clone() if ctx.transform.cap is not None else None
                    errors = logits.sub_(log_sums).exp_()  # the probabilities
                    own = (targets - start)[:, None]
                    inside = (own >= 0) & (own < stop - start)
                    own = own.clamp(0, stop - start - 1)
                    errors.scatter_(1, own, errors.gather(1, own) - inside.to(errors.dtype))
                    errors = ctx.transform.backward(errors.mul_(gradient), capped)
                    if of_bias is not None:
                        of_bias[start:stop] = errors.sum(0)
                    errors = errors.to(dtype)
                if ctx.take is not None:
                    ctx.take(start, errors.T @ states[0])
                for state, part, of_state, of_weight in zip(states, parts, of_states, of_weights, strict=True):
                    if of_state is not None:
                        of_state += errors @ part
                    if of_weight is not None:
                        of_weight[start:stop] = errors.T @ state
                del logits, capped, errors
        found = [one for pair in zip(of_states, of_weights, strict=True) for one in pair]
        of_terms = (one if one is None else one.to(term.dtype) for one, term in zip(found, terms, strict=True))
        return None, None, None, None, of_bias, *of_terms


def _head_logits(states: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    (state, *others), (weight, *more) = states, weights
    found = linear(state, weight, None if bias is None else bias.to(weight.dtype))
    for other, one in zip(others, more, strict=True):
        found += linear(other, one)
    return found


class _HiddenStates:
    """A body's output with hidden states; every other attribute is ``None``."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, number: Any) -> Any:
        return (self.last_hidden_state,)[number]


def detect_logit_transform(module: nn.Module) -> LogitTransform | None:
    """Return the :class:`LogitTransform` from the head's products to ``module``'s logits; ``None`` for another form.

    Calls the module's own forward with a body and a head that return known values. This works for any architecture
    without a table of models, and detects everything that the code does to the logits.
    """
    model: Any = module
    body: Any = model.base_model
    head: Any = model.get_output_embeddings()
    if body is module or type(head) is not nn.Linear:
        return None
    exact: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    hidden = torch.arange(head.in_features, **exact).remainder(7)[None, None]
    products = torch.linspace(-40, 40, head.out_features, **exact)[None, None]
    ids, mask = (torch.zeros(1, 1, dtype=torch.long, device="meta") for _ in range(2))
    given: list[Any] = []
    read: list[Tensor] = []

    def of_body(*args: Any, **kwargs: Any) -> Any:
        given.extend([*args, *kwargs.values()])
        return _HiddenStates(hidden)

    def of_head(state: Tensor) -> Tensor:
        read.append(state)
        return products.clone()

    vars(body)["forward"], vars(head)["forward"] = of_body, of_head
    try:
        logits = type(model).forward(model, input_ids=ids, attention_mask=mask).logits.float()
    except Exception:  # it reads other outputs, so it is another kind of model
        return None
    finally:
        del vars(body)["forward"], vars(head)["forward"]
    passes = all(any(one is tensor for one in given) for tensor in (ids, mask))
    if not passes or len(read) != 1 or not torch.equal(read[0].float(), hidden) or logits.shape != products.shape:
        return None
    config = model.config
    entries = [(getattr(config, key, None), power) for key, power in SCALE_CONFIG_KEYS.items()]
    scales = [1.0, *(entry ** (sign * power) for entry, power in entries if entry for sign in (1, -1))]
    caps = dict.fromkeys([None, *(getattr(config, key, None) for key in SOFTCAP_CONFIG_KEYS)])
    for found in (LogitTransform(scale, cap) for scale in scales for cap in caps):
        if torch.allclose(found(products.clone()), logits, rtol=1e-5, atol=1e-5):
            return found
    return None
