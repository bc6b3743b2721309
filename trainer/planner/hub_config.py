"""``hf:NAME``: a recipe for planning, built from a model's ``config.json`` and synthetic samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.data.images import MAX_IMAGE_SIZE
from trainer.errors import RecipeError, format_list, require
from trainer.models import hub
from trainer.models.base import classification_loss
from trainer.models.causal import CausalLM
from trainer.models.lora import LoRA
from trainer.models.text import NO_TOKENIZER, TextClassifier
from trainer.planner.synthetic_data import SyntheticData
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.files import parse_json_object, read_regular
from trainer.system.hub import offline_advice, offline_reason
from trainer.values import DataSpec, Loss

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
"""Tasks, with their names in the classes of transformers, such as ``AutoModelForCausalLM``."""

ENDINGS = {f"For{word}": task for task, word in TASKS.items()}
ENDINGS |= {"LMHeadModel": "causal-lm", "ForConditionalGeneration": "seq2seq-lm"}
SIZES = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"]
SIZES += ["max_position_embeddings"]
"""Attributes of a configuration, under the names that transformers maps every model's own keys to."""

SAMPLES = 100_000  # size of the synthetic training set: larger than any batch
MAX_TOKENS, FEW_TOKENS = 4096, 512  # defaults of --tokens: the maximum; for a model without a limit
BATCH = 8  # the default of transformers' TrainingArguments
MAX_CHANNELS = 10_000  # per image: far more than satellite images have
IMAGE_SIZE = 224  # if the configuration has none: the usual size of ImageNet classifiers


@dataclass
class FromConfig(TextClassifier):
    """A transformers model with random weights and a ``head`` for a task of ``TASKS`` other than ``causal-lm``."""

    head: ClassVar[str]

    def skeleton(self) -> nn.Module:
        """Build the module that transformers has for the task, without adapters."""
        return self._finalize_module(self._from_configuration(f"AutoModelFor{TASKS[self.head]}"))

    def _is_unmodified(self) -> bool:
        return self.head == "sequence-classification"  # the other heads read every token

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the cross entropy of the labels, without keeping the logits."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        targets = batch["labels"].flatten()
        yield Loss(classification_loss(module(**inputs).logits.flatten(0, -2), targets).total, targets=targets)

    def _configuration(self) -> Any:
        config = super()._configuration()
        if self.head == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
            end = getattr(config, "eos_token_id", None)  # decoders read the last token that is not padding
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
    """Return a recipe for the model whose ``config.json`` is in the folder ``name``, or on the hub under that name.

    The optimizer is that of ``distilbert_imdb``. No code from the hub runs, and no weights are read. Defaults: the
    ``task`` from the configuration's ``architectures``, the maximum ``tokens`` of the model but at most
    ``MAX_TOKENS``, a ``batch`` of 8, precision ``auto``. ``lora`` is the rank of adapters, 0 for none.
    """
    require(task is None or task in TASKS, f"--task={task!r} must be one of {', '.join(TASKS)}")
    require((batch or 1) <= SAMPLES, f"--batch={batch} is more than the {SAMPLES:,} samples of a plan: lower it")
    said = f"{PREFIX}{name}"
    given, folder = _read(said, name, revision)
    chosen = task or _guessed(said, given)
    notes = [] if task else [f"--task is {chosen}, from its {CONFIG}"]
    _shape(said, chosen, tokens, given, [])  # rejects what it can before torch is imported
    model = _class(said, given, chosen)(str(folder), tokenizer=NO_TOKENIZER, lora=LoRA(lora))
    config = model._configuration()
    for name in SIZES:
        size = getattr(config.get_text_config(), name, None)
        require(not isinstance(size, int) or size > 0, f"{said}: its {CONFIG} has {name} {size}: give at least 1")
    spec = _shape(said, chosen, tokens, config.to_dict() | {"num_labels": config.num_labels}, notes)
    data, optim = SyntheticData(spec, notes=notes), Optim("adamw", lr=5e-5, schedule="linear", clip_norm=1.0)
    return Recipe(model=model, data=data, optim=optim, batch_size=batch or BATCH, memory=Memory(precision="auto"))


def _read(reference: str, name: str, revision: str | None) -> tuple[dict[str, Any], Path]:
    folder = Path(hub.local_folder(name)).expanduser()
    if not name or not hub.is_local(str(folder)):
        require(not name.startswith((".", "/", "~", "file:")), f"{reference}: no folder {folder}")
        from huggingface_hub import hf_hub_download

        why_not = "" if (shipped := None if revision else hub.bundled_config_folder(name)) else offline_reason()
        try:
            folder = shipped or Path(hf_hub_download(name, CONFIG, revision=revision)).parent
        except Exception as error:  # network error; gated, private or unknown model
            why = why_not or next(iter(str(error).strip().splitlines()), type(error).__name__)
            fix = f"save that file in a folder and plan {PREFIX}./FOLDER; a gated model needs HF_TOKEN"
            fault = f"{reference}: no such folder, and its {CONFIG} could not be downloaded from the hub ({why})"
            raise RecipeError(f"{fault}: {fix}; {offline_advice()}") from error
    file = f"{reference}: {folder / CONFIG}"
    try:
        config = parse_json_object(read_regular(folder / CONFIG, hub.MAX_CONFIG_BYTES), hub.MAX_CONFIG_BYTES)
    except OSError as error:
        raise RecipeError(f"{file} cannot be read: {error.strerror}") from error
    if config is None:
        raise RecipeError(f"{file} is not a JSON object; it may be cut off: copy or download it again")
    require(isinstance(config.get("model_type"), str), f"{file} has no model_type: add the one transformers writes")
    hub.require_moderate_config(reference, config)
    quantized = f"its {CONFIG} has a quantization_config, and quantized weights cannot be trained"
    require(not config.get("quantization_config"), f"{reference}: {quantized}: name the original model")
    return config, folder


def _guessed(said: str, config: Mapping[str, Any]) -> str:
    given = config.get("architectures")
    names = list(map(str, given)) if isinstance(given, list) else [str(given)] if given else []
    for task in (task for name in names for ending, task in ENDINGS.items() if name.endswith(ending)):
        return task
    found = f"the architectures of its {CONFIG} ({format_list(names) or 'none'}) name no task"
    raise RecipeError(f"{said}: {found}: give --task, one of {', '.join(TASKS)}")


def _class(said: str, config: Mapping[str, Any], task: str) -> type[FromConfig | CausalLM]:
    """Return a model class named like the transformers class; reject a model without a class for the task."""
    import transformers

    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        why = f"transformers {transformers.__version__} has no model_type {kind!r}: install a newer transformers"
        if config.get("auto_map"):
            why = "it needs its own Python code (auto_map), and remote code is not executed"
        raise RecipeError(f"{said}: {why}; or plan a script that runs it: trainer plan --script")
    own = transformers.CONFIG_MAPPING[kind]
    classes = {one: getattr(transformers, f"AutoModelFor{word}")._model_mapping for one, word in TASKS.items()}
    able = [one for one, known in classes.items() if own in known]
    if not able and own in transformers.AutoModelForImageTextToText._model_mapping:
        raise RecipeError(f"{said}: {kind} reads images with texts; this needs a script: trainer plan --script FILE")
    if task not in able:
        instead = f"give --task {' or '.join(able)}" if able else f"choose a model for one of {', '.join(TASKS)}"
        raise RecipeError(f"{said}: transformers has no {kind} model for --task {task}: {instead}")
    found, base = classes[task][own], CausalLM if task == "causal-lm" else FromConfig
    name = (found[0] if isinstance(found, tuple) else found).__name__
    made = globals()[name] = type(name, (base,), {"head": task})  # pickle looks the class up here
    return made


def _shape(said: str, task: str, tokens: int | None, config: Mapping[str, Any], notes: list[str]) -> DataSpec:
    """Return the spec of samples with ``tokens`` tokens or the model's image size; add each default to ``notes``."""
    classes = None if task.endswith("-lm") else config.get("num_labels")
    if task == "image-classification":
        require(tokens is None, f"{said}: --tokens is for text, and --task {task} takes images: leave it out")
        given = config.get("image_size")
        size = IMAGE_SIZE if given is None else given
        notes += [f"its {CONFIG} has no image_size: planned with {size}"] if given is None else []
        sides = list(size) if isinstance(size, list | tuple) else [size, size]
        if len(sides) != 2 or not all(isinstance(side, int) and 0 < side <= MAX_IMAGE_SIZE for side in sides):
            why = f"its {CONFIG} has image_size {size!r}"
            raise RecipeError(f"{said}: {why}: give one number of pixels, or height and width")
        height, width = sides
        channels = config.get("num_channels") or 3
        if not isinstance(channels, int) or not 0 < channels <= MAX_CHANNELS:
            why = f"its {CONFIG} has num_channels {channels!r}"
            raise RecipeError(f"{said}: {why}: give a number from 1 to {MAX_CHANNELS:,}")
        pixels = ("float32", (channels, height, width))
        return DataSpec({"pixel_values": pixels, "labels": ("int64", ())}, SAMPLES, num_classes=classes)
    if task == "causal-lm" and config.get("is_encoder_decoder"):
        why = f"{said} is an encoder-decoder, and --task {task} would use only its decoder"
        raise RecipeError(f"{why}: give --task seq2seq-lm")
    most = hub.max_positions(config.get("text_config") or config)
    if tokens is None:
        tokens = min(most or FEW_TOKENS, MAX_TOKENS)
        notes.append(f"--tokens is {tokens:,}: the model's maximum is {f'{most:,}' if most else 'unlimited'}")
    if most and tokens > most and (config.get("rope_theta") or config.get("rope_parameters")):
        fix = "train with a scaling in rope_parameters"
        notes.append(f"--tokens={tokens:,} is more than the {most:,} of {said}: {fix}")
    else:
        require(not most or tokens <= most, f"--tokens={tokens} is more than the {most} of {said}: lower it")
    require(tokens > 1 or task != "causal-lm", "--tokens=1 leaves no next token to predict: give at least 2")
    names = ("input_ids", "attention_mask", *(("decoder_input_ids",) if task == "seq2seq-lm" else ()))
    row = ("int64", (tokens,))
    labels = ("int64", ()) if task == "sequence-classification" else row
    return DataSpec({**dict.fromkeys(names, row), "labels": labels}, SAMPLES, 0, 0, classes, tokens)


def recipe_to_train(reference: str, recipe: Recipe) -> tuple[str, dict[str, str]]:
    """Return the recipe and flags that train ``reference``: a packaged recipe for ``hf:MODEL``, or "" if none can."""
    model: Any = recipe.model
    if not reference.startswith(PREFIX):
        return reference, {}
    if not isinstance(model, FromConfig) or model.head != "sequence-classification":
        return "", {}
    name = reference.removeprefix(PREFIX)
    folder = Path(hub.local_folder(name)).expanduser()
    weights = name if not folder.is_dir() or any(folder.glob("*.safetensors")) else "null"
    rank = {"model.lora.rank": str(model.lora.rank)} if model.lora.rank else {}
    flags = {"data.max_length": str(recipe.data.train.lengths[0]), **rank, "batch_size": str(recipe.batch_size)}
    return "distilbert_imdb", {"model.name": name, "model.weights": weights, **flags}
