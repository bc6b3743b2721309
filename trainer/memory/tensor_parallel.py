"""``memory.tensor_parallel``: ranks that share every block, as Megatron-LM does (Shoeybi et al. 2019).

The first linear layers of attention and MLP are split by columns, so that each rank has some heads and some of the
hidden features; the layer after them by rows, whose results are summed over the ranks: one all-reduce in forward and
one in backward. Torch's ``ColwiseParallel`` and ``RowwiseParallel`` do that: split weights are DTensors over the mesh's
dimension ``tensor``, activations plain tensors. All else is on every rank, which computes it from the same samples.

Between the two layers activations are split as well, along heads or features. All ranks of a group draw from the same
seeds, so dropout draws the mask of the whole there and takes its part: the run is that of one rank, mask by mask.

With ``memory.sequence_parallel`` all else within blocks (norms, residuals, dropout) is shared as well, token by token,
as by Korthikanti et al. (2022): of each sum a rank gets the tokens that are its own (a reduce-scatter), and the tokens
of all come together before the next split layer (an all-gather). Between blocks, and from there to the layers,
activations are DTensors: other code that reads them sees the whole, or is refused by torch.
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
from trainer.memory.sharding import DATA, TENSOR, local
from trainer.weights.blocks import find_blocks

STYLES = ("colwise", "rowwise", "attention", "replicated_with_grad_allreduce", "sequence_parallel")
"""Of a plan; the names are transformers' own, but for ``attention``: an ``nn.MultiheadAttention``."""

HEADS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads")  # attributes that count heads

OTHER_DROPOUTS = ("alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu")


def split_over_ranks(module: nn.Module, model: Model, mesh: DeviceMesh, by_tokens: bool = False) -> None:
    """Split the linear layers of ``module`` over ``mesh``, one-dimensional, in place, as the plan of ``model`` says.

    ``by_tokens`` shares what its blocks compute between them, too. Weights are whole, on any device or on meta, and the
    same on every rank; names of weights stay, but for those of an ``nn.MultiheadAttention``: :class:`SplitAttention`.

    Raises:
        RecipeError: when there is no plan, or the ranks do not divide what is to be split, or no tokens to be shared.
    """
    plan, region, key = (
        capability(model, Plannable).tensor_parallel_plan(module),
        _Region(mesh),
        f"memory.tensor_parallel={mesh.size()}",
    )
    kind = type(model).__name__
    require(
        bool(plan),
        f"{key}: nobody has said how to split {kind}: define tensor_parallel_plan(module) in its class "
        "(docs/your-own-model.md), or use memory.strategy fsdp",
    )
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathering twice is rare here
    styles = _matched(module, plan, f"{key}: {kind}.tensor_parallel_plan")
    for name in [name for name, style in styles.items() if style == "attention"]:
        above, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(above), leaf, SplitAttention(module.get_submodule(name), name, key))
        del styles[name]
        styles |= {f"{name}.{part}": "colwise" for part in "qkv"} | {f"{name}.out_proj": "rowwise"}
    # Where there are blocks, a region is a block: one may call the layers of its attention (models/unpadded.py).
    found = find_blocks(module, model.blocks)
    blocks = [name for name, part in module.named_modules() if any(part is block for block in found)]
    split = [name for name, style in styles.items() if style == "colwise"]
    holders = list(dict.fromkeys(_holder(module, name, blocks) for name in split))
    named = {_holder(module, name, blocks) for name, style in styles.items() if style == "sequence_parallel"}
    require(
        not by_tokens or named.issuperset(holders),
        f"memory.sequence_parallel: {kind}.tensor_parallel_plan does not say that blocks work token by token outside "
        "split layers: give their norms the style sequence_parallel (docs/your-own-model.md), or use false",
    )
    # The last block of packed texts computes the first token of each only.
    firsts = {name for name in holders if getattr(module.get_submodule(name), "reads_first", False)}
    shared = [name for name in holders if by_tokens and name not in firsts]
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
        holder.forward = region.around(holder, name in shared, goes_on)
    for name in dict.fromkeys(_parent(module, name) for name in split if _holder(module, name, blocks) in shared):
        if name not in holders:
            module.get_submodule(name).register_forward_pre_hook(region.assemble, with_kwargs=True)
    if shared:
        module.forward = _told(module.forward, kind)


def _told(forward: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """``forward``, which refuses in words of ours what torch does not compute of tokens that are shared."""

    @wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            why = f"memory.sequence_parallel: {kind} computes of shared tokens what torch cannot ({error}): use false"
            require("DTensor" not in str(error), why)
            raise

    return within


def _matched(module: nn.Module, plan: Mapping[str, str], where: str) -> dict[str, str]:
    """The modules that a plan names, and their style; a pattern must name some, and a module have one style."""
    names = [name for name, _ in module.named_modules()]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        require(style in STYLES, f"{where} has {style!r} for {pattern}: there are {', '.join(STYLES)}")
        expression = r"\.".join("[^.]+" if token == "*" else token for token in pattern.split("."))
        matching = [name for name in names if fullmatch(expression, name)]
        require(bool(matching), f"{where} names {pattern}, which the module does not have")
        found |= dict.fromkeys(matching, style)
    return found


def _parent(module: nn.Module, name: str) -> str:
    """Of the module ``name``, the closest one above it that has a forward."""
    above = name.rpartition(".")[0]
    return _parent(module, above) if isinstance(module.get_submodule(above), nn.ModuleList | nn.ModuleDict) else above


def _holder(module: nn.Module, name: str, blocks: Sequence[str]) -> str:
    """Of the module ``name``, the innermost block around it, or the closest module."""
    around = [block for block in blocks if name.startswith(f"{block}.")]
    return max(around, key=len) if around else _parent(module, name)


def _split(layer: nn.Module, style: str, name: str, region: _Region, key: str, tokens: int | None) -> None:
    """Split a layer; ``tokens`` is the dimension of what it sums along which each rank gets its share, if it does."""
    if style in ("replicated_with_grad_allreduce", "sequence_parallel"):
        if style != "sequence_parallel" or tokens is not None:
            layer._sees_part = True  # type: ignore[assignment]
            region.partly.append(layer)
        return
    if not isinstance(layer, nn.Linear):
        raise RecipeError(f"{key}: {name} is a {type(layer).__name__}: only nn.Linear can be split {style}")
    width = layer.out_features if style == "colwise" else layer.in_features
    require(width % region.ranks == 0, f"{key} does not divide the {width} features of {name}: use a divisor of them")
    begins = style == "colwise"
    # Each rank takes its part of what it has: nothing is sent.
    sums = RowwiseParallel(output_layouts=Replicate() if tokens is None else Shard(tokens))
    parallelize_module(layer, region.mesh, ColwiseParallel() if begins else sums, src_data_rank=None)
    layer.register_forward_pre_hook(region.enter if begins else region.leave, prepend=True)
    if begins:
        layer.register_forward_hook(region.begin)


class SplitAttention(nn.Module):
    """``nn.MultiheadAttention`` as torchvision uses it, its packed weight taken apart, so that heads can be split.
    Checkpoints keep the packed weight: ``packed`` says which of its three stretches of rows each is."""

    packed: ClassVar = {
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
        if not plain or whole.bias_k is not None or whole.add_zero_attn or whole.in_proj_weight is None:
            what = "an nn.MultiheadAttention with batch_first and biases, and queries, keys and values of one width"
            raise RecipeError(f"{key}: {name} is not {what}: use linear layers of your own for them")
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
        """Attention of this rank's heads and the sum over ranks; (n, tokens, width), laid out in memory as torch's."""
        query, key, value = (
            layer(inputs).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer, inputs in ((self.q, query), (self.k, key), (self.v, value))
        )
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return self.out_proj(found.permute(2, 0, 1, 3).flatten(2)).transpose(0, 1), None


class _Region(TorchFunctionMode):
    """What is computed between a layer that is split by columns and the one that is split by rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.rank, self.ranks = mesh, mesh.get_local_rank(), mesh.size()
        self.is_split = self.is_open = False
        self.entered: tuple[Tensor, DTensor] | None = None
        self.tokens = 0  # of the block that is computed, where each rank has its share of them between split layers
        self.partly: list[nn.Module] = []  # whose weights are on every rank, and see the heads of this one

    def around(self, parent: nn.Module, is_shared: bool, goes_on: bool) -> Callable[..., Any]:
        """``parent.forward``; if it ``is_shared``, on this rank's tokens, with which the next block ``goes_on``."""
        forward, kind = parent.forward, type(parent).__name__

        @wraps(forward)
        def within(*args: Any, **kwargs: Any) -> Any:
            self.is_split, self.is_open, self.entered = False, True, None
            try:
                if is_shared:
                    is_known = bool(args) and isinstance(args[0], Tensor) and args[0].ndim == 3
                    require(is_known, f"memory.sequence_parallel: {kind} gets no (n, tokens, width) first: use false")
                    whole = args[0] if isinstance(args[0], DTensor) else self.alike(args[0])
                    self.tokens = whole.shape[1]
                    args = whole.redistribute(placements=[Shard(1)]).to_local(), *args[1:]
                with self if parent.training else nullcontext():
                    found = forward(*args, **kwargs)
                if not is_shared:
                    return found
                # A copy, once a forward: what the model does to a view in place, FSDP's hooks and autograd refuse.
                return self.dealt(found) if goes_on else self.gathered(found).to_local().clone()
            finally:  # a recomputation leaves by an exception
                self.is_split, self.is_open, self.entered, self.tokens = False, False, None, 0

        return within

    def alike(self, tensor: Tensor) -> DTensor:
        """What is the same on all ranks."""
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def dealt(self, mine: Any) -> DTensor:
        """The tokens of all ranks, each where it is, from this rank's: (n, tokens, width) or (tokens, width)."""
        shape = list(getattr(mine, "shape", ()))
        along, (share, _) = len(shape) - 2, Shard.local_shard_size_and_offset(self.tokens, self.ranks, self.rank)
        fits = along in (0, 1) and shape[along] == share
        require(fits, f"memory.sequence_parallel: {shape or 'a tuple'} has no share of {self.tokens} tokens: use false")
        shape[along] = self.tokens
        size: Any = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(mine, self.mesh, [Shard(along)], run_check=False, **size)

    def gathered(self, mine: Tensor) -> DTensor:
        """The tokens of all ranks, on every rank."""
        every = self.dealt(mine).redistribute(placements=[Replicate()])
        # Before torch 2.12 uneven shares come together as a view, and a linear layer wants no such one.
        return every if (local := every.to_local()).is_contiguous() else self.alike(local.contiguous())

    def assemble(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before a module that holds layers that are split by columns: to its first tensor all ranks' tokens."""
        mine = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        every = self.gathered(mine)
        return tree_map(lambda one: every if one is mine else one, (args, kwargs))

    def enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a layer that is split by columns. Queries, keys and values of one input sum its gradient once."""
        require(
            self.is_open, "memory.tensor_parallel: call modules that hold split layers, not these layers themselves"
        )
        if isinstance(args[0], DTensor):
            return args
        if self.entered is None or self.entered[0] is not args[0]:
            self.entered = args[0], self.gathered(args[0]) if self.tokens else self.alike(args[0])
        return self.entered[1], *args[1:]

    def begin(self, *_: Any) -> None:
        """After a layer that is split by columns."""
        self.is_split = True

    def leave(self, *_: Any) -> None:
        """Before a layer that is split by rows."""
        self.is_split, self.entered = False, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_split or self.tokens:
            if func in (functional.dropout, torch.dropout):
                return self.dropout(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if self.is_split and func is functional.scaled_dot_product_attention:
                return self.attention(*args, **kwargs)
            if self.is_split and name == "draw_kept":  # of models/unpadded.py, which costs an import
                weights, (texts, heads, *rest), dropped = args
                whole = func(weights, torch.Size([texts, heads * self.ranks, *rest]), dropped)
                return whole.narrow(1, self.rank * heads, heads)
            require(name not in OTHER_DROPOUTS, f"memory.tensor_parallel cannot split {name}: use dropout")
            given = (*args, *kwargs.values())
            weights = [one for one in given if isinstance(one, nn.Parameter) and not isinstance(one, DTensor)]
            known = [one for part in self.partly if weights for one in part._parameters.values()]
            require(
                all(any(one is other for other in known) for one in weights),
                f"memory.tensor_parallel: {name} uses a weight that every rank has on what layers have split: give its "
                f"module the style {STYLES[3 if self.is_split else 4]} in tensor_parallel_plan",
            )
        return func(*args, **kwargs)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Dropout by this rank's part of the mask of the whole: of attention weights (n, heads, queries, keys) along
        heads, of tokens that are shared along these, of all else along the last dimension. The whole mask is drawn in
        the order of the whole's memory."""
        if not training or not p:
            return input
        shape, strides = list(input.shape), input.stride()
        if self.is_split:
            along = 1 if input.ndim == 4 else input.ndim - 1
            first, size, shape[along] = self.rank * shape[along], shape[along], shape[along] * self.ranks
        else:
            along, shape = input.ndim - 2, list(self.dealt(input).shape)
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
        """Attention; with dropout no fused kernel, which would draw a mask that nobody can take a part of."""
        if not dropout_p:
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value


def is_split(parameter: Tensor) -> bool:
    """Whether ranks that are tensor parallel have other parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == TENSOR and at.is_shard() for name, at in zip(names, parameter.placements, strict=True))


class TensorParallelSync(GradientSync):
    """Gradients of split weights are of this rank's part. They go to ``trained``: plain tensors in the memory of what
    this rank has of each parameter, for no optimizer takes DTensors of several meshes, and others, in one step.

    Over the other ranks (``mesh[DATA]``) FSDP reduces, or else this does. Weights that are not split have the same
    gradient on all ranks of a group, but for the noise of kernels that add in any order: it is averaged, lest the ranks
    drift apart. Buckets of gradients are reduced in a fixed order: during the last backward where they ``may_overlap``
    and the last backward of the first step computed every gradient once, on all ranks; else after it.
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
        order = {p: position for position, p in enumerate(reversed(trained))}  # about that of backward
        self.kinds = [[p for p in order if is_split(p) == kind] for kind in (True, False)]
        found = [[kind[n] for n in bucket] for kind in self.kinds for bucket in buckets([trained[p] for p in kind])]
        self.buckets = sorted(found, key=lambda bucket: order[bucket[-1]])
        self.begun: list[Callable[[], None]] = []  # for each of the first buckets what waits for it
        self.arrived: Counter[Tensor] = Counter()  # how often the last backward has computed each gradient
        for parameter in trained:
            self.on_gradient(parameter, self._arrive)

    def before(self, is_last: bool) -> None:
        self.is_last = is_last
        if self.sharding is not None:
            self.sharding.before(is_last)

    def _arrive(self, parameter: Tensor) -> None:
        """Called by autograd, or by FSDP, when a gradient has been computed; starts the buckets that are complete."""
        if self.is_last and parameter.grad is not None:  # FSDP may call the hooks of parameters that got none, too
            self.arrived[parameter] += 1
            left = self.buckets[len(self.begun) :] if self.overlapped else []
            for bucket in takewhile(lambda bucket: all(p in self.arrived for p in bucket), left):
                self._begin(bucket)

    @torch.no_grad()
    def _begin(self, bucket: list[nn.Parameter]) -> None:
        """Move the gradients of a bucket to where the optimizer finds them, and start to reduce them."""
        gradients: list[Tensor] = []
        for parameter in bucket:
            tensor, gradient, parameter.grad = self.trained[parameter], parameter.grad, None
            if gradient is None:
                continue
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            tensor.grad = local(gradient)
            if parameter in self.partly:  # each rank has seen its heads only: a sum, not a mean
                tensor.grad *= self.ranks
            gradients.append(tensor.grad)
        if not is_split(bucket[0]):
            self.begun.append(begin_mean(gradients, self.tensor if self.sharding is not None else None))
        else:  # with FSDP, or no other ranks, there is nothing to reduce
            self.begun.append(begin_mean(gradients if self.over_data else [], self.data))

    def after(self) -> None:
        once = all(self.arrived[p] == 1 for p in self.trained)
        if self.overlapped and not once:
            raise RunError("some parameters got no gradient, or two: set `conditional = True` in the model's class")
        if not self.overlapped and (self.may_overlap or self.over_data):
            counts = add_missing(list(self.trained), once)
            self.overlapped = self.may_overlap and counts[-1] == torch.distributed.get_world_size()
        for bucket in self.buckets[len(self.begun) :]:
            self._begin(bucket)
        for finish in self.begun:
            finish()
        self.abandon()

    def abandon(self) -> None:
        self.begun.clear()  # not waited for: a rank that failed takes no part in what is under way
        self.arrived.clear()

    def norm(self) -> Tensor:
        """Of split weights the parts of all ranks, of others one copy."""
        gradients = [[g for p in reversed(kind) if (g := self.trained[p].grad) is not None] for kind in self.kinds]
        nothing = self.parameters[0].new_zeros(())
        split, whole = (total_norm(one, self.alike) if one else nothing for one in gradients)
        group = self.tensor if self.sharding is None else None
        return norm_over_ranks(torch.hypot(split, whole / self.ranks**0.5), group=group)


def trained_parts(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """For each parameter that trains, a plain tensor in the memory of what this rank has of it."""
    return {p: local(p.detach()) for p in module.parameters() if p.requires_grad}
