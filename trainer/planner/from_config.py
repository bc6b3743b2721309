"""``hf:NAME``: a recipe of nothing but a model's ``config.json``, to plan with samples that are made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.data.images import MOST_PIXELS
from trainer.errors import RecipeError, listed, require
from trainer.models.causal import CausalLM
from trainer.models.common import classification_loss
from trainer.models.hub import MOST_TEXT, is_local, local_folder, positions, published, require_moderate_config
from trainer.models.lora import LoRA
from trainer.models.text import NO_TOKENIZER, TextClassifier
from trainer.planner.made_up import MadeUp
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.files import parsed_object, read_regular
from trainer.system.hub import advice, away
from trainer.values import Loss, Outline

if TYPE_CHECKING:
    from torch import nn

PREFIX, CONFIG = "hf:", "config.json"
TASKS = {
    "causal-lm": "CausalLM",
    "masked-lm": "MaskedLM",
    "seq2seq-lm": "Seq2SeqLM",
    "sequence-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "image-classification": "ImageClassification",
}
"""How transformers calls them in the names of its classes, such as ``AutoModelForCausalLM``."""

ENDINGS = {f"For{word}": task for task, word in TASKS.items()}
ENDINGS |= {"LMHeadModel": "causal-lm", "ForConditionalGeneration": "seq2seq-lm"}
SIZES = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"]
SIZES += ["max_position_embeddings"]
"""As transformers calls them in every configuration that has them, whatever its file calls them."""

SAMPLES = 100_000  # of the training set that is made up: more than a batch
MOST_TOKENS, FEW_TOKENS = 4096, 512  # where nobody says how many: at most; of a model that takes any number
BATCH = 8  # as in transformers' TrainingArguments
MAX_CHANNELS = 10_000  # of an image: far more than satellites have
IMAGE_SIZE = 224  # of a configuration that has none: ImageNet's classifiers were trained with it


@dataclass
class FromConfig(TextClassifier):
    """A model of transformers with a ``head`` for one of ``TASKS`` but ``causal-lm``, with random weights."""

    head: ClassVar[str]

    def skeleton(self) -> nn.Module:
        """The module that transformers makes for the task, without adapters."""
        return self._finished(self._from_configuration(f"AutoModelFor{TASKS[self.head]}"))

    def _is_plain(self) -> bool:
        return self.head == "sequence-classification"  # others read every token

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Cross entropy of the labels; nothing else of the logits is kept."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        targets = batch["labels"].flatten()
        yield Loss(classification_loss(module(**inputs).logits.flatten(0, -2), targets).total, targets=targets)

    def _configuration(self) -> Any:
        config = super()._configuration()
        if self.head == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
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

    The optimizer is that of ``distilbert_imdb``. No code from the hub runs, and no weights are read. Defaults: the
    ``task`` of the configuration's ``architectures``, as many ``tokens`` as the model takes up to ``MOST_TOKENS``, a
    ``batch`` of 8, precision ``auto``. ``lora`` is the rank of adapters, 0 for none; ``revision`` the hub's.

    Raises:
        RecipeError: when the configuration cannot be had or used, or is none for the task or for so many tokens.
    """
    require(task is None or task in TASKS, f"--task={task!r} must be one of {', '.join(TASKS)}")
    require((batch or 1) <= SAMPLES, f"--batch={batch} is more than the {SAMPLES:,} samples of a plan: lower it")
    said = f"{PREFIX}{name}"
    given, folder = _read(said, name, revision)
    chosen = task or _guessed(said, given)
    notes = [] if task else [f"--task is {chosen}: what its {CONFIG} is for"]
    _shape(said, chosen, tokens, given, [])  # refuses what it can before torch is imported
    model = _class(said, given, chosen)(str(folder), tokenizer=NO_TOKENIZER, lora=LoRA(lora))
    config = model._configuration()
    for name in SIZES:
        size = getattr(config.get_text_config(), name, None)
        fits = not isinstance(size, int) or size > 0
        require(fits, f"{said}: its {CONFIG} says {name} {size}: it must be at least 1")
    outline = _shape(said, chosen, tokens, config.to_dict() | {"num_labels": config.num_labels}, notes)
    return Recipe(
        model=model,
        data=MadeUp(outline, notes=notes),
        optim=Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0),
        batch_size=batch or BATCH,
        memory=Memory(precision="auto"),
    )


def _read(said: str, name: str, revision: str | None) -> tuple[dict[str, Any], Path]:
    folder = Path(local_folder(name)).expanduser()
    if not name or not is_local(str(folder)):
        require(not name.startswith((".", "/", "~", "file:")), f"{said}: there is no folder {folder}")
        from huggingface_hub import hf_hub_download

        why_not = "" if (shipped := None if revision else published(name)) else away()
        try:
            folder = shipped or Path(hf_hub_download(name, CONFIG, revision=revision)).parent
        except Exception as error:  # of the network, of the name, of the hub: gated, private, none of that name
            why = why_not or next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RecipeError(
                f"{said}: there is no such folder, and its {CONFIG} could not be had from the hub ({why}): save that "
                f"one file in a folder and plan {PREFIX}./FOLDER; a gated model needs HF_TOKEN; {advice()}"
            ) from error
    try:
        config = parsed_object(read_regular(folder / CONFIG, MOST_TEXT), MOST_TEXT) or {}
    except OSError as error:
        raise RecipeError(f"{said}: {folder / CONFIG} cannot be read: {error.strerror}") from error
    known = isinstance(config.get("model_type"), str)
    require(known, f"{said}: {folder / CONFIG} names no model_type: give one as transformers writes it")
    require_moderate_config(said, config)
    quantised = f"{said}: its {CONFIG} has a quantization_config, and quantised weights cannot be trained"
    require(not config.get("quantization_config"), f"{quantised}: name the model that they were made of")
    return config, folder


def _guessed(said: str, config: Mapping[str, Any]) -> str:
    given = config.get("architectures")
    names = list(map(str, given)) if isinstance(given, list) else [str(given)] if given else []
    for task in (task for name in names for ending, task in ENDINGS.items() if name.endswith(ending)):
        return task
    found = f"the architectures of its {CONFIG} ({listed(names) or 'none'}) say no task"
    raise RecipeError(f"{said}: {found}: give --task, one of {', '.join(TASKS)}")


def _class(said: str, config: Mapping[str, Any], task: str) -> type[FromConfig | CausalLM]:
    """The class of the model, called as that of transformers; refuses a model that has none for the task."""
    import transformers

    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        why = f"transformers {transformers.__version__} has no model_type {kind!r}: install a newer one"
        if config.get("auto_map"):
            why = "it needs Python code that comes with it (auto_map), and no such remote code is executed"
        raise RecipeError(f"{said}: {why}; trainer plan --script plans a script that runs it")
    own = transformers.CONFIG_MAPPING[kind]
    classes = {one: getattr(transformers, f"AutoModelFor{word}")._model_mapping for one, word in TASKS.items()}
    able = [one for one, known in classes.items() if own in known]
    instead = f"give --task {' or '.join(able)}" if able else f"give a model for one of {', '.join(TASKS)}"
    require(task in able, f"{said}: transformers has no model of type {kind} for --task {task}: {instead}")
    found = classes[task][own]
    name = (found[0] if isinstance(found, tuple) else found).__name__
    base = CausalLM if task == "causal-lm" else FromConfig
    made = globals()[name] = type(name, (base,), {"head": task})  # where pickle looks for it
    return made


def _shape(said: str, task: str, tokens: int | None, config: Mapping[str, Any], notes: list[str]) -> Outline:
    """The samples to plan with, of so many ``tokens`` or of the size of its images; ``notes`` on what was open."""
    classes = None if task.endswith("-lm") else config.get("num_labels")
    if task == "image-classification":
        require(tokens is None, f"{said}: --tokens is for texts, and --task {task} takes images")
        given = config.get("image_size")
        size = IMAGE_SIZE if given is None else given
        notes += [f"its {CONFIG} has no image_size: planned with {size}"] if given is None else []
        sides = list(size) if isinstance(size, list | tuple) else [size, size]
        fits = len(sides) == 2 and all(isinstance(side, int) and 0 < side <= MOST_PIXELS for side in sides)
        require(fits, f"{said}: its {CONFIG} says image_size {size!r}: give one number of pixels, or height and width")
        height, width = sides
        channels = config.get("num_channels") or 3
        fits = isinstance(channels, int) and 0 < channels <= MAX_CHANNELS
        require(fits, f"{said}: its {CONFIG} says num_channels {channels!r}: give a number from 1 to {MAX_CHANNELS:,}")
        pixels = ("float32", (channels, height, width))
        return Outline({"pixel_values": pixels, "labels": ("int64", ())}, SAMPLES, num_classes=classes)
    both = f"{said} is an encoder-decoder, of which --task {task} would take the decoder alone: give --task seq2seq-lm"
    require(task != "causal-lm" or not config.get("is_encoder_decoder"), both)
    most = positions(config.get("text_config") or config)
    if tokens is None:
        tokens = min(most or FEW_TOKENS, MOST_TOKENS)
        notes.append(f"--tokens is {tokens:,}: the model takes {f'{most:,}' if most else 'any number'}")
    require(not most or tokens <= most, f"--tokens={tokens} is more than the {most} that {said} takes: lower it")
    require(tokens > 1 or task != "causal-lm", "--tokens=1 leaves no next token to predict: give 2 or more")
    names = ("input_ids", "attention_mask", *(("decoder_input_ids",) if task == "seq2seq-lm" else ()))
    row = ("int64", (tokens,))
    labels = ("int64", ()) if task == "sequence-classification" else row
    return Outline({**dict.fromkeys(names, row), "labels": labels}, SAMPLES, 0, 0, classes, tokens)


def trained_by(reference: str, recipe: Recipe) -> tuple[str, dict[str, str]]:
    """The recipe (empty if none) and the flags that train what ``reference`` names; a packaged one for ``hf:MODEL``."""
    model: Any = recipe.model
    if not isinstance(model, FromConfig):
        return reference, {}
    if model.head != "sequence-classification":
        return "", {}
    name = reference.removeprefix(PREFIX)
    folder = Path(local_folder(name)).expanduser()
    weights = name if not folder.is_dir() or any(folder.glob("*.safetensors")) else "null"
    rank = {"model.lora.rank": str(model.lora.rank)} if model.lora.rank else {}
    flags = {"data.max_length": str(recipe.data.train.lengths[0]), **rank, "batch_size": str(recipe.batch_size)}
    return "distilbert_imdb", {"model.name": name, "model.weights": weights, **flags}
