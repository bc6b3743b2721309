"""Outlines that replace missing models, tokenizers and data sets of a script.

An outline has shapes, lengths and classes, but no content. Weights are never read, even if they exist. Libraries stay
changed until the process ends, so only the child of :mod:`trainer.fakegpu.script` uses this module.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainer.errors import RecipeError, require

# Side, channels, classes, and samples to train and to test with, as torchvision's documentation says.
IMAGES = dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST"), (28, 1, 10, 60_000, 10_000))
IMAGES |= {f"CIFAR{classes}": (32, 3, classes, 50_000, 10_000) for classes in (10, 100)}
TOKENIZER_FILES = ("tokenizer.*", "vocab*", "merges*", "*spiece.model", "*.tiktoken")
SPECIAL = {f"{name}_token": f"{name}_token" for name in ("pad", "unk", "bos", "eos", "cls", "sep", "mask")}
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
LETTERS = 4  # approximate characters per token of English, for vocabularies of 30,000 to 100,000 tokens
COLUMN = re.compile(r"([^:]+):(str|chat|int|float|image)(?::(\d{1,6}))?")
KINDS = "NAME:KIND, where KIND is str:CHARACTERS, chat:CHARACTERS, int:CLASSES, float or image:SIDE"
UNREAD = "weights are not read: models have the shapes that their configuration says"
UNSAVED = "nothing is saved: the memory, the time and the files of checkpoints were not looked at"
KERNELS = "Triton's kernels are not in the time of a step; what they fill is counted"
SILENT = {  # by module: functions that become no-ops, and the note for each call
    "safetensors.torch": ("save_file save_model", UNSAVED),
    "lightning.fabric.utilities.cloud_io": ("_atomic_save", UNSAVED),
    "lightning_fabric.utilities.cloud_io": ("_atomic_save", UNSAVED),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "TensorBoard logs nothing"),
    "timm.models._builder": ("load_pretrained", UNREAD),
    "triton.runtime.jit": ("JITFunction.run", KERNELS),
    "triton.runtime.autotuner": ("Autotuner.run", KERNELS),
}


class MissingConfig(RecipeError, OSError):
    """Raised when the configuration of a hub model is missing."""


class NoOpObject(float):  # a number, so that a metric's result can be compared, formatted and saved
    """Stands in for a log writer, a metric or a file's weights: accepts every call and does nothing."""

    __getattr__ = __call__ = __getitem__ = __enter__ = lambda self, *args, **options: self
    __setitem__ = __exit__ = lambda self, *args: None
    __len__, __bool__ = lambda self: 0, lambda self: True
    __iter__ = lambda self: iter(())  # noqa: E731


class MissingFilePatches(MetaPathFinder):
    """Patches torch now, and other libraries when the script imports them; ``notes`` lists what was missing.

    ``configs`` maps hub names to folders. Missing data sets get ``columns`` (see :func:`columns_of`) and ``rows``.
    """

    def __init__(self, configs: Mapping[str, str], columns: Mapping[str, tuple[str, int]], rows: int) -> None:
        self.configs, self.columns, self.rows, self.notes = configs, columns, rows, list[str]()
        auto = "transformers.models.auto"
        self.patches: dict[str, Callable[[Any], None]] = {
            "transformers.modeling_utils": self._models,
            "transformers.utils.hub": lambda hub: self._with_fallback(hub, "cached_files", self._config),
            "transformers.tokenization_utils_base": lambda base: self._tokenizers(base.PreTrainedTokenizerBase),
            f"{auto}.tokenization_auto": lambda module: self._tokenizers(module.AutoTokenizer),
            f"{auto}.image_processing_auto": self._image_processors,
            "datasets.load": lambda load: self._with_fallback(load, "load_dataset", self._dataset),
            "evaluate.loading": lambda loading: self._with_fallback(loading, "load", self._metric),
            **dict.fromkeys(("torchvision.datasets.mnist", "torchvision.datasets.cifar"), self._images),
        }
        self._torch()
        for name in [name for name in (*self.patches, *SILENT) if name in sys.modules]:
            self._patch(name, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the other finders, whose loader then also patches the module."""
        if name not in (*self.patches, *SILENT):
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._patch(name, module)

            spec.loader.exec_module = exec_module
        return spec

    def _patch(self, name: str, module: Any) -> None:
        self.patches.get(name, lambda module: None)(module)
        functions, said = SILENT.get(name, ("", ""))
        for function in functions.split():
            owner, _, attribute = function.rpartition(".")
            self._disable(getattr(module, owner) if owner else module, attribute, said)

    def note(self, line: str) -> NoOpObject:
        """Add a note unless it is empty or exists."""
        self.notes += [line] if line and line not in self.notes else []
        return NoOpObject()

    def _disable(self, owner: Any, name: str, said: str = "") -> None:
        before = getattr(owner, name)
        others = [one for one in sys.modules.copy().values() if getattr(one, "__dict__", {}).get(name) is before]
        for place in (owner, *others):
            setattr(place, name, lambda *args, **options: self.note(said))

    def _with_fallback(
        self, owner: Any, name: str, outline: Callable[..., Any], errors: Any = (OSError, ValueError)
    ) -> None:
        """Call ``outline`` with the error and the arguments if ``owner.name`` raises one of ``errors``."""
        before = inspect.getattr_static(owner, name)
        original = getattr(before, "__func__", before)

        def function(*args: Any, **options: Any) -> Any:
            args = tuple(self.configs.get(value, value) if isinstance(value, str) else value for value in args)
            options = {key: self.configs.get(v, v) if isinstance(v, str) else v for key, v in options.items()}
            try:
                return original(*args, **options)
            except errors as error:
                if isinstance(error, MissingConfig):
                    raise
                return outline(error, *args, **options)

        setattr(owner, name, classmethod(function) if isinstance(before, classmethod) else function)

    def _torch(self) -> None:
        """Patch torch so that weights are neither loaded nor saved, and arrays have real values."""
        load = nn.Module.load_state_dict

        def load_state_dict(module: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
            return state if isinstance(state, NoOpObject) else load(module, state, *args, **options)

        def forward(parallel: Any, *args: Any, **options: Any) -> Any:  # on one device, without its streams
            self.note("nn.DataParallel uses one GPU")
            return parallel.module(*args, **options)

        def tolist(tensor: Any) -> Any:  # torch's reads each element separately
            return tensor.numpy().tolist()

        for owner, function in ((nn.Module, load_state_dict), (nn.DataParallel, forward), (FakeTensor, tolist)):
            setattr(owner, function.__name__, function)
        for name in ("numpy", "__deepcopy__"):  # for real tensors
            setattr(torch.Tensor, name, _disable_current_modes()(getattr(torch.Tensor, name)))
        self._disable(torch, "save", UNSAVED)
        self._disable(torch.hub, "load_state_dict_from_url", UNREAD)

    # transformers

    def _config(self, error: Exception, path_or_repo_id: Any, filenames: list[str], **options: Any) -> Any:
        if "config.json" not in filenames:
            raise error
        raise MissingConfig(
            f"config.json of {str(path_or_repo_id)!r} is neither here nor available from the hub: "
            f"give a folder with that file, weights are not needed: --config {path_or_repo_id}=FOLDER"
        )

    def _models(self, module: Any) -> None:
        def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
            quantised = any(options.pop(key, 0) for key in ("quantization_config", "load_in_4bit", "load_in_8bit"))
            require(not quantised, f"{name} with quantised weights cannot be planned yet: leave the quantization out")
            sharded = [key for key in ("tp_plan", "tp_size", "distributed_config") if options.pop(key, None)]
            require(not sharded, f"{name} with {', '.join(sharded)}: transformers' own parallelism is not simulated")
            options.pop("device_mesh", None)
            place, informed = options.pop("device_map", None), options.pop("output_loading_info", False)
            dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
            if not isinstance(config, module.PreTrainedConfig):
                path = self.configs.get(str(config or name), config or name)
                config, options = cls.config_class.from_pretrained(path, return_unused_kwargs=True, **options)
            if getattr(config, "quantization_config", None):
                fix = f"give a config.json without quantization_config: --config {name}=FOLDER"
                raise RecipeError(f"{name} has quantised weights, which cannot be planned yet: {fix}")
            own = {"attn_implementation", *inspect.signature(cls.__init__).parameters}  # others control loading
            kept = {key: value for key, value in options.items() if key in own}
            if dtype in ("auto", None) and config.dtype is None:
                half = "weights are taken as float32, and would be half as large in bfloat16"
                self.note(f"config.json of {name} has no dtype: {half}")
            dtype = config.dtype or torch.float32 if dtype in ("auto", None) else dtype
            model = cls._from_config(config, dtype=dtype, **kept).eval()
            model.config._name_or_path = model.name_or_path = str(name)
            self.note(UNREAD)
            model = model if place in (None, "cpu") else model.to("cuda")
            return (model, {}) if informed else model

        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        self._disable(module.PreTrainedModel, "save_pretrained", UNSAVED)

    def _tokenizers(self, kind: Any) -> None:
        self._with_fallback(kind, "from_pretrained", self._tokenizer)
        found = kind.from_pretrained.__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            folder = Path(self.configs.get(str(name), str(name)))
            if folder.is_dir() and not any(True for files in TOKENIZER_FILES for _ in folder.glob(files)):
                return self._tokenizer(None, cls, folder)  # transformers would make an empty one
            return found(cls, name, *args, **options)

        kind.from_pretrained = classmethod(from_pretrained)

    def _tokenizer(self, error: Any, cls: Any, name: Any, *args: Any, **options: Any) -> Any:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import AutoConfig, PreTrainedTokenizerFast

        config = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
        words = {word: number for number, word in enumerate(SPECIAL)}
        words |= {f"token{number}": number for number in range(len(words), config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="unk_token"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f".{{1,{LETTERS}}}"), "isolated")
        self.note(f"the tokenizer of {name} is missing: an outline makes a token of {LETTERS} characters{_why(error)}")
        longest = getattr(config, "max_position_embeddings", None) or 1_000_000
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **SPECIAL)
        made.chat_template = CHAT
        return made

    def _image_processors(self, module: Any) -> None:
        def outline(error: Exception, cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            side = getattr(config, "image_size", 224)
            made = f"an outline makes images of {side} × {side}{_why(error)}"
            self.note(f"the image processor of {name} is missing: {made}")
            return transformers.ViTImageProcessor(size={"height": side, "width": side})

        import transformers

        self._with_fallback(module.AutoImageProcessor, "from_pretrained", outline)

    # data

    def _dataset(self, error: Exception, path: str, *args: Any, split: Any = None, **options: Any) -> Any:
        absent = isinstance(error, OSError) or "Couldn't find cache" in str(error)  # other errors need a file to exist
        if not absent or options.get("data_files") or options.get("data_dir") or Path(path).exists():
            raise error
        missing = f"the data set {path!r} is neither here nor available from the hub"
        flags = "--columns text:str:1000,label:int:2 --rows 1000"
        require(bool(self.columns), f"{missing}: give its columns, for an outline: {flags} ({error})")
        import datasets

        made = {name: _column(kind, number, self.rows) for name, (kind, number) in self.columns.items()}
        features = datasets.Features({name: feature for name, (feature, _) in made.items()})
        table = datasets.Dataset.from_dict({name: values for name, (_, values) in made.items()}, features=features)
        self.note(f"{missing}: an outline has {self.rows} rows of --columns in each split{_why(error)}")
        if split is None:
            return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), table))
        return [table for _ in split] if isinstance(split, list) else table

    def _metric(self, error: Exception, name: str, *args: Any, **options: Any) -> NoOpObject:
        return self.note(f"the metric {name} is missing: nothing is computed{_why(error)}")

    def _images(self, module: Any) -> None:
        for kind in [kind for name, kind in vars(module).items() if name in IMAGES and "__init__" in vars(kind)]:
            self._with_fallback(kind, "__init__", self._image_set, RuntimeError)
            kind.download = lambda dataset: None

    def _image_set(self, error: Exception, dataset: Any, *args: Any, **options: Any) -> None:
        name = next(kind.__name__ for kind in type(dataset).__mro__ if kind.__name__ in IMAGES)
        side, channels, classes, *counts = IMAGES[name]
        count = counts[not dataset.train]
        self.note(f"{name} is missing: an outline has {count:,} images of {side} × {side}, {classes} classes")
        dataset.classes, dataset.targets = [f"{one}" for one in range(classes)], [one % classes for one in range(count)]
        dataset.data = np.broadcast_to(np.zeros(channels, np.uint8), (count, side, side, channels))
        if channels == 1:
            with _disable_current_modes():
                dataset.data = torch.zeros((1, side, side), dtype=torch.uint8).expand(count, -1, -1)
                dataset.targets = torch.tensor(dataset.targets)


def _why(error: Exception | None) -> str:
    return f" ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})" if error else ""


def columns_of(text: str) -> dict[str, tuple[str, int]]:
    """Parse ``--columns``: ``text:str:500,label:int`` becomes ``{"text": ("str", 500), "label": ("int", 0)}``."""
    found = {}
    for part in filter(None, text.split(",")):
        if (match := COLUMN.fullmatch(part)) is None:
            raise RecipeError(f"--columns: {part!r} must be {KINDS}")
        found[match[1]] = match[2], int(match[3] or 0)
    return found


def _column(kind: str, number: int, rows: int) -> tuple[Any, list[Any]]:
    import datasets
    from PIL import Image

    text = ("word " * (number // 5 or 200))[: number or None]
    if kind == "image":
        png = io.BytesIO()
        Image.new("RGB", (number or 224,) * 2).save(png, "PNG")
        return datasets.Image(), [{"bytes": png.getvalue(), "path": None}] * rows
    if kind == "chat":
        said = [{"role": role, "content": text[len(text) // 2 :]} for role in ("user", "assistant")]
        return [{"role": datasets.Value("string"), "content": datasets.Value("string")}], [said] * rows
    if kind == "int" and number:
        return datasets.ClassLabel(names=[f"class {one}" for one in range(number)]), [i % number for i in range(rows)]
    plain = {"str": ("string", text), "int": ("int64", 0), "float": ("float32", 0.0)}[kind]
    return datasets.Value(plain[0]), [plain[1]] * rows
