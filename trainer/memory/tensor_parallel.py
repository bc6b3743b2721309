"""``memory.tensor_parallel``: several ranks share every block, as in Megatron-LM (Shoeybi et al. 2019).

Torch's ``ColwiseParallel`` and ``RowwiseParallel`` split linear layers by columns and rows. With
``memory.sequence_parallel`` the rest of a block is split by tokens (Korthikanti et al. 2022). Activations between
blocks are then DTensors: other code that reads them sees the whole tensor. See docs/techniques/tensor-parallelism.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import product, takewhile
from re import fullmatch
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from trainer.contract import Model, Plannable, capability
from trainer.engine.sync import GradientSync, ShardedSync, add_missing, begin_mean, buckets, norm_over_ranks, total_norm
from trainer.errors import RecipeError, RunError, require
from trainer.memory.sharding import DATA, TENSOR, local_shard
from trainer.weights.blocks import find_blocks

STYLES = ("colwise", "rowwise", "attention", "replicated_with_grad_allreduce", "sequence_parallel")
"""Styles in ``tensor_parallel_plan``: those of transformers, and ``attention`` for an ``nn.MultiheadAttention``."""

HEADS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads")  # attributes that count heads

OTHER_DROPOUTS = ("alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu")


def split_over_ranks(module: nn.Module, model: Model, mesh: DeviceMesh, by_tokens: bool = False) -> None:
    """Split the linear layers of ``module`` over the one-dimensional ``mesh``, in place, by the plan of ``model``.

    ``by_tokens`` also splits the rest of the blocks by tokens. Weights are whole, on any device or on meta, and the
    same on every rank. Weights keep their names, except in ``nn.MultiheadAttention``: see :class:`SplitAttention`.
    """
    plan, region = capability(model, Plannable).tensor_parallel_plan(module), _TensorParallelRegion(mesh)
    key, kind = f"memory.tensor_parallel={mesh.size()}", type(model).__name__
    fix = "define tensor_parallel_plan(module) in its class (docs/your-own-model.md), or use memory.strategy fsdp"
    require(bool(plan), f"{key}: {kind} does not define how to split its layers: {fix}")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathering twice is rare here
    styles = _matched(module, plan, f"{key}: {kind}.tensor_parallel_plan")
    for name in [name for name, style in styles.items() if style == "attention"]:
        module.set_submodule(name, SplitAttention(module.get_submodule(name), name, key))
        del styles[name]
        styles |= {f"{name}.{part}": "colwise" for part in "qkv"} | {f"{name}.out_proj": "rowwise"}
    # If there are blocks, a region is a block, because a block may call the layers of its attention directly
    # (models/padding_free.py).
    found = find_blocks(module, model.blocks)
    blocks = [name for name, part in module.named_modules() if any(part is block for block in found)]
    split = [name for name, style in styles.items() if style == "colwise"]
    holders = list(dict.fromkeys(_holder(module, name, blocks) for name in split))
    named = {_holder(module, name, blocks) for name, style in styles.items() if style == "sequence_parallel"}
    if by_tokens and not named.issuperset(holders):
        raise RecipeError(
            f"memory.sequence_parallel=true: {kind}.tensor_parallel_plan does not declare that blocks work token by "
            "token outside split layers: give their norms the style sequence_parallel (docs/your-own-model.md), or use "
            "false"
        )
    # For packed texts, the last block computes only the first token of each text.
    shared = [name for name in holders if by_tokens and not getattr(module.get_submodule(name), "reads_first", False)]
    for name, style in styles.items():
        first = isinstance(module.get_submodule(_parent(module, name)), SplitAttention)
        tokens = (0 if first else -2) if _holder(module, name, blocks) in shared else None
        _split(module.get_submodule(name), style, name, region, key, tokens)
    for parent in map(module.get_submodule, dict.fromkeys(_parent(module, name) for name in split)):
        for owner, attribute in product((getattr(parent, "config", None), parent), HEADS):
            heads = getattr(owner, attribute, None)
            if isinstance(heads, int):
                require(heads % mesh.size() == 0, f"{key} does not divide the {heads} heads of {kind}: use a divisor")
                if owner is parent:
                    setattr(parent, attribute, heads // mesh.size())
    for name, following in zip(holders, [*holders[1:], ""], strict=True):
        holder = module.get_submodule(name)
        goes_on = following in shared and _parent(module, following) == _parent(module, name)
        holder.forward = region.wrap_forward(holder, name in shared, goes_on)
    for part in module.modules():
        if "tile_options" in vars(part):  # backward calls split layers again, after the forward of their block
            vars(part)["tile_options"]["context_fn"] = lambda: (nullcontext(), region)
    for name in dict.fromkeys(_parent(module, name) for name in split if _holder(module, name, blocks) in shared):
        if name not in holders:
            module.get_submodule(name).register_forward_pre_hook(region.assemble, with_kwargs=True)
    if shared:
        module.forward = _explain_dtensor_errors(module.forward, kind)


def _explain_dtensor_errors(forward: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "DTensor" not in str(error):
                raise
            what = f"{kind} uses an operation that does not support shared tokens ({error})"
            raise RecipeError(f"memory.sequence_parallel=true: {what}: use false") from error

    return within


def _matched(module: nn.Module, plan: Mapping[str, str], where: str) -> dict[str, str]:
    names = [name for name, _ in module.named_modules()]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        require(style in STYLES, f"{where} has {style!r} for {pattern}: use one of {', '.join(STYLES)}")
        expression = r"\.".join("[^.]+" if token == "*" else token for token in pattern.split("."))
        matching = [name for name in names if fullmatch(expression, name)]
        require(bool(matching), f"{where} names {pattern}, which matches no module: remove or correct it")
        found |= dict.fromkeys(matching, style)
    return found


def _parent(module: nn.Module, name: str) -> str:
    above = name.rpartition(".")[0]
    return _parent(module, above) if isinstance(module.get_submodule(above), nn.ModuleList | nn.ModuleDict) else above


def _holder(module: nn.Module, name: str, blocks: Sequence[str]) -> str:
    """Return the innermost block around the module ``name``, or the closest module above it."""
    around = [block for block in blocks if name.startswith(f"{block}.")]
    return max(around, key=len) if around else _parent(module, name)


def _split(
    layer: nn.Module, style: str, name: str, region: _TensorParallelRegion, key: str, tokens: int | None
) -> None:
    if style in ("replicated_with_grad_allreduce", "sequence_parallel"):
        if style != "sequence_parallel" or tokens is not None:
            layer._sees_part = True  # type: ignore[assignment]
            region.partly.append(layer)
        return
    if not isinstance(layer, nn.Linear):
        raise RecipeError(f"{key}: {name} is a {type(layer).__name__}, but only an nn.Linear can be split {style}")
    width = layer.out_features if style == "colwise" else layer.in_features
    require(width % region.ranks == 0, f"{key} does not divide the {width} features of {name}: use a divisor of them")
    begins = style == "colwise"
    # Each rank takes its part of the weights that it has: no communication.
    sums = RowwiseParallel(output_layouts=Replicate() if tokens is None else Shard(tokens))
    parallelize_module(layer, region.mesh, ColwiseParallel() if begins else sums, src_data_rank=None)
    layer.register_forward_pre_hook(region.enter if begins else region.leave, prepend=True)
    if begins:
        layer.register_forward_hook(region.begin)


class SplitAttention(nn.Module):
    """``nn.MultiheadAttention`` as torchvision uses it, with its packed weight unpacked, so that heads can be split.

    Checkpoints keep the packed weight: ``packed_names`` maps each weight to one of its three ranges of rows.
    """

    packed_names: ClassVar = {
        f"{part}.{kind}": (f"in_proj_{kind}", number)
        for number, part in enumerate("qkv")
        for kind in ("weight", "bias")
    }

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, whole: Any, name: str, key: str) -> None:
        super().__init__()
        plain = isinstance(whole, nn.MultiheadAttention) and whole.batch_first and whole.in_proj_bias is not None
        plain = plain and whole.bias_k is None and not whole.add_zero_attn and whole.in_proj_weight is not None
        need = "an nn.MultiheadAttention with batch_first and biases, and queries, keys and values of one width"
        require(plain, f"{key}: {name} is not {need}: use separate linear layers for them")
        self.num_heads: int = whole.num_heads
        self.head_size: int = whole.head_dim
        self.dropout: float = whole.dropout
        weights, biases = whole.in_proj_weight.detach().chunk(3), whole.in_proj_bias.detach().chunk(3)
        trained = whole.in_proj_weight.requires_grad
        for part, weight, bias in zip("qkv", weights, biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            layer.weight = nn.Parameter(weight.clone(), requires_grad=trained)
            layer.bias = nn.Parameter(bias.clone(), requires_grad=trained)
            setattr(self, part, layer)
        self.out_proj: nn.Linear = whole.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of this rank's heads and sum over ranks: (n, tokens, width), in the layout of torch."""
        query, key, value = (
            layer(inputs).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer, inputs in ((self.q, query), (self.k, key), (self.v, value))
        )
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return self.out_proj(found.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1), None


class _TensorParallelRegion(TorchFunctionMode):
    """The computation from a layer that is split by columns to the layer that is split by rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.rank, self.ranks = mesh, mesh.get_local_rank(), mesh.size()
        self.is_split = self.is_open = False
        self.entered: tuple[Tensor, DTensor] | None = None
        self.tokens = 0  # tokens of the current block, if ranks share them; otherwise 0
        self.partly: list[nn.Module] = []  # modules with weights on every rank that see only this rank's heads

    def wrap_forward(self, parent: nn.Module, is_shared: bool, goes_on: bool) -> Callable[..., Any]:
        """Wrap ``parent.forward``: with this rank's tokens if ``is_shared``, with split output if it ``goes_on``."""
        forward, kind = parent.forward, type(parent).__name__

        @wraps(forward)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                if is_shared:
                    if not (args and isinstance(args[0], Tensor) and args[0].ndim == 3):
                        what = f"the first argument of {kind} is not a tensor of shape (n, tokens, width)"
                        raise RecipeError(f"memory.sequence_parallel=true: {what}: use false")
                    whole = args[0] if isinstance(args[0], DTensor) else self.from_replicated(args[0])
                    self.tokens = whole.shape[1]
                    args = whole.redistribute(placements=[Shard(1)]).to_local(), *args[1:]
                found = forward(*args, **kwargs)
                if not is_shared:
                    return found
                # A copy, once per forward: FSDP's hooks and autograd reject in-place changes of a view.
                return self.from_sharded_tokens(found) if goes_on else self.gather_tokens(found).to_local().clone()

        return within

    def __enter__(self) -> TorchFunctionMode:
        self.is_split, self.is_open, self.entered = False, True, None
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:  # a recomputation ends with an exception
        super().__exit__(*error)
        self.is_split, self.is_open, self.entered, self.tokens = False, False, None, 0

    def from_replicated(self, tensor: Tensor) -> DTensor:
        """Return ``tensor``, which is the same on all ranks, as a replicated DTensor."""
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def from_sharded_tokens(self, mine: Any) -> DTensor:
        """Return this rank's tokens as a sharded DTensor: (n, tokens, width) or (tokens, width)."""
        shape = list(getattr(mine, "shape", ()))
        along, (share, _) = len(shape) - 2, Shard.local_shard_size_and_offset(self.tokens, self.ranks, self.rank)
        if along not in (0, 1) or shape[along] != share:
            what = f"an output of shape {shape or 'unknown'} is not this rank's share of {self.tokens} tokens"
            raise RecipeError(f"memory.sequence_parallel=true: {what}: use false")
        shape[along] = self.tokens
        size: Any = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(mine, self.mesh, [Shard(along)], run_check=False, **size)

    def gather_tokens(self, mine: Tensor) -> DTensor:
        every = self.from_sharded_tokens(mine).redistribute(placements=[Replicate()])
        # Before torch 2.12, gathered uneven shares are a view that is not contiguous; linear layers need contiguous
        # ones.
        return every if (local := every.to_local()).is_contiguous() else self.from_replicated(local.contiguous())

    def assemble(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Gather all ranks' tokens of the first tensor, before a module with layers split by columns."""
        mine = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        every = self.gather_tokens(mine)
        return tree_map(lambda one: every if one is mine else one, (args, kwargs))

    def enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run before a layer split by columns; layers with the same input share a DTensor, to sum its gradient once."""
        require(self.is_open, "memory.tensor_parallel: call the module that holds the split layers, not the layers")
        if isinstance(args[0], DTensor):
            return args
        if self.entered is None or self.entered[0] is not args[0]:
            self.entered = args[0], self.gather_tokens(args[0]) if self.tokens else self.from_replicated(args[0])
        return self.entered[1], *args[1:]

    def begin(self, *_: Any) -> None:
        """Run after a layer that is split by columns."""
        self.is_split = True

    def leave(self, *_: Any) -> None:
        """Run before a layer that is split by rows."""
        self.is_split, self.entered = False, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_split or self.tokens:
            if func in (functional.dropout, torch.dropout):
                return self.dropout(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if self.is_split and func is functional.scaled_dot_product_attention:
                return self.attention(*args, **kwargs)
            if self.is_split and name == "draw_dropout_mask":  # from models/padding_free.py, not imported here
                weights, (texts, heads, *rest), dropped = args
                whole = func(weights, torch.Size([texts, heads * self.ranks, *rest]), dropped)
                return whole.narrow(1, self.rank * heads, heads)
            if name in OTHER_DROPOUTS:
                raise RecipeError(f"memory.tensor_parallel cannot split {name}: use dropout")
            given = (*args, *kwargs.values())
            weights = [one for one in given if isinstance(one, nn.Parameter) and not isinstance(one, DTensor)]
            known = [one for part in self.partly if weights for one in part._parameters.values()]
            if not all(any(one is other for other in known) for one in weights):
                cause = f"memory.tensor_parallel: {name} applies a weight that every rank has to split activations"
                fix = f"give its module the style {STYLES[3 if self.is_split else 4]} in tensor_parallel_plan"
                raise RecipeError(f"{cause}: {fix}")
        return func(*args, **kwargs)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply dropout with this rank's part of the mask of the whole tensor, drawn in its memory order.

        Attention weights (n, heads, queries, keys) are split by heads, shared tokens by tokens, others by the last.
        """
        if not training or not p:
            return input
        shape, strides = list(input.shape), input.stride()
        if self.is_split:
            along = 1 if input.ndim == 4 else input.ndim - 1
            first, size, shape[along] = self.rank * shape[along], shape[along], shape[along] * self.ranks
        else:
            along, shape = input.ndim - 2, list(self.from_sharded_tokens(input).shape)
            size, first = Shard.local_shard_size_and_offset(self.tokens, self.ranks, self.rank)
        order = sorted(range(input.ndim), key=lambda dim: -strides[dim])
        ones = input.new_ones([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(input.ndim)])
        kept = functional.dropout(ones, p).narrow(along, first, size) != 0  # a view would hold the whole mask
        return input * kept * (1 / (1 - p) if p < 1 else 1)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention; with dropout without a fused kernel, whose mask could not be split."""
        if not dropout_p:
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Return whether tensor-parallel ranks have different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == TENSOR and at.is_shard() for name, at in zip(names, parameter.placements, strict=True))


class TensorParallelSync(GradientSync):
    """Combines gradients over ranks with tensor parallelism.

    Gradients of split weights go to ``trained``: plain tensors in the memory of this rank's part of each parameter,
    because no optimizer supports DTensors of several meshes in one step. Over ranks with other samples
    (``mesh[DATA]``), FSDP reduces, or else this class. Weights that are not split have the same gradient in a group up
    to the noise of kernels; it is averaged, because the ranks would drift apart. Buckets are reduced in a fixed order:
    during the last backward if they ``may_overlap`` and every rank computed every gradient once in the first step,
    otherwise after it.
    """

    def __init__(
        self, module: nn.Module, trained: dict[nn.Parameter, Tensor], mesh: DeviceMesh, every: bool, model: Model
    ) -> None:
        super().__init__(list(trained.values()), model)
        self.trained, self.tensor, self.data = trained, mesh[TENSOR].get_group(), mesh[DATA].get_group()
        self.ranks = mesh[TENSOR].size()
        self.sharding = ShardedSync(module, [], every) if isinstance(module, FSDPModule) else None
        self.over_data = self.sharding is None and mesh[DATA].size() > 1
        partly = [part for part in module.modules() if getattr(part, "_sees_part", False)]
        self.partly = {p for part in partly for p in part.parameters(recurse=False)}
        order = {p: position for position, p in enumerate(reversed(trained))}  # roughly the order of backward
        self.kinds = [[p for p in order if is_tensor_parallel(p) == kind] for kind in (True, False)]
        found = [[kind[n] for n in bucket] for kind in self.kinds for bucket in buckets([trained[p] for p in kind])]
        self.buckets = sorted(found, key=lambda bucket: order[bucket[-1]])
        self.begun: list[Callable[[], None]] = []  # functions that wait for the first buckets
        self.arrived: Counter[Tensor] = Counter()  # how often the last backward has computed each gradient
        for parameter in trained:
            self.on_gradient(parameter, self._arrive)

    def before_forward(self, is_last: bool) -> None:
        self.is_last = is_last
        if self.sharding is not None:
            self.sharding.before_forward(is_last)

    def _arrive(self, parameter: Tensor) -> None:
        if self.is_last and parameter.grad is not None:  # FSDP may also call hooks of parameters without a gradient
            self.arrived[parameter] += 1
            left = self.buckets[len(self.begun) :] if self.overlaps_update else []
            for bucket in takewhile(lambda bucket: all(p in self.arrived for p in bucket), left):
                self._begin(bucket)

    @torch.no_grad()
    def _begin(self, bucket: list[nn.Parameter]) -> None:
        gradients: list[Tensor] = []
        for parameter in bucket:
            tensor, gradient, parameter.grad = self.trained[parameter], parameter.grad, None
            if gradient is None:
                continue
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            tensor.grad = local_shard(gradient)
            if parameter in self.partly:  # each rank has seen only its heads: a sum, not a mean
                tensor.grad *= self.ranks
            gradients.append(tensor.grad)
        if not is_tensor_parallel(bucket[0]):
            self.begun.append(begin_mean(gradients, self.tensor if self.sharding is not None else None))
        else:  # nothing to reduce with FSDP or without other ranks
            self.begun.append(begin_mean(gradients if self.over_data else [], self.data))

    def after_last_backward(self) -> None:
        once = all(self.arrived[p] == 1 for p in self.trained)
        if self.overlaps_update and not once:
            raise RunError("some parameters got no gradient, or two: set `conditional = True` in the model's class")
        if not self.overlaps_update and (self.may_overlap or self.over_data):
            counts = add_missing(list(self.trained), once)
            self.overlaps_update = self.may_overlap and counts[-1] == torch.distributed.get_world_size()
        for bucket in self.buckets[len(self.begun) :]:
            self._begin(bucket)
        for finish in self.begun:
            finish()
        self.abandon()

    def abandon(self) -> None:
        self.begun.clear()  # without waiting, because a failed rank does not take part in the reductions
        self.arrived.clear()

    def norm(self) -> Tensor:
        """Return the global norm: all parts of split weights, and one copy of other weights."""
        gradients = [[g for p in reversed(kind) if (g := self.trained[p].grad) is not None] for kind in self.kinds]
        split, whole = (total_norm(one, self.alike) if one else self.parameters[0].new_zeros(()) for one in gradients)
        group = self.tensor if self.sharding is None else None
        return norm_over_ranks(torch.hypot(split, whole / self.ranks**0.5), group=group)
