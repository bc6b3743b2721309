"""Weights from safetensors files into a module that was made on meta: tensor by tensor, each rank its own slices."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import RecipeError, require
from trainer.system.files import read_regular
from trainer.values import Stored
from trainer.weights.files import shortened
from trainer.weights.nf4 import AT_ONCE, GROUP, NF4Linear, quantise

if TYPE_CHECKING:
    from trainer.contract import Model

MOST_INDEX, PIECE = 64 * 2**20, 1 << 22
"""Bytes of the list of tensors and the files that they are in; and elements of a tensor that are copied at a time: all
that a conversion of its type may need beside the weights."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles(ExitStack):
    """Safetensors files, opened once and mapped: of a tensor only what is asked for is read."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def shape(self, file: Path, key: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header of its file."""
        return tuple(self._slice(file, key).get_shape())

    def read(self, file: Path, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A slice of the tensor ``key`` on the CPU, as stored; the whole without ``index``."""
        return self._slice(file, key)[index if index else ...]

    def _slice(self, file: Path, key: str) -> Any:
        try:
            return self.open(file).get_slice(key)
        except SafetensorError as error:
            raise RecipeError(f"{file} has no tensor {key}: {error}") from error

    def open(self, file: Path) -> Any:
        """What safetensors makes of ``file``."""
        if file not in self._opened:
            require(file.is_file(), f"{file} is not there: give the path of a safetensors file")
            try:
                self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                raise RecipeError(f"{file} is corrupt or not a safetensors file: {error}") from error
        return self._opened[file]


def stored_in(path: str | Path) -> dict[str, tuple[Stored, tuple[int, ...]]]:
    """Every tensor that is kept in ``path``: by name where it is, and its shape. Reads headers only.

    That is a safetensors file, an index of shards (``*.safetensors.index.json``), or a folder with one of the two,
    called ``model``. One that is missing, corrupt or not safetensors is refused by name.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
        require(len(found) > 0, f"{path} has neither {SINGLE} nor {INDEX}: weights are streamed from safetensors only")
        path = found[0]
    with WeightFiles() as files:
        places = _places(path) if path.suffix == ".json" else dict.fromkeys(files.open(path).keys(), path)
        return {key: (Stored(file, key), files.shape(file, key)) for key, file in places.items()}


def _places(path: Path) -> dict[str, Path]:
    try:
        index = dict(json.loads(read_regular(path, MOST_INDEX))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path} is corrupt or not an index of safetensors files: {error!r}") from error
    for name in index.values():
        beside = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
        require(beside, f"{path} names {name!r}: shards must be .safetensors files in the same folder")
    return {key: path.parent / name for key, name in index.items()}


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Create floating-point tensors in ``dtype``; ``None`` changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def skeleton_on_meta(model: Model) -> nn.Module:
    """The skeleton of ``model``, adapted, with its parameters on meta and its buffers real, on the CPU."""
    return on_meta(lambda: model.adapt(model.skeleton()))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes, with its parameters on meta and its buffers real, on the CPU."""
    from accelerate import init_empty_weights  # a tenth of a second, for what is rarely done

    with init_empty_weights(include_buffers=False), torch.device("cpu"):
        module = build()
    # Registering a parameter on meta makes a new object of it, but tied ones still share their storage.
    first: dict[tuple, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.shape, parameter.stride())
        kept = first.setdefault(place, parameter)
        if kept is not parameter:
            _register(module, name, kept)
    # Of a bias that transformers pads, it gives one of the two a storage of its own.
    for name, source in getattr(module, "all_tied_weights_keys", {}).items():
        _register(module, name, module.get_parameter(source))
    return module


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of every parameter: one, or several where it is tied."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


class Stretch(NamedTuple):
    """Where the rows of a parameter are in that of the model as it was built, of which it is one of three thirds."""

    name: str  # of the parameter as it was built
    number: int  # which third

    def place(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A part of a parameter of ``shape`` that begins at ``offset``: where in the whole, and the whole's shape."""
        return (offset[0] + self.number * shape[0], *offset[1:]), (3 * shape[0], *shape[1:])


def stretches(module: nn.Module) -> dict[str, Stretch]:
    """The parameters that were packed into one when the model was built, and are three now (``SplitAttention``)."""
    return {
        f"{prefix}.{name}": Stretch(f"{prefix}.{packed}", number)
        for prefix, part in module.named_modules()
        for name, (packed, number) in getattr(part, "packed", {}).items()
    }


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._parameters[leaf] = parameter


def build_streamed(model: Model) -> nn.Module:
    """The module on the default device with its pretrained weights; what is new is drawn from torch's current seed."""
    module = skeleton_on_meta(model)
    allocate(module, torch.get_default_device())
    fill(module, model, torch.initial_seed())
    return module


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every parameter memory on ``device``, its values undefined; tied ones stay tied, sharded ones sharded.

    Real buffers move along, unless parameters are sharded: ``fully_shard`` has put them where they are computed with,
    which is not where offloaded parameters live. What is floating-point becomes ``dtype``; ``None`` leaves it.
    """
    groups = tied_names(module)
    sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    buffers = {id(buffer) for buffer in module.buffers()}
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) in buffers:
            return tensor  # nothing may know its value: refused when the module is filled
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not tensor.is_meta:
            return tensor.to(tensor.device if sharded else device, wanted)
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device, dtype=wanted)
        return made[id(tensor)]

    module._apply(real)  # FSDP notices, and keeps what becomes of its parameters
    for first, *others in groups:
        for name in others:
            _register(module, name, module.get_parameter(first))


def put_on_meta(module: nn.Module) -> dict[str, Tensor]:
    """Leave the parameters of ``module`` on meta; returns their values by name, once each, for :func:`put_back`."""
    groups, buffers = tied_names(module), {id(buffer) for buffer in module.buffers()}
    values = {names[0]: module.get_parameter(names[0]).detach() for names in groups}
    module._apply(lambda tensor: tensor if id(tensor) in buffers else torch.empty_like(tensor, device="meta"))
    for first, *others in groups:
        for name in others:
            _register(module, name, module.get_parameter(first))
    return values


@torch.no_grad()
def put_back(module: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Allocate the parameters of ``module`` on ``device``, sharded or not, with ``values``, which are emptied."""
    allocate(module, device)
    for name in [*values]:
        part = own_part(module.get_parameter(name))
        part.local.copy_(values.pop(name)[part.slices()])


class Slice(NamedTuple):
    """What this rank holds of a tensor: its memory, and where it begins in the whole, along every dimension."""

    local: Tensor
    offset: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Of this part in the whole."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.local.shape, strict=True))


def own_part(tensor: Tensor) -> Slice:
    """This rank's part of ``tensor``: its shard, or all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return Slice(tensor, (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Slice(tensor.to_local(), tuple(offset))


@torch.no_grad()
def fill(module: nn.Module, model: Model, seed: int) -> None:
    """Fill ``module``, an allocated skeleton of ``model``, sharded or not; ``seed`` draws parameters that no file has.
    A ``RecipeError`` names what is missing, of another shape, or still on meta."""
    pretrained = model.pretrained()
    groups, buffers, parts = tied_names(module), dict(module.named_buffers()), stretches(module)
    built = [[parts[name].name if name in parts else name for name in names] for names in groups]
    known = pretrained.stored.keys() | set(pretrained.new)
    lost = shortened([names[0] for names in built if not known.intersection(names)])
    require(not lost, f"no value is known for {lost}: pretrained() must name them among stored or new parameters")
    unknown = shortened(sorted(known.difference(*built, buffers)))
    require(not unknown, f"pretrained() names {unknown}, which the module does not have")
    with WeightFiles() as files:
        for names, as_built in [*zip(groups, built, strict=True), *(([name], [name]) for name in buffers)]:
            stored = {name: pretrained.stored[name] for name in as_built if name in pretrained.stored}
            tensor = buffers[names[0]] if names[0] in buffers else module.get_parameter(names[0])
            part, shape = own_part(tensor), tuple(tensor.shape)
            path, _, leaf = names[0].rpartition(".")
            layer: Any = module.get_submodule(path)
            if names[0] in parts:
                offset, shape = parts[names[0]].place(part.offset, shape)
                part = Slice(part.local, offset)
            coded = leaf == "codes" and isinstance(layer, NF4Linear)
            for number, (name, place) in enumerate(stored.items()):
                pieces = _codes(files, place, name, layer, part) if coded else _pieces(files, place, name, shape, part)
                for rows, value in pieces:
                    if number == 0:
                        part.local[rows].copy_(value)
                        continue
                    require(
                        torch.equal(part.local[rows].cpu(), value.to(tensor.dtype)),
                        f"{names[0]} and {name} are one parameter of the model, but differ in {place.file}",
                    )
    if pretrained.new:
        new = draw_new(skeleton_on_meta(model), pretrained.new, pretrained.initialise, seed)
        for name, value in new.items():
            part = own_part(module.get_parameter(name))
            part.local.copy_(value[part.slices()])
    left = shortened([name for name, tensor in [*module.named_parameters(), *buffers.items()] if tensor.is_meta])
    require(not left, f"{left} still on meta, without a value: skeleton() must make buffers real")


def _pieces(files: WeightFiles, stored: Stored, name: str, shape: tuple[int, ...], part: Slice) -> Iterator[Any]:
    """The values of ``part``, a few rows at a time: which rows of it, and the tensor."""
    if not part.local.numel():  # more ranks than rows
        return
    whole = None if stored.transform is None else stored.transform(files.read(stored.file, stored.key))
    found = files.shape(stored.file, stored.key) if whole is None else tuple(whole.shape)
    require(found == shape, f"{stored.key} in {stored.file} is {found}, but {name} of the model is {shape}")
    if whole is not None:
        yield ..., whole[part.slices()]
        return
    if not shape:
        yield ..., files.read(stored.file, stored.key)
        return
    first, *others = part.slices()
    step = max(1, PIECE // max(1, part.local[:1].numel()))
    for start in range(first.start, first.stop, step):
        stop = min(start + step, first.stop)
        value = files.read(stored.file, stored.key, (slice(start, stop), *others))
        yield slice(start - first.start, stop - first.start), value


def _codes(files: WeightFiles, stored: Stored, name: str, layer: NF4Linear, part: Slice) -> Iterator[Any]:
    """The codes of ``part`` in pieces, with their rows: the same on any number of ranks and under any precision."""
    first, count, width = part.offset[0], len(part.local), layer.shape[1]
    for start in range(first, first + count, AT_ONCE):
        stop = min(start + AT_ONCE, first + count)
        begin, end = start * GROUP, min(stop * GROUP, math.prod(layer.shape))
        lines = slice(begin // width, -(-end // width))
        wanted = Slice(torch.empty(lines.stop - lines.start, width, device="meta"), (lines.start, 0))
        read = torch.cat([value for _, value in _pieces(files, stored, name, layer.shape, wanted)]).flatten()
        value = read[begin - lines.start * width : end - lines.start * width].to(part.local.device, torch.float32)
        if not value.isfinite().all():
            raise RecipeError(
                f"{stored.key} in {stored.file} has numbers that are not finite, which NF4 has no codes for: use "
                "model.lora.base full, or other weights"
            )
        yield slice(start - first, stop - first), quantise(value)


def draw_new(
    skeleton: nn.Module, names: Collection[str], initialise: Callable[[nn.Module], object] | None, seed: int
) -> dict[str, Tensor]:
    """The initial values of the parameters ``names``: float32, on the CPU, the same wherever and however they are used.

    They become real in the ``skeleton``, which is on meta; ``initialise`` as in :class:`~trainer.values.Pretrained`.

    Raises:
        RecipeError: naming a parameter that ``initialise`` leaves without a value.
    """
    values = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
        for name in names:
            empty = torch.full(skeleton.get_parameter(name).shape, torch.nan)
            values[name] = nn.Parameter(empty, requires_grad=False)
            _register(skeleton, name, values[name])
        torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would not be undone on a GPU
        if initialise is not None:
            initialise(skeleton)
            names = []
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            owner = skeleton.get_submodule(path)
            require(
                callable(getattr(owner, "reset_parameters", None)),
                f"{path or 'the module'} is new, and {type(owner).__name__} has no reset_parameters(): "
                "give Pretrained(initialise=...) for it",
            )
            owner.reset_parameters()  # type: ignore[operator]
    empty_ones = [name for name, value in values.items() if value.isnan().any()]
    require(not empty_ones, f"{shortened(empty_ones)} are new, and pretrained().initialise gives them no values")
    return {name: value.detach() for name, value in values.items()}
