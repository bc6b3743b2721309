"""Small training problems whose answer a plain PyTorch loop gives, and our engine's answer to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from tempfile import mkdtemp
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, huber_loss, l1_loss, mse_loss
from torch.utils.data import default_collate

from helpers.language import FAMILIES, language_model, language_samples, textbook_of_module
from trainer.contract import Model
from trainer.engine.cut import decide_cut
from trainer.engine.order import batch_indices
from trainer.engine.step import Stepper, StepResult
from trainer.engine.window import Windows
from trainer.memory.precision import precision_plugin
from trainer.models import MLP, BigBird, ImageClassifier, Objective, TextClassifier, VisionTransformer
from trainer.models.base import classification_loss
from trainer.recipe import Memory
from trainer.values import Loss

CLASSES = 5
VOCABULARY = 120
LR = 0.1
CLASSIFIERS = ("distilbert", "bert", "roberta", "bigbird")  # of texts
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
"""Of small transformers, as most configurations of that library call them."""
SHORT = {"max_position_embeddings": 64}
TEXTS: dict[str, tuple[type[TextClassifier], str, dict[str, Any]]] = {
    "distilbert": (TextClassifier, "distilbert", {"n_layers": 2, "dim": 16, "hidden_dim": 32, "n_heads": 2} | SHORT),
    "bert": (TextClassifier, "bert", SIZES | {"hidden_act": "silu"}),
    "roberta": (TextClassifier, "roberta", SIZES | {"hidden_act": "silu"}),
    "modernbert": (TextClassifier, "modernbert", SIZES | SHORT | {"num_hidden_layers": 4, "local_attention": 8}),
    "bigbird": (BigBird, "big_bird", SIZES | SHORT),
}
"""Classifiers of texts: their class, type and configuration."""
_DEIT = SIZES | {"patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TIMM = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 24}
OF_IMAGES: dict[str, dict[str, Any]] = {"deit": _DEIT, "timm/vit_tiny_patch16_224": {"model_args": _TIMM}}
"""Classifiers of images, of transformers and timm, and their configuration."""
WEIGHTS = [0.5, 2.0, 1.1, 0.25, 3.7]
OBJECTIVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "weighted": ("vit", "single_label", {"class_weights": WEIGHTS}),
    "smoothed": ("distilbert", "single_label", {"class_weights": WEIGHTS, "label_smoothing": 0.1}),
    "focal": ("mlp", "single_label", {"class_weights": WEIGHTS, "focal_gamma": 0.5}),
    "labels": ("distilbert", "multi_label", {"class_weights": WEIGHTS}),
    "smoothed labels": ("mlp", "multi_label", {"class_weights": WEIGHTS, "label_smoothing": 0.1}),
    "focal labels": ("vit", "multi_label", {"class_weights": WEIGHTS, "focal_gamma": 2.0}),
    "numbers": ("distilbert", "regression", {}),
    "mae": ("mlp", "regression", {"distance": "mae"}),
    "huber": ("vit", "regression", {"distance": "huber", "huber_delta": 0.3}),
    "tokens": ("distilbert", "token", {}),
    "weighted tokens": ("distilbert", "token", {"class_weights": WEIGHTS, "label_smoothing": 0.1}),
}
"""Models with another task or loss: that model, the task, and the loss."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, for three SGD steps; picklable, so that every rank can set it up."""

    name: str  # vit, mlp, one of CLASSIFIERS, OBJECTIVES or FAMILIES, tagger, two_losses, unused, branch or undeclared
    size: int  # training samples
    batch_size: int  # samples per step over all ranks
    micro_batch_size: int  # most samples of a micro-batch
    precision: str = "64-true"
    micro_batch_tokens: int | None = None
    by_length: bool = True
    clip_norm: float | None = None
    seed: int = 0
    steps: int = 3


@lru_cache(maxsize=1)
def tokenizer_folder() -> str:
    """A word-level tokenizer of ``VOCABULARY`` words, saved."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    folder = mkdtemp(prefix="tokenizer-")
    fast.save_pretrained(folder)
    return folder


def make_model(name: str) -> Model:
    """A small model without dropout."""
    if name in OBJECTIVES:
        base, task, loss = OBJECTIVES[name]
        return dataclasses.replace(make_model(base), task=task, loss=Objective(**loss))  # type: ignore[type-var]
    if name in FAMILIES:
        return language_model(name)
    if name == "vit":
        sizes = {"image_size": 8, "patch_size": 4, "layers": 2, "heads": 2, "width": 16, "mlp_width": 32}
        return VisionTransformer("custom", num_classes=CLASSES, **sizes)
    if name in OF_IMAGES:
        return ImageClassifier(name, num_classes=CLASSES, image_size=8, config=OF_IMAGES[name])
    if name == "mlp":
        return MLP([16, 16], image_size=4, channels=3, num_classes=CLASSES)
    if name in TEXTS:
        kind, model_type, config = TEXTS[name]
        return kind(model_type, tokenizer=tokenizer_folder(), config=config, num_classes=CLASSES, dropout=0.0)
    own: dict[str, type[Model]] = {"tagger": Tagger, "two_losses": TwoLosses, "unused": OneHead}
    own |= {"branch": Branch, "undeclared": UndeclaredBranch}
    return own[name]()


@dataclasses.dataclass
class Tagger(Model):
    """A label per token, some of them -100: the weight of a sample is its number of labels."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class TwoHeads(nn.Module):
    """Two heads on one trunk, each reached by one of two losses only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(48, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, pixels: Tensor, head: str) -> Tensor:
        return getattr(self, head)(self.trunk(pixels.flatten(1)).tanh())


@dataclasses.dataclass
class TwoLosses(Model):
    """Two losses with different weights: every sample counts for the first, odd labels for the second."""

    loss_names = ("left", "right")

    def build(self) -> nn.Module:
        return TwoHeads()

    def weigh(self, batch: Any) -> dict[str, float]:
        return {"left": float(len(batch["labels"])), "right": float((batch["labels"] % 2 == 1).sum())}

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        odd = batch["labels"] % 2 == 1
        left = classification_loss(module(batch["pixel_values"], "left"), batch["labels"])
        yield dataclasses.replace(left, name="left")
        squares = module(batch["pixel_values"], "right").square().squeeze(1)
        yield Loss((squares * odd).sum(), odd.sum(), name="right")


@dataclasses.dataclass
class OneHead(Model):
    """One loss, which leaves two of the module's parts without a gradient."""

    def build(self) -> nn.Module:
        return TwoHeads()

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["pixel_values"], "left"), batch["labels"])


@dataclasses.dataclass
class Branch(OneHead):
    """The second head is reached by the micro-batches that have an odd label."""

    conditional = True

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        odd = batch["labels"] % 2 == 1
        (loss,) = super().losses(module, batch)
        squares = module(batch["pixel_values"][odd], "right").square().sum() if odd.any() else 0.0
        yield dataclasses.replace(loss, total=loss.total + squares)


class BranchOnly(nn.Module):
    """Two linear maps of the pixels, of which a batch takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(48, CLASSES), nn.Linear(48, CLASSES)

    def forward(self, pixels: Tensor, both: bool) -> Tensor:
        pixels = pixels.flatten(1)
        return self.always(pixels) + (self.sometimes(pixels) if both else 0.0)


@dataclasses.dataclass
class UndeclaredBranch(Model):
    """Takes both maps in the first micro-batches and one later on, without saying so."""

    def __post_init__(self) -> None:
        self.seen = 0

    def build(self) -> nn.Module:
        return BranchOnly()

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        self.seen += module.training  # not what the first step compares beside it
        yield classification_loss(module(batch["pixel_values"], self.seen < 3), batch["labels"])


def make_samples(problem: Problem) -> list[dict[str, Tensor]]:
    """Random samples: images, or texts of 3 to 40 tokens."""
    if problem.name in FAMILIES:
        return language_samples(problem.size, problem.seed)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    kind, task, _ = OBJECTIVES.get(problem.name, (problem.name, "", {}))
    labels = torch.randint(CLASSES, (problem.size,), generator=generator)
    if task == "multi_label":
        labels = torch.randint(2, (problem.size, CLASSES), generator=generator).float()
    elif task == "regression":
        labels = 3 * torch.randn(problem.size, CLASSES, generator=generator) - 100  # which is ignored elsewhere
        labels[0] = -100.0
    if kind not in (*CLASSIFIERS, "tagger"):
        side = 8 if kind in ("vit", *OF_IMAGES) else 4
        images = torch.randn(problem.size, 3, side, side, generator=generator)
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    lengths = torch.randint(3, 41, (problem.size,), generator=generator).tolist()
    texts = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
    if "token" in (task, kind.replace("tagger", "token")):
        tags = [torch.where(text % 3 == 0, -100, text % CLASSES) for text in texts]
        return [{"input_ids": text, "labels": tag} for text, tag in zip(texts, tags, strict=True)]
    return [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack images; pad texts (and labels of tokens, with -100) to the longest."""
    if "input_ids" not in samples[0]:
        return default_collate(list(samples))
    ids = [sample["input_ids"] for sample in samples]
    batch = {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}
    labels = [sample["labels"] for sample in samples]
    if labels[0].ndim and not labels[0].is_floating_point():
        batch["labels"] = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    else:
        batch["labels"] = torch.stack(labels)
    batch["attention_mask"] = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    return batch


def plain_run(problem: Problem) -> dict[str, Any]:
    """The reference: plain PyTorch, one process, whole batches, the loss as a textbook writes it."""
    dtype = {"64-true": torch.float64, "32-true": torch.float32}[problem.precision]
    samples, module = make_samples(problem), initial_module(problem)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    run: dict[str, Any] = {"before": flat(module), "losses": [], "norms": []}
    for step in range(problem.steps):
        batch = collate([samples[index] for index in plain_indices(problem, step)])
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        loss = textbook_loss(problem.name, module, batch)
        loss.backward()
        run["norms"].append(nn.utils.clip_grad_norm_(module.parameters(), problem.clip_norm or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        run["losses"].append(loss.item())
    return run | {"after": flat(module)}


def plain_indices(problem: Problem, step: int) -> list[int]:
    """The samples of a step, counted over epochs."""
    per_epoch = -(-problem.size // problem.batch_size)
    epoch, step = divmod(step, per_epoch)
    return batch_indices(problem.seed, epoch, step, problem.size, problem.batch_size)


def textbook_loss(name: str, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a whole batch."""
    labels = batch["labels"]
    if name in OBJECTIVES:
        base, task, loss = OBJECTIVES[name]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = module(**inputs).logits if base in CLASSIFIERS else module(batch["pixel_values"])
        return textbook_objective(logits, labels, task, **loss)
    if name in FAMILIES:
        return textbook_of_module(module, batch)
    if name in ("vit", "mlp"):
        return cross_entropy(module(batch["pixel_values"]), labels)
    if name in OF_IMAGES:
        return cross_entropy(module(pixel_values=batch["pixel_values"]).logits, labels)
    if name == "tagger":
        return cross_entropy(module(batch["input_ids"]).flatten(0, 1), labels.flatten())
    if name in CLASSIFIERS:
        logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits, labels)
    left = cross_entropy(module(batch["pixel_values"], "left"), labels)
    odd = batch["pixel_values"][labels % 2 == 1]
    if name == "unused" or not len(odd):
        return left
    squares = module(odd, "right").square()
    return left + (squares.mean() if name == "two_losses" else squares.sum() / len(labels))


def textbook_objective(logits: Tensor, labels: Tensor, task: str, **loss: Any) -> Tensor:
    """The mean of a task over a whole batch, as torch or the paper defines it."""
    if task == "regression":
        if loss.get("distance") == "huber":
            return huber_loss(logits, labels, delta=loss["huber_delta"])
        return (l1_loss if loss.get("distance") == "mae" else mse_loss)(logits, labels)
    weights = torch.tensor(loss["class_weights"], dtype=logits.dtype) if "class_weights" in loss else None
    smoothing, gamma = loss.get("label_smoothing", 0.0), loss.get("focal_gamma", 0.0)
    if task == "multi_label":
        labels = labels * (1 - smoothing) + smoothing / 2
        each = binary_cross_entropy_with_logits(logits, labels, pos_weight=weights, reduction="none")
        right = torch.where(labels > 0.5, logits.sigmoid(), 1 - logits.sigmoid())
        return (each * (1 - right) ** gamma).mean() if gamma else each.mean()
    if gamma:
        right = logits.softmax(-1).gather(1, labels[:, None]).squeeze(1)
        return -(weights[labels] * (1 - right) ** gamma * right.log()).sum() / weights[labels].sum()
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), weights, label_smoothing=smoothing)


def initial_module(problem: Problem) -> nn.Module:
    """The module with seeded weights, in the problem's precision, in training mode."""
    torch.manual_seed(problem.seed)
    dtype = torch.float64 if problem.precision == "64-true" else torch.float32
    module = make_model(problem.name).build().to(dtype).train()
    with torch.no_grad():
        for parameter in module.parameters():  # torchvision's head starts at zero, which would hide errors behind it
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(dtype) * 0.05)
    return module


def make_fabric(precision: str, world_size: int) -> Fabric:
    """Fabric on one process, or on the ranks that this one is of."""
    one, ddp = SingleDeviceStrategy("cpu"), DDPStrategy(gradient_as_bucket_view=True)
    return launched_fabric(Memory(precision=precision), world_size, one if world_size == 1 else ddp)


def launched_fabric(memory: Memory, world_size: int, strategy: Any) -> Fabric:
    """Fabric as a run has it."""
    plugins = [precision_plugin(memory, "cpu")]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    assert fabric.world_size == world_size
    return fabric


def engine_run(
    problem: Problem,
    world_size: int = 1,
    prepare: Callable[[Stepper, Windows], Any] | None = None,
    of: tuple[Model, nn.Module] | None = None,
) -> dict[str, Any]:
    """Our engine's answer. ``prepare`` may observe or damage the parts before training; ``of`` is another model."""
    fabric = make_fabric(problem.precision, world_size)
    model, module = of or (make_model(problem.name), initial_module(problem))
    samples = make_samples(problem)
    before = flat(module)
    wrapped = fabric.setup_module(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    stepper = Stepper(fabric, model, wrapped, optimizer, clip_norm=problem.clip_norm)
    lengths = [len(sample["input_ids"]) for sample in samples] if "input_ids" in samples[0] else None
    cut = decide_cut(problem.batch_size, problem.micro_batch_size, None, world_size, problem.micro_batch_tokens)
    windows = Windows(
        size=problem.size,
        cut_at=lambda epoch: cut,
        fetch=lambda requests: (collate([samples[index] for index in request.indices]) for request in requests),
        weigh=model.weigh,
        seed=problem.seed,
        rank=fabric.global_rank,
        world_size=world_size,
        reduce=list if world_size == 1 else host_sum,
        lengths=lengths if problem.by_length else None,
    )
    observed = prepare(stepper, windows) if prepare else None
    results: list[StepResult] = []
    epoch = 0
    while len(results) < problem.steps:
        results += [stepper.step(window) for window in windows.epoch(epoch, last_step=problem.steps - len(results))]
        epoch += 1
    return {
        "before": before,
        "after": flat(module),
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.skipped for result in results],
        "observed": observed,
    }


def host_sum(values: list[float]) -> list[float]:
    """Sum over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def flat(module: nn.Module) -> Tensor:
    """All parameters in one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def errors(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the weights, of their change over the steps, of the losses and of the gradient norms."""

    def relative(of: Callable[[dict[str, Any]], Any]) -> float:
        a, b = (torch.as_tensor(of(run), dtype=torch.float64) for run in (ours, plain))
        return float((a - b).norm() / b.norm())

    return {
        "weights": relative(lambda run: run["after"]),
        "change": relative(lambda run: run["after"] - run["before"]),
        "losses": relative(lambda run: run["losses"]),
        "norms": relative(lambda run: run["norms"]),
    }
