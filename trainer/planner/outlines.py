"""What a script asks of hubs, of data sets and of the disk, answered by outlines where the thing itself is missing.

An outline has shapes, lengths and classes, and no content: it is enough to plan with. Weights are never read, whether
they are there or not. All of it changes the libraries for the rest of the process: for the child of ``script`` only.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import data as torch_data
from torch.utils._python_dispatch import _disable_current_modes

from trainer.errors import RecipeError, require
from trainer.planner.fake_patches import patch_transformers

# (side of an image, channels, classes, samples to train with, samples to test with), as their papers say.
IMAGES = {
    "MNIST": (28, 1, 10, 60_000, 10_000),
    "FashionMNIST": (28, 1, 10, 60_000, 10_000),
    "KMNIST": (28, 1, 10, 60_000, 10_000),
    "CIFAR10": (32, 3, 10, 50_000, 10_000),
    "CIFAR100": (32, 3, 100, 50_000, 10_000),
}
CHARACTERS = 1000  # of a text, where a column does not say how long it is
LETTERS_A_TOKEN = 4  # of English in byte-pair vocabularies of 30 to 100 thousand tokens, roughly
KINDS = "str[:CHARACTERS], int[:CLASSES], float, image[:SIDE] or chat[:CHARACTERS]"
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
SPECIAL = ("pad_token", "unk_token", "bos_token", "eos_token", "cls_token", "sep_token", "mask_token")


class Nothing:
    """Takes every call, and does nothing: a writer of logs, a metric."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return Nothing() if not name.startswith("__") else super().__getattribute__(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


class NoWeights(dict[str, Any]):
    """Stands for the weights of a file that is not read; a module that loads it keeps those that it has."""


def columns_of(text: str) -> dict[str, tuple[str, int]]:
    """``--columns text:str:500,label:int:2`` as ``{"text": ("str", 500), "label": ("int", 2)}``; 0 where no number is.

    Raises:
        RecipeError: for a column that is not of the form ``NAME:KIND`` or ``NAME:KIND:NUMBER``.
    """
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"([^:]+):(str|int|float|image|chat)(?::(\d{1,6}))?", part)
        require(match is not None, f"--columns: {part!r} must be NAME:KIND, where KIND is {KINDS}")
        assert match is not None
        found[match[1]] = match[2], int(match[3] or 0)
    return found


class Outlines:
    """Puts the outlines in the place of what is missing; ``notes`` says what was.

    Args:
        configs: folders with a ``config.json``, and maybe a tokenizer, by the name that the script asks the hub for.
        columns: of data sets of the hub, see :func:`columns_of`; ``None`` where the person has not said.
        rows: of each split of them.
    """

    def __init__(
        self, configs: Mapping[str, str], columns: Mapping[str, tuple[str, int]] | None = None, rows: int = 1000
    ) -> None:
        self.configs, self.columns, self.rows = configs, columns, rows
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        """Say it once."""
        if line not in self.notes:
            self.notes.append(line)

    def install(self) -> None:
        """Change torch now, and other libraries when the script imports them."""
        self._patch_torch()
        os.environ |= {"WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
        patches: dict[str, Callable[[Any], None]] = {
            "transformers.modeling_utils": self._patch_models,
            "transformers.utils.hub": self._patch_hub,
            "transformers.utils.import_utils": lambda module: patch_transformers(),
            "transformers.tokenization_utils_base": partial(self._patch_tokenizers, "PreTrainedTokenizerBase"),
            "transformers.models.auto.tokenization_auto": partial(self._patch_tokenizers, "AutoTokenizer"),
            "transformers.models.auto.image_processing_auto": self._patch_image_processors,
            "datasets.load": self._patch_datasets,
            "evaluate.loading": self._patch_metrics,
            "torchvision.datasets.mnist": self._patch_images,
            "torchvision.datasets.cifar": self._patch_images,
            "timm.models._builder": self._patch_timm,
            "triton.runtime.jit": partial(self._patch_triton, "JITFunction"),
            "triton.runtime.autotuner": partial(self._patch_triton, "Autotuner"),
            "torch.utils.tensorboard.writer": lambda module: setattr(module, "SummaryWriter", Nothing),
            "safetensors.torch": lambda module: self._unwritten(module, "save_file", "save_model"),
            "lightning.fabric.utilities.cloud_io": lambda module: self._unwritten(module, "_atomic_save"),
            "lightning_fabric.utilities.cloud_io": lambda module: self._unwritten(module, "_atomic_save"),
        }
        for name in [name for name in patches if name in sys.modules]:
            patches.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, AfterImport(patches))

    def _unwritten(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, lambda *args, **options: None)

    def _patch_torch(self) -> None:
        """Data is read for real, by this process; what is to be saved is not written; what is read has no weights."""
        make, load = torch_data.DataLoader.__init__, nn.Module.load_state_dict
        signature = inspect.signature(make)
        here = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}

        def init(loader: Any, *args: Any, **options: Any) -> None:
            given = signature.bind(loader, *args, **options).arguments
            if given.get("num_workers"):
                self.note("data loaders have no workers here: the memory of theirs is not in the host's")
            given.pop("self")
            make(loader, **{**given, **here, "timeout": 0, "multiprocessing_context": None})

        def load_state_dict(module: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
            if isinstance(state, NoWeights):
                return _IncompatibleKeys([], [])
            return load(module, state, *args, **options)

        def from_url(url: str, *args: Any, **options: Any) -> NoWeights:
            self.note(f"weights of {url.rpartition('/')[2]} are not read: the model has its shapes")
            return NoWeights()

        torch_data.DataLoader.__init__ = init  # type: ignore[method-assign]
        nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
        torch.hub.load_state_dict_from_url = from_url
        iterator: Any = torch_data.dataloader._BaseDataLoaderIter
        iterator.__next__ = _for_real(iterator.__next__)
        loader: Any = torch_data.DataLoader
        loader._get_iterator = _for_real(loader._get_iterator)
        for module in (torch_data, torch_data.dataset):
            module.random_split = _for_real(torch_data.random_split)
        # Of one device; its way there needs streams that only a real GPU has.
        nn.DataParallel.forward = lambda parallel, *inputs, **options: parallel.module(*inputs, **options)  # type: ignore[method-assign]
        self._unwritten(torch, "save")
        compiled = torch.compile

        def compile(*args: Any, **options: Any) -> Any:
            self.note("torch.compile is left out: what it fuses needs less, so this is an upper bound, mostly")
            return compiled(*args, **options)

        torch.compile = compile
        tensors: Any = torch.Tensor
        deepcopy = tensors.__deepcopy__

        def copied(tensor: Any, memo: Any) -> Any:
            if id(tensor) not in memo and isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            with nullcontext() if isinstance(tensor, FakeTensor) else _disable_current_modes():
                return deepcopy(tensor, memo)

        def known(method: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Any, **options: Any) -> Any:
                fake = isinstance(tensor, FakeTensor)
                value = tensor.fake_mode.value(tensor) if fake else tensor
                with _disable_current_modes():
                    return method(torch.zeros(tensor.shape, dtype=tensor.dtype) if value is None else value, **options)

            return read

        tensors.__deepcopy__ = copied
        tensors.numpy, FakeTensor.tolist = known(tensors.numpy), known(tensors.tolist)  # type: ignore[method-assign]

    # transformers

    def _patch_hub(self, module: Any) -> None:
        found = module.cached_files

        def cached_files(path_or_repo_id: Any, filenames: list[str], **options: Any) -> Any:
            name = str(path_or_repo_id)
            try:
                return found(self.configs.get(name, name), filenames, **options)
            except OSError as error:
                if "config.json" not in filenames or options.get("subfolder"):
                    raise
                raise MissingConfig(
                    f"the script wants config.json of {name!r}, which is neither here nor to be had from the hub: "
                    f"a folder with that file, without weights, is enough: --config {name}=FOLDER"
                ) from error

        module.cached_files = cached_files

    def _patch_models(self, module: Any) -> None:
        model_class, config_class = module.PreTrainedModel, module.PreTrainedConfig

        def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
            require(
                not any(options.pop(key, None) for key in ("quantization_config", "load_in_4bit", "load_in_8bit")),
                f"{cls.__name__}.from_pretrained({name!r}) asks for quantised weights, which cannot be planned yet: "
                "plan the script without quantization",
            )
            place, informed = options.pop("device_map", None), options.pop("output_loading_info", False)
            name = self.configs.get(str(name), name)
            dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
            kept = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
            if not isinstance(config, config_class):
                config, options = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **options)
            own = inspect.signature(cls.__init__).parameters  # the others are about loading
            kept |= {key: value for key, value in options.items() if key in own}
            dtype = config.dtype or torch.float32 if dtype in ("auto", None) else dtype
            model = cls._from_config(config, dtype=dtype, **kept).eval()
            model.config._name_or_path = model.name_or_path = str(name)
            self.note(f"weights of {name} are not read: the model is built from its config.json")
            if place not in (None, "cpu"):
                model.to("cuda")
            return (model, {}) if informed else model

        model_class.from_pretrained = classmethod(from_pretrained)
        self._unwritten(model_class, "save_pretrained")

    def _patch_tokenizers(self, owner: str, module: Any) -> None:
        kind = getattr(module, owner)
        original = kind.from_pretrained.__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            name = self.configs.get(str(name), name)
            try:
                if not Path(name).is_dir() or _has_tokenizer(Path(name)):
                    return original(cls, name, *args, **options)
            except MissingConfig:
                raise
            except (OSError, ValueError):  # transformers' words for a file that is not there
                pass
            return self._tokenizer(name)

        kind.from_pretrained = classmethod(from_pretrained)

    def _tokenizer(self, name: str) -> Any:
        """One with the vocabulary's size, that makes a token of every four characters."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import AutoConfig, PreTrainedTokenizerFast

        config = AutoConfig.from_pretrained(name).get_text_config()
        size = config.vocab_size
        tokens = {f"[{token[:-6].upper()}]": number for number, token in enumerate(SPECIAL)}
        tokens |= {f"token{number}": number for number in range(len(tokens), size)}
        tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f".{{1,{LETTERS_A_TOKEN}}}"), "isolated")
        self.note(f"the tokenizer of {name} is missing: an outline makes a token of {LETTERS_A_TOKEN} characters")
        special: Any = dict(zip(SPECIAL, tokens, strict=False))
        longest = getattr(config, "max_position_embeddings", None) or 1_000_000
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **special)
        made.chat_template = CHAT
        return made

    def _patch_image_processors(self, module: Any) -> None:
        original = module.AutoImageProcessor.from_pretrained.__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
            name = self.configs.get(str(name), name)
            try:
                return original(cls, name, *args, **options)
            except (OSError, ValueError):
                from transformers import AutoConfig, ViTImageProcessor

                side = getattr(AutoConfig.from_pretrained(name), "image_size", 224)
                self.note(f"the image processor of {name} is missing: an outline resizes to {side} × {side}")
                return ViTImageProcessor(size={"height": side, "width": side})

        module.AutoImageProcessor.from_pretrained = classmethod(from_pretrained)

    # data and the rest

    def _patch_datasets(self, module: Any) -> None:
        original = module.load_dataset

        @wraps(original)
        def load_dataset(path: str, *args: Any, split: Any = None, **options: Any) -> Any:
            local = path in ("csv", "json", "parquet", "text", "arrow", "imagefolder", "webdataset") or Path(path).exists()
            if self.columns is not None and not local:
                return self._dataset(path, split)
            try:
                return original(path, *args, split=split, **options)
            except (OSError, ValueError) as error:
                if local:
                    raise
                raise RecipeError(
                    f"the script wants the data set {path!r}, which is neither here nor to be had from the hub: say what "
                    f"its columns are, for an outline: --columns text:str:1000,label:int:2 --rows 1000 ({error})"
                ) from error

        module.load_dataset = load_dataset

    def _dataset(self, path: str, split: Any) -> Any:
        import datasets
        from PIL import Image

        features, row = {}, {}
        for name, (kind, number) in (self.columns or {}).items():
            text = ("word " * ((number or CHARACTERS) // 5 + 1))[: number or CHARACTERS]
            if kind == "image":
                png = io.BytesIO()
                Image.new("RGB", (number or 224,) * 2).save(png, "PNG")
                features[name], row[name] = datasets.Image(), {"bytes": png.getvalue(), "path": None}
            elif kind == "int" and number:
                features[name] = datasets.ClassLabel(names=[f"class{one}" for one in range(number)])
            elif kind == "chat":
                features[name] = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
                row[name] = [{"role": role, "content": text[len(text) // 2 :]} for role in ("user", "assistant")]
            else:
                features[name] = datasets.Value({"str": "string", "int": "int64", "float": "float32"}[kind])
                row[name] = {"str": text, "int": 0, "float": 0.0}[kind]
        content = {
            name: [row[name]] * self.rows if name in row else [one % len(kind.names) for one in range(self.rows)]
            for name, kind in features.items()
        }
        made = datasets.Dataset.from_dict(content, features=datasets.Features(features))
        self.note(f"the data set {path} is an outline: {self.rows} rows of --columns in each split")
        if split is None:
            return datasets.DatasetDict({name: made for name in ("train", "validation", "test")})
        return [made for _ in split] if isinstance(split, list) else made

    def _patch_metrics(self, module: Any) -> None:
        original = module.load

        def load(name: str, *args: Any, **options: Any) -> Any:
            try:
                return original(name, *args, **options)
            except Exception:  # whatever a file that is not there leads to
                self.note(f"the metric {name} is missing: nothing is computed")
                return Nothing()

        module.load = load

    def _patch_images(self, module: Any) -> None:
        for kind in [kind for name, kind in vars(module).items() if name in IMAGES and "__init__" in vars(kind)]:
            kind.__init__ = self._image_init(kind.__init__)

    def _image_init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def init(dataset: Any, *args: Any, **options: Any) -> None:
            given = dict(signature.bind(dataset, *args, **options).arguments, download=False)
            given.pop("self")
            try:
                with _disable_current_modes():
                    return original(dataset, **given)
            except (RuntimeError, OSError):
                pass
            name = next(kind.__name__ for kind in type(dataset).__mro__ if kind.__name__ in IMAGES)
            side, channels, classes, train, test = IMAGES[name]
            dataset.train = given.get("train", True)
            count = train if dataset.train else test
            self.note(f"{name} is missing: an outline of {count:,} images of {side} × {side}, {classes} classes")
            dataset.targets = [index % classes for index in range(count)]
            dataset.classes = [str(index) for index in range(classes)]
            dataset.data = np.broadcast_to(np.zeros((side, side, channels), np.uint8), (count, side, side, channels))
            if channels == 1:
                with _disable_current_modes():
                    dataset.data = torch.zeros((1, side, side), dtype=torch.uint8).expand(count, -1, -1)
                    dataset.targets = torch.tensor(dataset.targets)
            return None

        return init

    def _patch_triton(self, owner: str, module: Any) -> None:
        def run(kernel: Any, *args: Any, **options: Any) -> None:
            self.note(f"the Triton kernel {kernel.fn.__name__} is not in the time of the step; what it fills is counted")

        getattr(module, owner).run = run

    def _patch_timm(self, module: Any) -> None:
        def load_pretrained(model: Any, *args: Any, **options: Any) -> None:
            self.note(f"weights of {type(model).__name__} are not read: the model has its shapes")

        module.load_pretrained = load_pretrained


class MissingConfig(RecipeError, OSError):
    """A model of the hub of which nothing is known."""


class AfterImport(MetaPathFinder):
    """Changes modules right after they were imported, whoever does that."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that all others would find, with the patch behind it."""
        patch = self.patches.pop(name, None)
        spec = importlib.util.find_spec(name) if patch is not None else None
        if spec is None or spec.loader is None or patch is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        loader.exec_module = exec_module
        return spec


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on real tensors: what reads data must know which sample is next, and how long it is."""

    @wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return wrapped


def _has_tokenizer(folder: Path) -> bool:
    patterns = ("tokenizer.*", "vocab*", "merges*", "*spiece.model", "*.tiktoken")
    return any(True for pattern in patterns for _ in folder.glob(pattern))
