"""Models as people have them, and what a run makes of them: a plain loop's weights, or a refusal.

They are architectures of transformers and torchvision with tiny shapes, and networks that do one odd thing each. Their
data is drawn, of lengths that differ, with labels that are missing; the last batch of an epoch is smaller.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run
from trainer.api import fit
from trainer.cli import _exit_code
from trainer.contract import Exportable
from trainer.engine.order import batch_indices

WORDS, CLASSES, SIZE, BATCH, STEPS = 67, 5, 23, 8, 4
BASE = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
BASE |= {"num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SMALL = {**BASE, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL |= {"num_labels": CLASSES}
LLAMA = {**BASE, "num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL = {"decoder_start_token_id": 0, "pad_token_id": 0}
PICTURE = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES}
PICTURE |= {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
BART = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "d_model": 16, "dropout": 0.0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "dropout_rate": 0}
GPT2 = {"n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
ALBERT = {**SMALL, "embedding_size": 8, "classifier_dropout_prob": 0.0}
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pooler_dropout": 0, "pooler_hidden_size": 16}

TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_vit": ("ViTForImageClassification", "ViTConfig", PICTURE),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", SMALL),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", ALBERT),
    "electra": ("ElectraForSequenceClassification", "ElectraConfig", {**SMALL, "embedding_size": 8}),
    "deberta": ("DebertaV2ForSequenceClassification", "DebertaV2Config", {**SMALL, **DEBERTA}),
    "bert_tokens": ("BertForTokenClassification", "BertConfig", SMALL),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": WORDS, **GPT2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": False}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"vocab_size": WORDS, **T5, **SPECIAL}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {"vocab_size": WORDS, **BART, **SPECIAL}),
}
TORCHVISION = ("convnext", "resnet18", "mobilenet")
CAUSAL, PAIRS = ("gpt2", "llama", "llama_tied"), ("t5", "bart")
ODD = (
    *("plain", "scale", "shared_block", "shared_weight", "sparse", "frozen", "siamese", "penalty"),
    *("unused", "buffer", "complex", "two", "weighted", "smooth"),
)
IMAGES = ("hf_vit", *TORCHVISION, "group", "batch")
ALL = (*TRANSFORMERS, *TORCHVISION, "group", "batch", *ODD)
WEIGHTS = torch.tensor([0.3, 2.0, 1.0, 0.0, 5.0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Classifies texts by the mean of what its blocks make of the words.

    Args:
        kind: the odd thing: ``scale`` (a weight without dimensions), ``shared_block`` (a block twice in the list),
            ``shared_weight`` (a matrix in two blocks), ``penalty`` (gives the embedded words, too), ...
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(WORDS, 16, sparse=kind == "sparse")
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, CLASSES)
        if kind == "shared_block":
            self.blocks[2] = self.blocks[0]
        if kind == "shared_weight":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.5))
        if kind == "complex":
            real = torch.randn(2, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            self.filter = nn.Parameter(torch.complex(*real.to(torch.get_default_dtype())))
        if kind == "unused":
            self.extra, self.never = nn.Linear(16, 4), nn.Parameter(torch.ones(3, 3))
        if kind == "frozen":
            for part in (self.embed, self.blocks[0], self.blocks[1].norm):
                part.requires_grad_(False)
        if kind == "buffer":
            self.register_buffer("centre", torch.linspace(-1, 1, 16))
        if kind == "two":
            self.left, self.right = nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, head: str = "head") -> Any:
        x = embedded = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if self.kind == "complex":
            x = torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.filter, n=16, dim=-1)
        mask = attention_mask.unsqueeze(-1).to(x.dtype)
        features = (x * mask).sum(1) / mask.sum(1)
        if self.kind == "siamese":
            return features
        if self.kind == "buffer":
            return self.head(features), (features - self.centre).square().sum(-1)
        logits = getattr(self, head)(features)
        if self.kind == "penalty":
            return logits, embedded
        return logits * self.scale if self.kind == "scale" else logits


class Convolutions(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, CLASSES)
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(), nn.ReLU()) for _ in range(3)]
        self.blocks = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))


def make(name: str) -> nn.Module:
    """The module, in the default dtype, with weights that depend on their names' order alone."""
    module = _of_a_library(name) if name in TRANSFORMERS or name in TORCHVISION else _own(name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in module.named_parameters():  # libraries draw them as they like
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15
            if parameter.ndim and not parameter.is_complex():
                parameter.copy_((drawn + float(parameter.ndim == 1 and key.endswith("weight"))).float())
    return module.train()


def _own(name: str) -> nn.Module:
    norms = {"group": lambda: nn.GroupNorm(2, 8), "batch": lambda: nn.BatchNorm2d(8)}
    return Convolutions(norms[name]) if name in norms else Net(name)


def _of_a_library(name: str) -> nn.Module:
    if name in TRANSFORMERS:
        import transformers

        kind, config, fields = TRANSFORMERS[name]
        return getattr(transformers, kind)(getattr(transformers, config)(**fields))
    from torchvision import models
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    if name == "convnext":
        stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
        return ConvNeXt(stages, stochastic_depth_prob=0.0, num_classes=CLASSES)
    if name == "resnet18":
        return models.resnet18(num_classes=CLASSES)
    return models.mobilenet_v3_small(dropout=0.0, num_classes=CLASSES)


def samples(name: str) -> list[dict[str, Tensor]]:
    """What it trains on."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if name in IMAGES:
        side = 32 if name in TORCHVISION else 16
        images = torch.randn(SIZE, 3, side, side, generator=generator, dtype=torch.float32)
        return [{"pixel_values": image, "labels": draw(0, CLASSES)} for image in images]
    rows = []
    for at in range(SIZE):
        ids = draw(2, WORDS, int(draw(3, 41)))
        row = {"input_ids": ids, "labels": draw(0, CLASSES)}
        if name in CAUSAL or name.startswith("bert"):
            kept = draw(0, 10, len(ids)) < (0, 3, 9)[at % 3]  # of some samples no label counts
            row["labels"] = torch.where(kept, ids if name != "bert_tokens" else ids % CLASSES, -100)
        if name in PAIRS:
            row["labels"] = draw(2, WORDS, int(draw(2, 20))) if at % 4 else torch.full((5,), -100)
        if name == "siamese":
            row["other"] = draw(2, WORDS, int(draw(3, 30)))
        rows.append(row)
    return rows


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, padded."""
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        padding = -100 if key == "labels" else 0
        is_text = key in ("input_ids", "other") or (key == "labels" and values[0].ndim)
        batch[key] = pad_sequence(values, True, padding) if is_text else torch.stack(values)
    for key, mask in (("input_ids", "attention_mask"), ("other", "other_mask")):
        if key in batch:
            batch[mask] = (batch[key] != 0).long()
    return batch


def parts(name: str, module: nn.Module, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor | float]]:
    """Of every loss its name, its sum and its weight."""
    labels, texts = batch["labels"], [batch[key] for key in ("input_ids", "attention_mask") if key in batch]
    if name in IMAGES:
        logits = module(batch["pixel_values"])
    elif name in PAIRS:
        start = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)], 1)
        logits = module(input_ids=texts[0], attention_mask=texts[1], decoder_input_ids=start)
    elif name in TRANSFORMERS:
        logits = module(input_ids=texts[0], attention_mask=texts[1])
    elif name == "two":
        odd = labels % 2 == 1
        yield "left", summed(module(*texts, "left"), labels), float(len(labels))
        yield "right", (module(*texts, "right").squeeze(1).square() * odd).sum(), odd.sum()
        return
    elif name == "siamese":
        alike = functional.cosine_similarity(module(*texts), module(batch["other"], batch["other_mask"]))
        yield "loss", (alike - (labels % 2)).square().sum(), float(len(labels))
        return
    else:
        logits = module(*texts)
    logits = getattr(logits, "logits", logits)
    if name in CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if name in ("penalty", "buffer"):
        logits, other = logits
        total = summed(logits, labels)
        if name == "penalty":
            (gradient,) = torch.autograd.grad(total, other, create_graph=True)
            other = 30 * gradient.square()
        yield "loss", total + 0.1 * other.sum(), float(len(labels))
    elif name == "weighted":
        weight = WEIGHTS.to(logits)
        yield "loss", summed(logits, labels, weight=weight), weight[labels].double().sum()
    else:
        smoothing = 0.1 if name == "smooth" else 0.0
        yield "loss", summed(logits, labels, label_smoothing=smoothing), (labels != -100).sum()


def summed(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", **options)


@dataclass
class Zoo(Model):
    """Any of them.

    Args:
        name: which.
    """

    name: str = "plain"

    @property
    def loss_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("left", "right") if self.name == "two" else ("loss",)

    def build(self) -> nn.Module:
        return make(self.name)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        for name, total, weight in parts(self.name, module, batch):
            yield Loss(total, weight=weight, name=name)

    def weigh(self, batch: Any) -> dict[str, float]:
        labels = batch["labels"]
        if self.name == "two":
            return {"left": float(len(labels)), "right": float((labels % 2 == 1).sum())}
        if self.name == "weighted":
            return {"loss": float(WEIGHTS[labels].double().sum())}
        return {"loss": float(((labels[:, 1:] if self.name in CAUSAL else labels) != -100).sum())}


@dataclass
class ZooOfTransformers(Zoo, Exportable):
    """One of transformers, kept in its own format."""

    own_format = True

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        module.save_pretrained(folder, state_dict=dict(state))


class Texts(list):
    """Samples that are cut by their lengths."""

    def __init__(self, rows: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(rows)
        if "input_ids" in rows[0]:
            self.lengths = [len(row["input_ids"]) for row in rows]


@dataclass
class ZooData(Data):
    """Its samples.

    Args:
        name: of the model.
    """

    name: str = "plain"

    def prepare(self, tokenizer: Any = None) -> None:
        self.train = Texts(samples(self.name))

    def collate(self, rows: Any) -> Any:
        return collate(rows)


MOMENTUM = Optim("sgd", lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A run; picklable, so that every rank can take part in it."""

    name: str  # of the model
    memory: Memory
    world_size: int = 1
    optim: Optim = MOMENTUM  # others hide how long a gradient is
    kind: type[Zoo] = Zoo


@dataclass(frozen=True)
class Outcome:
    """What came of a run on one rank: its exit code, its standard error, and the weights that were saved."""

    code: int
    stderr: str
    state: dict[str, Tensor]

    @property
    def errors(self) -> list[str]:
        """The lines from the first error on."""
        lines = self.stderr.splitlines()
        return lines[next((at for at, line in enumerate(lines) if "trainer: error: " in line), len(lines)) :]


def run(case: Case, folder: str) -> Outcome:
    """``trainer fit`` of ``case`` in this process, one of ``case.world_size``, into ``folder``, which is empty."""
    torch.set_num_threads(1)
    rest = {"evaluate": False, "predict": False, "recover": False}
    recipe = Recipe(
        model=case.kind(case.name),
        data=ZooData(case.name),
        optim=case.optim,
        batch_size=BATCH,
        epochs=9,
        max_steps=STEPS,
        memory=case.memory,
        checkpoint=Checkpoint(every=None),
        run=Run(dir=f"{folder}/run", devices=case.world_size, accelerator="cpu", **rest),
    )
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as stderr:
        code = 0
        try:
            fit(recipe)
        except BaseException as error:
            code = _exit_code(error)
    weights = Path(folder, "run", "model", "model.safetensors")
    return Outcome(code, stderr.getvalue(), load_file(weights) if weights.exists() else {})


@cache
def plain_run(name: str, optim: Optim, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after a plain loop over whole batches, which shares with us what samples they have.

    A weight with several names has the first of them.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    module, rows = make(name), samples(name)
    torch.set_default_dtype(before)
    places = {value.data_ptr(): key for key, value in reversed(module.state_dict().items())}
    names = [key for key, value in module.state_dict().items() if places[value.data_ptr()] == key]
    start = {name: module.state_dict()[name].clone() for name in names}
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    trained = [p for p in module.parameters() if p.requires_grad]
    momentum = {"momentum": optim.momentum} if optim.momentum else {}
    optimizer = kinds[optim.name](trained, lr=optim.lr, foreach=False, **momentum)
    a_epoch = math.ceil(SIZE / BATCH)
    for step in range(STEPS):
        chosen = batch_indices(0, step // a_epoch, step % a_epoch, SIZE, BATCH)
        batch = collate([rows[index] for index in chosen])
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        torch.stack([total / weight for _, total, weight in parts(name, module, batch)]).sum().backward()
        if optim.clip_norm:
            dense = [p.grad.to_dense() for p in trained if p.grad is not None]  # torch 2.11 clips no sparse ones
            nn.utils.clip_grads_with_norm_(trained, optim.clip_norm, nn.utils.get_total_norm(dense))
        optimizer.step()
        optimizer.zero_grad()
    return start, {name: module.state_dict()[name] for name in names}


def error(case: Case, outcome: Outcome) -> float:
    """How far the change of the weights is off, relative to the change; each must have been saved, once."""
    dtype = torch.float64 if case.memory.precision == "64-true" else torch.float32
    start, expected = plain_run(case.name, case.optim, dtype)
    found = outcome.state
    assert found.keys() == expected.keys()
    keys = [key for key in found if expected[key].is_floating_point() or expected[key].is_complex()]
    wrong = sum(float((found[key] - expected[key]).abs().square().sum()) for key in keys)
    return math.sqrt(wrong / sum(float((expected[key] - start[key]).abs().square().sum()) for key in keys))
