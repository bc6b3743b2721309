"""``hf:NAME``: a recipe made of nothing but a model's ``config.json``, to plan what training it would need.

Its samples are made up, all of the shape that is asked for; its loss is computed from the logits. Nothing of the hub
is executed, and no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from trainer.errors import RecipeError, listed, require
from trainer.models.common import classification_loss
from trainer.models.hub import MOST_TEXT, local_folder, positions
from trainer.models.lora import LoRA
from trainer.models.text import NO_TOKENIZER, TextClassifier
from trainer.planner.outline import MadeUp
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.files import parsed_object, read_regular
from trainer.values import IGNORED_LABEL, Loss, Outline

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX, CONFIG = "hf:", "config.json"
SAMPLES = 100_000  # of the training set that is made up: more than a batch
MOST_TOKENS, FEW_TOKENS = 4096, 512
"""Of a sample, where nobody says how many: at most; and for a model that takes any number."""

BATCH = 8  # the batch size of transformers' TrainingArguments
IMAGE_SIZE = 224  # that of ImageNet's classifiers, for a configuration that has none


class Kind(NamedTuple):
    """One task."""

    auto: str  # the class of transformers that makes its models
    table: str  # of the model types that have one, in transformers.models.auto.modeling_auto
    endings: tuple[str, ...]  # of the class that a configuration's ``architectures`` name


TASKS = {
    "causal-lm": Kind("AutoModelForCausalLM", "CAUSAL_LM", ("ForCausalLM", "LMHeadModel")),
    "masked-lm": Kind("AutoModelForMaskedLM", "MASKED_LM", ("ForMaskedLM",)),
    "seq2seq-lm": Kind("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", ("ForConditionalGeneration",)),
    "sequence-classification": Kind(
        "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", ("ForSequenceClassification",)
    ),
    "token-classification": Kind(
        "AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", ("ForTokenClassification",)
    ),
    "image-classification": Kind(
        "AutoModelForImageClassification", "IMAGE_CLASSIFICATION", ("ForImageClassification",)
    ),
}


@dataclass
class FromConfig(TextClassifier):
    """A model of transformers for a ``task``, with random weights."""

    task: ClassVar[str]

    def prepare(self) -> None:
        """Look whether the configuration can be used."""
        self._configuration()

    def skeleton(self) -> nn.Module:
        """The module that transformers makes for the task, without adapters."""
        return self._finished(self._from_configuration(TASKS[self.task].auto))

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Cross entropy summed over labels, of the next tokens for ``causal-lm``; logits are not kept for it."""
        yield self._loss(module, batch)

    def _loss(self, module: nn.Module, batch: Any) -> Loss:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        labels = self._targets(batch).flatten()
        total = classification_loss(module(**inputs).logits.flatten(0, -2), labels).total
        return Loss(total, targets=labels)

    def weigh(self, batch: Any) -> dict[str, float]:
        """The labels that count: of a text of n tokens, ``causal-lm`` predicts n - 1."""
        return super().weigh({"labels": self._targets(batch)})

    def _targets(self, batch: Any) -> Tensor:
        """What the logits are compared with: the labels, for ``causal-lm`` each one place earlier."""
        from torch.nn.functional import pad

        labels = batch["labels"]
        return pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if self.task == "causal-lm" else labels

    def _configuration(self) -> Any:
        config = super()._configuration()
        if self.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
            end = getattr(config, "eos_token_id", None)  # decoders look for the last token that is no padding
            config.pad_token_id = end[0] if isinstance(end, list) else end
        return config


def hub_recipe(
    name: str,
    task: str | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    lora: int = 0,
    revision: str | None = None,
) -> Recipe:
    """A recipe for the model whose ``config.json`` is in the folder ``name``, or else on the hub under that name.

    The settings are usual ones: AdamW, bf16-mixed, gradients clipped at 1.

    Args:
        name: a folder, or a hub id.
        task: one of :data:`TASKS`; by default what the configuration's ``architectures`` are for.
        tokens: of every sample of text; by default as many as the model takes, but no more than ``MOST_TOKENS``.
        batch: samples of a step; 8 by default.
        lora: rank of adapters to train instead of the weights; 0 for none.
        revision: of the configuration on the hub.

    Raises:
        RecipeError: when the configuration cannot be had or used, or is none for the task or for so many tokens.
    """
    require(task is None or task in TASKS, f"--task={task!r} must be one of {', '.join(TASKS)}")
    said = f"{PREFIX}{name}"
    given, folder = _read(said, name, revision)
    notes = [] if task else [f"--task {(task := _guessed(said, given))}: what the architectures of its config.json do"]
    shape = partial(_shape, said, task, tokens)
    shape(given)  # refuses what it can before torch is imported
    model = _model(said, given, task)(str(folder), tokenizer=NO_TOKENIZER, lora=LoRA(lora))
    config = model._configuration()
    outline = shape(config.to_dict() | {"num_labels": config.num_labels}, notes)
    return Recipe(
        model=model,
        data=MadeUp(outline, notes=notes),
        optim=Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0),
        batch_size=batch or BATCH,
        memory=Memory(precision="bf16-mixed"),
    )


def _read(said: str, name: str, revision: str | None) -> tuple[dict[str, Any], Path]:
    """The settings in ``config.json``, and the folder that holds it: no weights can be left to train where they are
    quantised, and no code of the hub is executed."""
    folder = Path(local_folder(name)).expanduser()
    if not folder.is_dir():
        require(not name.startswith((".", "/", "~", "file:")), f"{said}: there is no folder {folder}")
        folder = _fetched(said, name, revision)
    try:
        config = parsed_object(read_regular(folder / CONFIG, MOST_TEXT), MOST_TEXT)
    except OSError as error:
        raise RecipeError(f"{said}: {folder / CONFIG} cannot be read: {error.strerror}") from error
    if config is None or not isinstance(config.get("model_type"), str):
        raise RecipeError(f"{said}: {folder / CONFIG} names no model_type: give one as transformers writes it")
    quantised = f"{said}: its {CONFIG} has a quantization_config, and quantised weights cannot be trained"
    require(not config.get("quantization_config"), f"{quantised}: name the model that they were made of")
    return config, folder


def _fetched(said: str, name: str, revision: str | None) -> Path:
    """The folder of the hub's cache that holds the configuration, fetched if it is not there."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG, revision=revision)).parent
    except Exception as error:  # of the network, of the name, of the hub: gated, private, none of that name
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecipeError(
            f"{said}: there is no folder of that name, and its {CONFIG} could not be had from the hub ({why}): save that "
            f"one file in a folder and plan {PREFIX}./FOLDER; a gated model needs HF_TOKEN, and with HF_HUB_OFFLINE=1 "
            "the hub is not asked"
        ) from error


def _guessed(said: str, config: Mapping[str, Any]) -> str:
    """The task that a configuration's ``architectures`` are for."""
    names = [str(name) for name in config.get("architectures") or []]
    for task, kind in TASKS.items():
        if any(name.endswith(kind.endings) for name in names):
            return task
    found = f"the architectures of its {CONFIG}, {listed(names) or 'of which it names none'}, say no task"
    raise RecipeError(f"{said}: {found}: give --task, one of {', '.join(TASKS)}")


def _model(said: str, config: Mapping[str, Any], task: str) -> type[FromConfig]:
    """The class of the model, named as that of transformers; refuses a model that has none for the task."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        fix = f"transformers {transformers.__version__} has no model_type {kind!r}: look for a newer version"
        if config.get("auto_map"):
            fix = "it needs Python code that comes with it (auto_map), and no such remote code is executed"
        raise RecipeError(f"{said}: {fix}; trainer plan --script plans a script that runs it")
    tables = {one: getattr(modeling_auto, f"MODEL_FOR_{TASKS[one].table}_MAPPING_NAMES") for one in TASKS}
    able = [one for one, table in tables.items() if kind in table]
    instead = f"--task {' or '.join(able)}" if able else f"a model for {' or '.join(TASKS)}"
    require(task in able, f"{said}: transformers has no model of type {kind} for --task {task}: give {instead}")
    found = tables[task][kind]
    return type(found if isinstance(found, str) else found[0], (FromConfig,), {"task": task})


def _shape(
    said: str, task: str, tokens: int | None, config: Mapping[str, Any], notes: list[str] | None = None
) -> Outline:
    """The samples to plan with: of so many ``tokens``, or of the image size of ``config``, which may lack defaults.

    ``notes`` get what was decided here.
    """
    notes = [] if notes is None else notes
    classes = None if task.endswith("-lm") else config.get("num_labels")
    label: tuple[str, tuple[int, ...]] = ("int64", ())
    if task == "image-classification":
        require(tokens is None, f"{said}: --tokens is for texts, and --task {task} takes images")
        size = config.get("image_size")
        if size is None:
            size = IMAGE_SIZE
            notes.append(f"its {CONFIG} names no image_size: planned with {size}")
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (config.get("num_channels") or 3, height, width)
        return Outline({"pixel_values": ("float32", shape), "labels": label}, SAMPLES, num_classes=classes)
    both = f"{said} is an encoder-decoder, of which --task {task} would take the decoder alone: give --task seq2seq-lm"
    require(task != "causal-lm" or not config.get("is_encoder_decoder"), both)
    most = positions(config.get("text_config") or config)
    if tokens is None:
        tokens = min(most or FEW_TOKENS, MOST_TOKENS)
        why = f"the model takes {most:,}" if most else "the model takes any number"
        notes.append(f"--tokens {tokens}: {why}")
    long = f"--tokens={tokens} is more than the {most} tokens that {said} takes: lower it"
    require(most is None or tokens <= most, long)
    require(tokens > 1 or task != "causal-lm", "--tokens=1 leaves no next token to predict: give 2 or more")
    # Texts of one length need no mask; those of classifiers and taggers are padded, as a rule.
    names = {"causal-lm": (), "seq2seq-lm": ("attention_mask", "decoder_input_ids")}.get(task, ("attention_mask",))
    tensors = dict.fromkeys(("input_ids", *names), ("int64", (tokens,)))
    whole = label if task == "sequence-classification" else ("int64", (tokens,))
    return Outline({**tensors, "labels": whole}, SAMPLES, num_classes=classes, length=tokens)


def trained_by(name: str, recipe: Recipe) -> tuple[str, dict[str, str]] | None:
    """The packaged recipe that trains the model of a :func:`hub_recipe`, and the flags for that; ``None`` if none does.

    The recipe has the optimizer and the precision of :func:`hub_recipe`.
    """
    if recipe.model.task != "sequence-classification":  # type: ignore[attr-defined]
        return None
    folder = Path(local_folder(name)).expanduser()
    weights = name if not folder.is_dir() or any(folder.glob("*.safetensors")) else "null"
    flags = {"model.name": name, "model.weights": weights, "data.max_length": str(recipe.data.train.lengths[0])}
    if recipe.model.lora.rank:  # type: ignore[attr-defined]
        flags["model.lora.rank"] = str(recipe.model.lora.rank)  # type: ignore[attr-defined]
    return "distilbert_imdb", {**flags, "batch_size": str(recipe.batch_size)}
