"""How far the gradient of one accumulated optimizer step is from that of the whole batch.

The reference is one backward of the mean loss over the whole batch, in one process, in plain PyTorch. Every contender
then takes one step of SGD (learning rate 1, no momentum, no clipping) on the same samples with the same weights, used
as its documentation says; its gradient is the weights before minus the weights after. All of it is in float64, so that
what differs is the arithmetic of accumulation and not rounding. Dropout is off and the data is not shuffled.
"""

from __future__ import annotations

import os

# Before torch loads: the models are tiny, and two ranks with a thread pool each would only get in each other's way.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import Record, table
from contenders import (
    Batch,
    ExactTrainer,
    Job,
    Lit,
    ManualLit,
    accelerate,
    accelerate_by_hand,
    keras_fit,
    lightning_trainer,
    quiet,
    sft_rows,
    transformers_trainer,
    trl_sft,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Optimizer
from transformers import (
    DataCollatorWithFlattening,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from trainer.contract import Data, Model, Packable, capability
from trainer.data.loader import Loader
from trainer.engine.cut import cut_at
from trainer.engine.loop import Engine
from trainer.engine.step import Stepper
from trainer.engine.window import Windows
from trainer.integrations.lightning import ExactAccumulation
from trainer.integrations.transformers import ExactGradients
from trainer.launching.start import launch
from trainer.launching.world import detect_world
from trainer.memory.initialize import build_module
from trainer.memory.plan import decide_plan
from trainer.memory.stack import apply_stack, build_optimizer_and_sync, full_state_dict
from trainer.models import CausalLM
from trainer.recipe import Memory, Optim, Recipe, Run, Strategy
from trainer.values import IGNORED_LABEL, Loss

VOCABULARY = 97
CLASSES = 5
DTYPE = torch.float64
PACK = 32
"""Tokens of a pack, where a contender packs the whole dataset."""
PEERS = ("keras", "trl")
"""Contenders that not everybody has."""
Sample = dict[str, Tensor]
WEIGHTS = torch.tensor([0.2, 1.0, 5.0, 0.5, 2.0], dtype=DTYPE)
"""Of the classes, where they are weighted."""


# The cases


class BagOfWords(nn.Module):
    """A classifier of a person's own, with the mean loss that people write."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(-1).to(DTYPE)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


class WeightedBag(BagOfWords):
    """The same with class weights, as torch's cross entropy takes them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(input_ids, attention_mask)["logits"]
        return {"logits": logits} | ({} if labels is None else {"loss": cross_entropy(logits, labels, WEIGHTS)})


def distilbert(cls: type) -> nn.Module:
    """A DistilBERT of two layers with random weights."""
    sizes = {"vocab_size": VOCABULARY, "n_layers": 2, "n_heads": 2, "dim": 16, "hidden_dim": 32}
    off = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    return cls(DistilBertConfig(max_position_embeddings=64, num_labels=CLASSES, **sizes, **off))


LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"max_position_embeddings": 64},
    "gpt2": {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
"""Language models by their type."""


def llama() -> nn.Module:
    """A Llama of two layers with random weights."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **LANGUAGE["llama"]))


def gpt2() -> nn.Module:
    """A GPT-2 of two layers with random weights."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **LANGUAGE["gpt2"]))


@dataclass(frozen=True)
class Case:
    """One optimizer step, and how it is cut.

    Args:
        name: for the table.
        build: makes the module; its forward returns ``loss`` and ``logits``.
        samples: in the batch; all there are in the dataset.
        micro_batch_size: samples of a micro-batch.
        accumulate: micro-batches a step on each rank.
        ranks: processes.
        labels: one class a ``sample``, one a ``token`` (with -100 for some), or the ``next`` token (likewise).
        packed: the texts of a micro-batch lie one after another in a row, without padding.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: int
    micro_batch_size: int
    accumulate: int
    ranks: int = 1
    labels: str = "sample"
    packed: bool = False

    def module(self) -> nn.Module:
        """The module with the weights that everybody starts from."""
        torch.manual_seed(1)
        return self.build().to(DTYPE).train()

    def dataset(self) -> list[Sample]:
        """Token sequences of 3 to 20 tokens; where tokens have labels, a tenth to nine tenths of them are ignored."""
        generator = torch.Generator().manual_seed(2)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        samples = []
        for _ in range(self.samples):
            tokens = draw(1, VOCABULARY, int(draw(3, 21)))
            if self.labels == "sample":
                labels = draw(0, CLASSES)
            else:
                ignored = torch.rand(len(tokens), generator=generator) < draw(1, 10) / 10
                ignored[-1] = False  # a sample without any label would make a mean of nothing, NaN for all but us
                labels = tokens if self.labels == "next" else draw(0, CLASSES, len(tokens))
                labels = labels.masked_fill(ignored, IGNORED_LABEL)
            samples.append({"input_ids": tokens, "labels": labels})
        return samples


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad to the longest."""
    tokens = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(sequence) for sequence in tokens], batch_first=True),
        "labels": torch.stack(labels) if labels[0].ndim == 0 else pad_sequence(labels, True, IGNORED_LABEL),
    }


sequence_classifier = partial(distilbert, DistilBertForSequenceClassification)
token_classifier = partial(distilbert, DistilBertForTokenClassification)

CASES = (
    Case("even: 8 samples as 2+2+2+2", BagOfWords, 8, 2, 4),
    Case("ragged: 13 samples as 4+4+4+1", BagOfWords, 13, 4, 4),
    Case("last window: 1 of 4 micro-batches", BagOfWords, 2, 2, 4),
    Case("class weights: 13 samples as 4+4+4+1", WeightedBag, 13, 4, 4),
    Case("HF sequence classifier, 8 micro-batches", sequence_classifier, 16, 2, 8),
    Case("HF token classifier, labels of −100", token_classifier, 8, 2, 4, labels="token"),
    Case("HF causal LM (Llama), labels of −100", llama, 8, 2, 4, labels="next"),
    Case("HF causal LM (GPT-2), labels of −100", gpt2, 8, 2, 4, labels="next"),
    Case("2 ranks, even: 16 samples", BagOfWords, 16, 2, 4, ranks=2),
    Case("2 ranks, ragged: 13 samples", BagOfWords, 13, 2, 4, ranks=2),
    Case("2 ranks, class weights: 13 samples", WeightedBag, 13, 2, 4, ranks=2),
    Case("2 ranks, HF sequence classifier, 8 micro-batches", sequence_classifier, 32, 2, 8, ranks=2),
    Case("2 ranks, HF token classifier, labels of −100", token_classifier, 16, 2, 4, ranks=2, labels="token"),
    *(
        Case(f"{start}{name}{', packed' * packed}", build, samples, 2, accumulate, ranks, "next", packed)
        for start, samples, accumulate, ranks in (
            ("ragged: 11 texts as 2+2+2+2+2+1, ", 11, 6, 1),
            ("2 ranks, even: 16 texts, ", 16, 4, 2),
            ("2 ranks, ragged: 13 texts, ", 13, 4, 2),
        )
        for name, build in (("Llama", llama), ("GPT-2", gpt2))
        for packed in (False, True)
    ),
)


def targets(case: Case, labels: Tensor) -> Tensor:
    """The labels that weigh: to a causal language model, the first token of a text is none."""
    return labels[:, 1:] if case.labels == "next" else labels


def class_weights(case: Case) -> Tensor | None:
    """What the classes weigh, where they differ."""
    return WEIGHTS if case.build is WeightedBag else None


def items(case: Case, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, shape ``(items, classes)``, and their labels, shape ``(items,)``."""
    if case.labels == "next":
        logits = logits[:, :-1]
    return logits.flatten(0, -2), targets(case, labels).flatten()


def reference(case: Case) -> Tensor:
    """The gradient of the mean loss over the whole batch."""
    module = case.module()
    batch = collate(case.dataset())
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    loss = cross_entropy(*items(case, logits, batch["labels"]), class_weights(case), ignore_index=IGNORED_LABEL)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))


# The contenders: each trains a module for one step


def sgd(module: nn.Module) -> Optimizer:
    """What every contender steps with."""
    return SGD(module.parameters(), lr=1.0)


def job(case: Case, module: nn.Module) -> Job:
    """A case for those in ``contenders.py``; packed as transformers packs."""
    joined = DataCollatorWithFlattening() if case.packed else collate
    return Job(module, case.dataset(), joined, case.micro_batch_size, case.accumulate, sgd, case.ranks)


def loss_sum(case: Case, outputs: Any, labels: Tensor) -> Tensor:
    """What the remedies add up."""
    logits, labels = items(case, outputs["logits"], labels)
    return cross_entropy(logits, labels, class_weights(case), ignore_index=IGNORED_LABEL, reduction="sum")


def count(case: Case, labels: Tensor) -> Tensor:
    """How many losses that is the sum of, or the sum of the weights of their classes."""
    labels, weights = targets(case, labels), class_weights(case)
    return (labels != IGNORED_LABEL).sum() if weights is None else weights[labels].sum()


def transformers_remedy(case: Case, module: nn.Module, even_batches: bool = True) -> None:
    """transformers' Trainer with a ``compute_loss_func`` that divides by ``num_items_in_batch``, as documented."""

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        return loss_sum(case, outputs, labels) / num_items_in_batch

    transformers_trainer(replace(job(case, module), even_batches=even_batches), compute_loss_func=compute_loss)


def accelerate_remedy(case: Case, module: nn.Module, even_batches: bool = True) -> None:
    """Accelerate with items counted ahead, gathered and divided by, as its page on gradient accumulation says.

    Without a cache of keys, as transformers' Trainer has it: with one, transformers makes no mask for packed texts.
    """
    if case.packed:
        module.config.use_cache = False  # type: ignore[union-attr]
    own = replace(job(case, module), even_batches=even_batches)
    accelerate_by_hand(own, partial(loss_sum, case), partial(count, case))


def by(train: Callable[..., None], **settings: Any) -> Callable[[Case, nn.Module], None]:
    """A contender that needs only the job."""
    return lambda case, module: train(job(case, module), **settings)


def trl(case: Case, module: nn.Module, mixins: tuple[type, ...] = ()) -> None:
    """TRL's SFTTrainer."""
    trl_sft(job(case, module), padding_free=case.packed, mixins=mixins)


def drop_in(case: Case, module: nn.Module) -> None:
    """transformers' Trainer with our drop-in."""
    transformers_trainer(job(case, module), ExactTrainer, class_weights=class_weights(case))


def lightning_drop_in(case: Case, module: nn.Module) -> None:
    """Lightning's Trainer with our drop-in; ranks have equal numbers of micro-batches, and no sample is repeated."""
    if case.labels == "next":
        module.config.use_cache = False  # type: ignore[union-attr]

    class ExactLit(ExactAccumulation, Lit):
        def training_step(self, batch: Batch) -> Any:
            labels = batch["labels"]
            return self.share(loss_sum(case, self.module(**batch), labels), count(case, labels))

    own, share = job(case, module), range(case.samples)[int(os.environ.get("RANK", "0")) :: case.ranks]
    batches = -(-case.samples // (case.ranks * case.micro_batch_size))  # on each rank, of nearly one size
    lightning_trainer(own, ExactLit, [share[number::batches] for number in range(batches)])


def trl_packing(case: Case, module: nn.Module, mixins: tuple[type, ...] = ()) -> None:
    """TRL's SFTTrainer with ``packing``: as many packs a step as there are."""
    from datasets import Dataset
    from trl import pack_dataset

    plain = job(case, module)
    packs = len(pack_dataset(Dataset.from_list(sft_rows(plain)), PACK))
    trl_sft(replace(plain, micro_batch_size=1, accumulate=-(-packs // case.ranks)), pack=PACK, mixins=mixins)


@dataclass
class CaseModel(Model):
    """A case's module for ours: the loss as a sum with a weight."""

    case: Case

    @property
    def blocks(self) -> Sequence[type]:  # type: ignore[override]
        return (nn.Linear,) if self.case.build in (BagOfWords, WeightedBag) else ()

    def build(self) -> nn.Module:
        return self.case.module()

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
        total = loss_sum(self.case, {"logits": logits}, batch["labels"])
        yield Loss(total, count(self.case, batch["labels"]))

    def weigh(self, batch: Any) -> dict[str, float]:
        return {"loss": float(count(self.case, batch["labels"]))}


@dataclass
class CaseData(Data):
    """A case's samples for ours."""

    train: Any = field(default_factory=list)

    def collate(self, samples: Sequence[Any]) -> Batch:
        return collate(samples)


def ours(case: Case, module: nn.Module, strategy: Strategy = "auto") -> None:
    """The engine, put together as ``trainer.fit`` does."""
    model: Any = CaseModel(case)
    if case.labels == "next":
        config = LANGUAGE[case.build.__name__] | {"vocab_size": VOCABULARY}
        model = CausalLM(case.build.__name__, tokenizer="none", config=config, padding_free=case.packed)
    recipe = Recipe(
        model=model,
        data=CaseData(case.dataset()),
        optim=Optim("sgd", lr=1.0),
        batch_size=case.micro_batch_size * case.accumulate * case.ranks,
        memory=Memory(micro_batch_size=case.micro_batch_size, precision="64-true", strategy=strategy),
        run=Run(accelerator="cpu"),
    )
    world = detect_world(recipe)
    plan = decide_plan(recipe, world.world_size)
    fabric = launch(plan, world)
    own = build_module(fabric, recipe.model, recipe.seed, plan)
    own.load_state_dict(module.state_dict())  # built in float64, it drew other random numbers
    stack = apply_stack(fabric, recipe.model, own, plan)
    optimizer, sync = build_optimizer_and_sync(fabric, recipe.model, stack, recipe.optim, plan)
    stepper = Stepper(fabric, recipe.model, stack.wrapped, optimizer, sync=sync)
    windows = Windows(
        size=case.samples,
        cut_at=lambda epoch: cut_at(recipe, fabric.world_size, epoch),
        fetch=Loader(recipe.data.train, recipe.data.collate),
        weigh=recipe.model.weigh,
        seed=recipe.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        reduce=_sum_over_ranks,
        lengths=[len(sample["input_ids"]) for sample in recipe.data.train],
        packs=capability(recipe.model, Packable).packs(),
    )
    Engine(stepper, windows).fit(epochs=1)
    module.load_state_dict(full_state_dict(stack) or module.state_dict())  # under FSDP the first rank has it


def _sum_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total.tolist()


def everywhere(_: Case) -> bool:
    return True


def on_ranks(case: Case) -> bool:
    return case.ranks > 1


def left_over(case: Case) -> bool:
    """Whether some ranks have a micro-batch less than others."""
    return -(-case.samples // case.micro_batch_size) % case.ranks > 0 or case.samples % case.micro_batch_size > 0


def in_trl(case: Case) -> bool:
    """TRL's SFTTrainer is for language models."""
    return case.labels == "next" and find_spec("trl") is not None


def in_keras(case: Case) -> bool:
    """Keras computes the loss itself, from logits and one label a sample; on torch it has no data parallelism."""
    return case.build is BagOfWords and case.ranks == 1 and find_spec("keras") is not None


CONTENDERS: dict[str, tuple[Callable[[Case, nn.Module], None], Callable[[Case], bool]]] = {
    "transformers Trainer": (by(transformers_trainer), everywhere),
    "transformers Trainer, compute_loss_func": (transformers_remedy, everywhere),
    "Accelerate": (by(accelerate), everywhere),
    "Accelerate, items counted by hand": (accelerate_remedy, everywhere),
    "transformers Trainer, compute_loss_func, even_batches=False": (
        partial(transformers_remedy, even_batches=False),
        lambda case: on_ranks(case) and left_over(case),
    ),
    "Accelerate, items counted by hand, even_batches=False": (
        partial(accelerate_remedy, even_batches=False),
        lambda case: on_ranks(case) and left_over(case),
    ),
    "Lightning Trainer": (by(lightning_trainer), everywhere),
    "Lightning Trainer, manual optimization": (by(lightning_trainer, lit=ManualLit), everywhere),
    "Lightning Trainer, drop-in": (lightning_drop_in, everywhere),
    "TRL SFTTrainer": (trl, in_trl),
    "TRL SFTTrainer, packing": (trl_packing, lambda case: in_trl(case) and case.packed),
    "transformers Trainer, drop-in": (drop_in, everywhere),
    "TRL SFTTrainer, drop-in": (partial(trl, mixins=(ExactGradients,)), in_trl),
    "TRL SFTTrainer, packing, drop-in": (
        partial(trl_packing, mixins=(ExactGradients,)),
        lambda case: in_trl(case) and case.packed,
    ),
    "Keras": (by(keras_fit), in_keras),
    "ours": (ours, everywhere),
    "ours, FSDP": (partial(ours, strategy="fsdp"), on_ranks),
}
"""What it does, and in which cases."""


# Measuring


@dataclass(frozen=True)
class Result:
    """What came out of a step.

    Args:
        relative_error: ‖g − g_ref‖ / ‖g_ref‖.
        length_ratio: ‖g‖ / ‖g_ref‖.
        failure: the exception, where there was no step.
    """

    case: str
    contender: str
    relative_error: float | None = None
    length_ratio: float | None = None
    failure: str | None = None


def measure(contender: str, case: Case) -> Result:
    """Let a contender take one step, and compare its gradient with the reference."""
    module = case.module()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    try:
        CONTENDERS[contender][0](case, module)
    except Exception as error:
        return Result(case.name, contender, failure=f"{type(error).__name__}: {error}")
    gradient = before - nn.utils.parameters_to_vector(module.parameters()).detach()
    expected = reference(case)
    return Result(
        case.name,
        contender,
        float((gradient - expected).norm() / expected.norm()),
        float(gradient.norm() / expected.norm()),
    )


def measure_all(ranks: int, known: Collection[tuple[str, str]]) -> Iterator[Result]:
    """All cases of that many ranks, contender by contender, but those that are ``known``."""
    for case in CASES:
        if case.ranks == ranks:
            for contender, (_, is_meant) in CONTENDERS.items():
                if is_meant(case) and (case.name, contender) not in known:
                    yield measure(contender, case)


def report(results: Sequence[Result]) -> str:
    """The table."""
    rows = [(result.case, result.contender, *_figures(result)) for result in results]
    return table(("case", "contender", "relative error", "length ratio"), rows)


def _figures(result: Result) -> tuple[str, str]:
    if result.relative_error is None or result.length_ratio is None:
        return "failed", "–"
    error = f"{result.relative_error:.1e}" if result.relative_error < 1e-3 else f"{result.relative_error:.3f}"
    return error, f"{result.length_ratio:.3f}"


def run_ranks(ranks: int, *arguments: str) -> list[Result]:
    """Measure the cases of several ranks in a torchrun of this file."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "results.json"
        # --standalone takes a free port; the ranks' own output would only be the frameworks' banners
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run(
            [sys.executable, *command, "--worker", str(found), *arguments],
            env=environment,
            check=False,
            timeout=1200,
            capture_output=True,
            text=True,
        )
        if not found.exists():
            raise RuntimeError(f"the ranks ended with {ended.returncode} and no results:\n{ended.stderr[-4000:]}")
        return [Result(**result) for result in json.loads(found.read_text())]


def worker(path: Path, known: Collection[tuple[str, str]]) -> None:
    """One rank: measure, let the first write, and leave."""
    torch.distributed.init_process_group("gloo")
    results = [asdict(result) for result in measure_all(torch.distributed.get_world_size(), known)]
    if torch.distributed.get_rank() == 0:
        path.write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort at random while the interpreter is taken down


def begun(add: bool) -> tuple[Record, list[Result]]:
    """The file of results, and of the rows that it has those that stay."""
    record = Record("correctness", {"dtype": str(DTYPE).removeprefix("torch.")})
    found = {name: version(name) if find_spec(name) else "not installed: its rows are missing" for name in PEERS}
    record.content["versions"] |= found
    if not add:
        return record, []
    before = json.loads(record.path.read_text())
    now = {key: record.content[key] for key in ("date", "command", "commit", "machine", "versions")}
    record.content = before | {"added": [*before.get("added", []), now]}
    return record, [Result(**row) for row in before["results"]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="store_true", help="measure only the rows that the file of results lacks")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    record, results = begun(arguments.add)
    known = {(result.case, result.contender) for result in results}
    if arguments.worker:
        worker(arguments.worker, known)

    def keep(found: Iterable[Result]) -> None:
        for result in found:
            results.append(result)
            if arguments.add:
                record.content["added"][-1].setdefault("rows", []).append(f"{result.case}: {result.contender}")
            record.write(results=[asdict(result) for result in results])

    keep(measure_all(1, known))
    keep(run_ranks(2, *["--add"] * arguments.add))
    record.write(complete=True)
    print(report(results))


if __name__ == "__main__":
    main()
