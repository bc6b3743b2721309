"""Training scripts of others, whose peaks of memory they have published, as plain loops on a GPU that is not there.

Each is written anew from the description and the settings of the original, which :mod:`planner_holdout` names; what
matters for memory is as there: which tensors are made in which order, and which names keep them. Of an epoch there are
the first steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Updates = Callable[[Any], torch.optim.Optimizer]
STEPS = 3


# --------------------------------------------------------------------------------- GPT-2, in the versions of a tutorial


@dataclass
class GPT2:
    """What the tutorial changes, in its order: ``bundled_config_folder`` by then is in :mod:`planner_holdout`."""

    mask_on_the_fly: bool = False  # each layer had its own mask of 1024 x 1024 before
    tf32: bool = False
    fused: bool = False
    bf16: bool = False
    native: bool = False  # torch's LayerNorm and GELU
    flash: bool = False
    vocabulary: int = 50257
    batch: int = 8
    compiled: bool = False

    def __call__(self) -> None:
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        model: nn.Module = _Decoder(self).to("cuda")
        if self.compiled:
            model = torch.compile(model)  # type: ignore[assignment]
        if self.bf16:
            model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=self.fused or None)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = self.loss(model)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            self.loss(model).item()

    def loss(self, model: nn.Module) -> Tensor:
        tokens, targets = (torch.zeros(self.batch, 1024, dtype=torch.long).to("cuda") for _ in range(2))
        logits = model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Norm(nn.Module):
    """LayerNorm of single operations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class _Gelu(nn.Module):
    """GELU of single operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class _Attention(nn.Module):
    def __init__(self, options: GPT2) -> None:
        super().__init__()
        self.options = options
        if options.flash:
            self.qkv = nn.Linear(768, 3 * 768, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(768, 768, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(768, 768), nn.Dropout(0.1)
        if not options.mask_on_the_fly:
            self.register_buffer("mask", torch.triu(torch.ones(1024, 1024), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        if self.options.flash:
            parts = self.qkv(x).view(batch, tokens, 3, 12, 64).permute(2, 0, 3, 1, 4)
            rate = 0.1 if self.training else 0.0
            found = functional.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=True)
            return self.out(found.transpose(1, 2).contiguous().view(batch, tokens, size))
        key, query, value = self.key(x), self.query(x), self.value(x)
        key, value, query = (one.view(batch, tokens, 12, 64).transpose(1, 2) for one in (key, value, query))
        scores = query @ key.transpose(2, 3)
        if self.options.mask_on_the_fly:
            hidden = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1).bool()
        else:
            hidden = self.mask.bool()[:tokens, :tokens]
        scores.masked_fill_(hidden, -torch.inf)
        weights = self.dropout(torch.softmax(scores / 64**0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, size))


class _Block(nn.Module):
    def __init__(self, options: GPT2) -> None:
        super().__init__()
        norm = nn.LayerNorm if options.native else _Norm
        gelu = nn.GELU(approximate="tanh") if options.native else _Gelu()
        self.attention, self.dropout = _Attention(options), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(768, 3072), gelu, nn.Linear(3072, 768))
        self.norm1, self.norm2 = norm(768), norm(768)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            shortcut = x
            x = norm(x)
            x = part(x)
            x = self.dropout(x)
            x = x + shortcut
        return x


class _Decoder(nn.Module):
    """GPT-2 of 124 million weights, with a head of its own."""

    def __init__(self, options: GPT2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(options.vocabulary, 768), nn.Embedding(1024, 768)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_Block(options) for _ in range(12)))
        self.norm = nn.LayerNorm(768) if options.native else _Norm(768)
        self.head = nn.Linear(768, options.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded, places = self.tokens(tokens), self.places(torch.arange(tokens.size(1), device=tokens.device))
        x = embedded + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


# -------------------------------------------------------------------------------------------------- vision, from timm


@dataclass
class Timm:
    """A network of timm: fine-tuned on 45 classes (torchao's benchmark), or as timm's own benchmark trains it."""

    name: str
    batch: int
    optimizer: Updates
    amp: torch.dtype | None = None
    weights: torch.dtype = torch.float32
    checkpointing: bool = False
    compiled: bool = False
    benchmark: bool = False  # timm's: a batch that stays on the GPU, and attention of single operations
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> None:
        import timm

        if self.benchmark:
            timm.layers.set_fused_attn(False)
        model = timm.create_model(self.name, num_classes=1000 if self.benchmark else 45, **dict(self.options))
        if self.checkpointing:
            model.set_grad_checkpointing()
        model.to(self.weights)
        model.cuda().train()
        if self.compiled:
            model.compile(fullgraph=True)
        optimizer = self.optimizer(model.parameters())
        if self.benchmark:
            self._benchmark(model, optimizer)
        else:
            self._finetune(model, optimizer)

    def _batch(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.batch, 3, 224, 224, dtype=self.weights), torch.zeros(self.batch, dtype=torch.long)

    def _finetune(self, model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            images, labels = self._batch()
            with torch.autocast("cuda", self.amp, enabled=self.amp is not None):
                loss = functional.cross_entropy(model(images.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def _benchmark(self, model: nn.Module, optimizer: Any) -> None:
        images, labels = (one.cuda() for one in self._batch())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)  # the default before torch 2.0
            with torch.autocast("cuda", self.amp, enabled=self.amp is not None):
                output = model(images)
            loss = functional.cross_entropy(output, labels)
            loss.backward()
            optimizer.step()


# ---------------------------------------------------------------------------------- a guide's BERT-large, torch of 2022


@dataclass
class BertLarge:
    """transformers' Trainer of January 2022 on sequences of 512 tokens, 4 samples a step.

    Args:
        micro_batch: samples that go through at once.
        amp: fp16 with a scaler.
        keeps_input: whether a softmax keeps its input, too, for the backward, as it did before torch 1.11.
    """

    micro_batch: int = 4
    checkpointing: bool = False
    amp: torch.dtype | None = None
    adafactor: bool = False
    keeps_input: bool = False

    def __call__(self) -> None:
        from transformers import Adafactor, BertConfig, BertForSequenceClassification

        if self.keeps_input:
            functional.softmax = _OldSoftmax.softmax
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        config = BertConfig(**sizes, attn_implementation="eager")
        model = BertForSequenceClassification(config).to("cuda").train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        if self.adafactor:
            optimizer: Any = Adafactor(model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)
        else:
            optimizer = _OldAdamW(model.parameters(), lr=5e-5)
        scaler = torch.amp.GradScaler("cuda", enabled=self.amp is not None)
        for _ in range(STEPS):
            for _ in range(4 // self.micro_batch):
                tokens = torch.ones(self.micro_batch, 512, dtype=torch.long).to("cuda")
                labels = torch.zeros(self.micro_batch, dtype=torch.long).to("cuda")
                with torch.autocast("cuda", self.amp, enabled=self.amp is not None):
                    loss = model(input_ids=tokens, labels=labels).loss * (self.micro_batch / 4)
                scaler.scale(loss).backward()
            if self.amp is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)  # the default before torch 2.0


class _OldSoftmax(torch.autograd.Function):
    """Softmax of torch before 1.11, whose backward took the input, if only for its type.

    Source: tools/autograd/derivatives.yaml of torch 1.10, ``_softmax_backward_data(grad, result, dim, self)``.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int) -> Tensor:
        result = torch.softmax(x, dim)
        context.save_for_backward(x, result)
        context.dim = dim
        return result

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        x, result = context.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], result, context.dim, x.dtype), None

    @staticmethod
    def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        if torch.is_autocast_enabled("cuda") and dtype is None:
            dtype = torch.float32
        return _OldSoftmax.apply(x if dtype is None else x.to(dtype), dim)  # type: ignore[no-any-return]


class _OldAdamW(torch.optim.Optimizer):
    """transformers' own AdamW of then: a weight after the other, with one intermediate of its size."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["mean"].mul_(0.9).add_(weight.grad, alpha=0.1)
            state["square"].mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
            weight.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-self.param_groups[0]["lr"])


# ------------------------------------------------------------------------------------- lit-gpt's LoRA, in its own words


@dataclass
class LitGPT:
    """LoRA of rank 8 on queries and values, in bfloat16 through Fabric, with the longest sample of the data.

    What costs memory besides the weights, and is easily overlooked: Fabric returns logits in fp32, whatever a module
    computes in (``HalfPrecision.convert_output``); the values keep the whole of queries, keys and values, of which
    they are a view; and ``index_copy`` keeps what it copies.

    Args:
        micro_batch: samples that go through at once.
        tokens: of the longest one.
        llama: RMSNorm, gated MLP, no biases; else LayerNorm, GELU, and attention beside the MLP.
        norm_in_fp32: an RMSNorm of a later commit.
    """

    micro_batch: int
    tokens: int
    layers: int
    size: int
    heads: int
    vocabulary: int
    inner: int
    rotary: float
    llama: bool = False
    shared_norm: bool = False
    head_bias: bool = False
    norm_in_fp32: bool = False

    def __call__(self) -> None:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-true")
        fabric.launch()
        with fabric.init_module():
            model = _LitModel(self)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora" in name
        module: Any = fabric.setup_module(model)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01))
        for _ in range(STEPS):
            tokens, targets = fabric.to_device(
                tuple(torch.zeros(self.micro_batch, self.tokens, dtype=torch.long) for _ in range(2))
            )
            logits = module(tokens)
            logits[-1] = logits[-1][..., :-1, :]
            loss = self._loss(logits, targets[..., 1:])
            fabric.backward(loss / 128)
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, logits: list[Tensor], targets: Tensor) -> Tensor:
        """In pieces of 128 tokens."""
        flat = [piece.reshape(-1, piece.size(-1)) for piece in logits]
        wanted = [piece.reshape(-1) for piece in targets.split(128, dim=1)]
        pairs = zip(flat, wanted, strict=True)
        losses = [functional.cross_entropy(one, other, ignore_index=-1, reduction="none") for one, other in pairs]
        return torch.cat(losses).mean()


class _LitModel(nn.Module):
    def __init__(self, config: LitGPT) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.size)
        self.blocks = nn.ModuleList(_LitBlock(config) for _ in range(config.layers))
        self.norm = _lit_norm(config)
        self.head = nn.Linear(config.size, config.vocabulary, bias=config.head_bias)
        rotated = int(config.rotary * config.size // config.heads)
        # Made again when the longest sample is known, outside of what makes bfloat16 the default.
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(config.tokens, rotated, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        self.cos, self.sin = (one.to(torch.float32) for one in (self.cos, self.sin))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        return [self.head(piece) for piece in x.split(128, dim=1)]


class _LitBlock(nn.Module):
    def __init__(self, config: LitGPT) -> None:
        super().__init__()
        self.config = config
        size, inner, bias = config.size, config.inner, not config.llama
        self.norm1 = _lit_norm(config)
        self.norm2 = None if config.shared_norm else _lit_norm(config)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=bias), nn.Linear(size, size, bias=bias)
        self.lora_a, self.lora_b = nn.Parameter(torch.zeros(16, size)), nn.Parameter(torch.zeros(2 * size, 8))
        self.up, self.down = nn.Linear(size, inner, bias=bias), nn.Linear(inner, size, bias=bias)
        self.gate = nn.Linear(size, inner, bias=bias) if config.llama else None
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm1(x)
        attended = self._attend(first, cos, sin)
        if not self.config.llama:
            return x + attended + self._mlp(first if self.norm2 is None else self.norm2(x))
        x = x + attended
        return x + self._mlp(self.norm2(x))

    def _mlp(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh" if self.config.shared_norm else "none"))
        gate, up = self.gate(x), self.up(x)
        return self.down(functional.silu(gate) * up)

    def _lora(self, x: Tensor) -> Tensor:
        """Queries, keys and values, of which the keys are not adapted: the change to them is padded with zeros."""
        size = self.config.size
        frozen = self.qkv(x)
        low = functional.linear(self.dropout(x), self.lora_a)
        high = functional.conv1d(low.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        high = high.transpose(0, 1)
        padded = high.new_zeros((*high.shape[:-1], 3 * size))
        where = torch.tensor([*range(size), *range(2 * size, 3 * size)], device=padded.device)
        padded = padded.view(-1, 3 * size).index_copy(1, where, high.reshape(-1, 2 * size))
        return frozen + padded.view((*high.shape[:-1], 3 * size)).transpose(0, 1) * 2.0

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        heads, rotated = self.config.heads, cos.size(-1)
        parts = self._lora(x).view(batch, tokens, heads, 3, size // heads).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(batch, heads, tokens, -1) for part in parts.split(1, dim=2))
        turned = [_rotated(one[..., :rotated], cos, sin) for one in (query, key)]
        query, key = (
            torch.cat((some, one[..., rotated:]), dim=-1) for some, one in zip(turned, (query, key), strict=True)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.out(found.reshape(batch, tokens, size))


class _RMSNorm(nn.Module):
    def __init__(self, size: int, in_fp32: bool) -> None:
        super().__init__()
        self.weight, self.in_fp32 = nn.Parameter(torch.ones(size)), in_fp32

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float() if self.in_fp32 else x
        square = torch.mean(x * x, dim=-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(square + 1e-5))).to(dtype)


def _lit_norm(config: LitGPT) -> nn.Module:
    return _RMSNorm(config.size, config.norm_in_fp32) if config.llama else nn.LayerNorm(config.size)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


# ------------------------------------------------------------------- torchtune's recipes for one device, packed samples


def fused_adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=2e-5, fused=True)


@dataclass
class TorchTune:
    """Llama 3.1 and 3.2 in bfloat16 as torchtune trains them, on packed samples of which every token counts.

    Its FlexAttention keeps what flash attention does: queries, keys and values of all heads, the output and a figure a
    row. Keys and values are repeated for all heads of queries; an RMSNorm and the rotations are computed in fp32.

    Args:
        tokens: of a sample; 2 samples go through at once.
        tied: whether the words' embeddings are the head, too.
        chunks: that the head and the loss are computed in; 0 for all logits at once, in fp32.
        checkpointing: of every block.
        in_backward: whether each weight is updated as soon as its gradient is there.
        offloading: whether what is kept for the backward is on the host, but the newest five tensors.
        optimizer: of all weights that are trained.
        rank: of the adapters beside ``adapted``; 0 trains the weights themselves.
        nf4: whether the matrices of the blocks are frozen in four bits.
        compiled: whether every block and the loss in chunks are compiled. The recipes drop what ``compile_loss``
            returns, so a loss of all logits at once stays eager.
    """

    layers: int
    size: int
    heads: int
    inner: int
    tokens: int
    tied: bool
    chunks: int = 0
    checkpointing: bool = False
    in_backward: bool = False
    offloading: bool = False
    optimizer: Updates = fused_adamw
    rank: int = 0
    adapted: tuple[str, ...] = ()
    nf4: bool = False
    compiled: bool = False

    def __call__(self) -> None:
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = _TuneModel(self)
            torch.set_default_dtype(torch.float32)
        if self.compiled:
            for block in model.blocks:
                block.compile()
        cross_entropy = torch.compile(_tune_loss) if self.compiled and self.chunks else _tune_loss
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizers = {weight: self.optimizer([weight]) for weight in trained} if self.in_backward else {}
        for weight in optimizers:
            weight.register_post_accumulate_grad_hook(partial(_update_now, optimizers))
        optimizer = None if self.in_backward else self.optimizer(trained)
        no_label = torch.full((2, 1), -100, device="cuda")
        for _ in range(STEPS):
            tokens, labels = (torch.zeros(2, self.tokens, dtype=torch.long).to("cuda") for _ in range(2))
            places = torch.zeros(2, self.tokens, dtype=torch.long).to("cuda")
            with _Offloaded() if self.offloading else nullcontext():
                hidden = model(tokens, places)
            loss = self._loss(cross_entropy, model, hidden, torch.hstack((labels[..., 1:], no_label)))
            del hidden
            loss.backward()
            if optimizer is not None:
                for weight in trained:
                    weight.grad *= 1 / 8192
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def _loss(self, cross_entropy: Any, model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        if not self.chunks:
            logits = model.logits(hidden).float()
            return cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), "mean")
        logits = [model.logits(piece) for piece in hidden.chunk(self.chunks, dim=1)]
        pairs = zip(logits, labels.chunk(self.chunks, dim=1), strict=True)
        return sum(cross_entropy(piece.flatten(0, 1), wanted.reshape(-1), "sum") for piece, wanted in pairs)  # type: ignore[return-value]


def _tune_loss(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction=reduction)


def _update_now(optimizers: dict[Tensor, torch.optim.Optimizer], weight: Tensor) -> None:
    optimizers[weight].step()
    optimizers[weight].zero_grad()


class _Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """Keeps on the host what a backward needs, but for parameters, small tensors, and those that were saved last."""

    def __init__(self) -> None:
        self.newest: deque[Tensor] = deque(maxlen=5)
        super().__init__(self._pack, lambda kept: kept.to("cuda", non_blocking=True) if kept.is_pinned() else kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.nbytes < 1024:
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        kept.copy_(tensor, non_blocking=True)
        self.newest.append(tensor)
        return kept


class _TuneModel(nn.Module):
    def __init__(self, options: TorchTune) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(128256, options.size)
        self.blocks = nn.ModuleList(_TuneBlock(options) for _ in range(options.layers))
        self.norm = nn.Parameter(torch.ones(options.size))
        self.head = self.embedding if options.tied else nn.Linear(options.size, 128256, bias=False)
        if options.rank:
            for name, weight in self.named_parameters():
                weight.requires_grad = "adapter" in name
        self.register_buffer("cache", torch.zeros(131072, options.size // options.heads // 2, 2, dtype=torch.float32))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.options.checkpointing:
                x = checkpoint(block, x, self.cache, places, use_reentrant=False)
            else:
                x = block(x, self.cache, places)
        return _tune_norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.head.weight)


class _TuneLinear(nn.Module):
    """A matrix, which may be frozen in NF4 and have adapters."""

    def __init__(self, options: TorchTune, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = nn.Linear(inputs, outputs, bias=False).weight.detach()
        self.nf4, self.rank = options.nf4, options.rank if name in options.adapted else 0
        if options.nf4:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

            weight = to_nf4(weight)
        self.weight = nn.Parameter(weight, requires_grad=not options.rank)
        if self.rank:
            self.adapter_a = nn.Linear(inputs, self.rank, bias=False)
            self.adapter_b = nn.Linear(self.rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.nf4:
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

            found = linear_nf4(input=x, weight=self.weight)
        else:
            found = functional.linear(x, self.weight)
        return found + 2.0 * self.adapter_b(self.adapter_a(x)) if self.rank else found


class _TuneBlock(nn.Module):
    def __init__(self, options: TorchTune) -> None:
        super().__init__()
        self.heads, self.each = options.heads, options.size // options.heads
        size, few, inner = options.size, KEY_HEADS * self.each, options.inner
        shapes = {"q": (size, size), "k": (size, few), "v": (size, few), "o": (size, size)}
        shapes |= {"w1": (size, inner), "w2": (inner, size), "w3": (size, inner)}
        self.parts = nn.ModuleDict({name: _TuneLinear(options, name, *shape) for name, shape in shapes.items()})
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(size)) for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        h = self._attend(_tune_norm(x, self.norm1), cache, places) + x
        y, part = _tune_norm(h, self.norm2), self.parts
        return h + part["w2"](functional.silu(part["w1"](y)) * part["w3"](y))

    def _attend(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = _tune_rotated(self.parts["q"](x).view(batch, tokens, -1, self.each), cache, places).transpose(1, 2)
        key, value = (self.parts[name](x).view(batch, tokens, -1, self.each) for name in "kv")
        key, value = _tune_rotated(key, cache, places).transpose(1, 2), value.transpose(1, 2)
        shape = (batch, KEY_HEADS, self.heads // KEY_HEADS, -1, self.each)
        key, value = (one.unsqueeze(2).expand(shape).flatten(1, 2) for one in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.parts["o"](found.transpose(1, 2).contiguous().view(batch, tokens, -1))


KEY_HEADS = 8  # of all Llamas from 3 on that are here


def _tune_norm(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * scale


def _tune_rotated(x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turn = cache[places].view(-1, pairs.size(1), 1, pairs.size(3), 2)
    parts = [
        pairs[..., 0] * turn[..., 0] - pairs[..., 1] * turn[..., 1],
        pairs[..., 1] * turn[..., 0] + pairs[..., 0] * turn[..., 1],
    ]
    return torch.stack(parts, -1).flatten(3).type_as(x)


# ----------------------------------------------------------- PEFT's comparison of methods, on the transformers of today


@dataclass
class Peft:
    """Llama 3.2 3B in bfloat16 by a plain loop with transformers and PEFT: AdamW of a tensor list, gradients clipped.

    Args:
        adapters: PEFT's configuration; ``None`` trains all weights.
        tokens: of the longest of its 4 samples, the others being padded to that.
    """

    adapters: Callable[[], Any] | None
    tokens: int

    def __call__(self) -> None:
        from peft import get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        from trainer.models.hub import bundled_config_folder

        config = AutoConfig.from_pretrained(bundled_config_folder("meta-llama/Llama-3.2-3B"), trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).to("cuda")
        model = get_peft_model(model, self.adapters()) if self.adapters else model
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        for _ in range(STEPS):
            ids = torch.zeros(4, self.tokens, dtype=torch.long)
            mask = torch.ones_like(ids)
            for row in range(4):
                mask[row, self.tokens - 8 * row :] = 0
            batch = {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}
            labels = batch["input_ids"].clone()
            count = batch["attention_mask"].sum().item()
            optimizer.zero_grad()
            loss = model(**batch, labels=labels, num_items_in_batch=count).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


# -------------------------------------------------------------------- a head of Gemma 2's vocabulary, as Apple timed it


@dataclass
class Head:
    """Logits of 8,192 tokens for 256,000 words, softly capped, and their cross entropy in fp32.

    Args:
        backward: whether the gradients are computed, too.
    """

    backward: bool

    def __call__(self) -> None:
        shapes = ((8192, 2304), (256_000, 2304))
        hidden, head = (
            torch.zeros(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes
        )
        loss = self._loss(hidden, head, torch.zeros(8192, dtype=torch.long, device="cuda"))
        if self.backward:
            loss.backward()

    def _loss(self, hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        logits = hidden @ head.T
        logits = torch.tanh(logits / 30.0) * 30.0
        return functional.cross_entropy(logits.float(), wanted)
