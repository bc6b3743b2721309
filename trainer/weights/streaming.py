"""Weights from safetensors files into a module that was made on meta: tensor by tensor, each rank its own slices."""

from __future__ import annotations

import json
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
from trainer.values import Pretrained, Stored
from trainer.weights.files import shortened

if TYPE_CHECKING:
    from trainer.contract import Model

MOST_INDEX = 64 * 2**20
"""Bytes of the list of tensors and the files that they are in."""

PIECE = 1 << 22
"""A tensor is copied this many elements at a time: all that a conversion of its type may need beside the weights."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Safetensors files, opened once and mapped: of a tensor only what is asked for is read."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._opened.clear()

    def keys(self, file: Path) -> list[str]:
        """The names of the tensors in ``file``."""
        return list(self._open(file).keys())

    def shape(self, file: Path, key: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header of its file."""
        return tuple(self._slice(file, key).get_shape())

    def read(self, file: Path, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A slice of the tensor ``key`` on the CPU, as stored; the whole without ``index``."""
        return self._slice(file, key)[index if index else ...]

    def _slice(self, file: Path, key: str) -> Any:
        try:
            return self._open(file).get_slice(key)
        except SafetensorError as error:
            raise RecipeError(f"{file} has no tensor {key}: {error}") from error

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            require(file.is_file(), f"{file} is not there: give the path of a safetensors file")
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                raise RecipeError(f"{file} is corrupt or not a safetensors file: {error}") from error
        return self._opened[file]


def stored_in(path: str | Path) -> dict[str, tuple[Stored, tuple[int, ...]]]:
    """Every tensor that is kept in ``path``: by name where it is, and its shape. Reads headers only.

    Args:
        path: a safetensors file, an index of shards (``*.safetensors.index.json``), or a folder with
            ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        RecipeError: naming the file that is missing, corrupt or not safetensors.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
        require(len(found) > 0, f"{path} has neither {SINGLE} nor {INDEX}: weights are streamed from safetensors only")
        path = found[0]
    with WeightFiles() as files:
        if path.suffix != ".json":
            places = dict.fromkeys(files.keys(path), path)
        else:
            places = {key: path.parent / name for key, name in _index(path).items()}
        return {key: (Stored(file, key), files.shape(file, key)) for key, file in places.items()}


def _index(path: Path) -> dict[str, str]:
    try:
        index = dict(json.loads(read_regular(path, MOST_INDEX))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path} is corrupt or not an index of safetensors files: {error!r}") from error
    for name in index.values():
        require(
            isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors"),
            f"{path} names {name!r}: shards must be .safetensors files in the same folder",
        )
    return index


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
    """The skeleton of ``model`` with its parameters on meta and its buffers real, on the CPU."""
    return on_meta(model.skeleton)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes, with its parameters on meta and its buffers real, on the CPU."""
    from accelerate import init_empty_weights  # a tenth of a second, for what is rarely done

    with init_empty_weights(include_buffers=False), torch.device("cpu"):
        module = build()
    _tie_again(module)
    return module


def _tie_again(module: nn.Module) -> None:
    """Registering a parameter on meta makes a new object of it, but tied ones still share their storage."""
    first: dict[tuple, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.shape, parameter.stride())
        kept = first.setdefault(place, parameter)
        if kept is not parameter:
            owner, leaf = _owner(module, name)
            owner._parameters[leaf] = kept


def tied_names(module: nn.Module) -> list[list[str]]:
    """The names of every parameter: one, or several where it is tied."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def build_streamed(model: Model) -> nn.Module:
    """The module on the default device with its pretrained weights; what is new is drawn from torch's current seed."""
    module = skeleton_on_meta(model)
    allocate(module, torch.get_default_device())
    fill(module, model, torch.initial_seed())
    return module


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every parameter memory on ``device``, its values undefined; tied ones stay tied, sharded ones sharded.

    Real buffers move along, unless parameters are sharded: ``fully_shard`` has put them where they are computed with,
    which is not where offloaded parameters live.

    Args:
        module: with parameters on meta.
        device: of the parameters.
        dtype: of everything that is floating-point; ``None`` leaves types as they are.
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
        parameter = module.get_parameter(first)
        for name in others:
            owner, leaf = _owner(module, name)
            owner._parameters[leaf] = parameter


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
    """Fill the allocated ``module``, sharded or not, with the pretrained weights of ``model``.

    Args:
        module: a skeleton of ``model``, allocated.
        model: says where its weights come from.
        seed: of the parameters that no file has.

    Raises:
        RecipeError: naming what is missing, of another shape, or still on meta.
    """
    pretrained = model.pretrained()
    groups = tied_names(module)
    _require_complete(module, groups, pretrained)
    with WeightFiles() as files:
        for names in groups:
            known = [name for name in names if name in pretrained.stored]
            for name in known[:1]:
                _copy(files, pretrained.stored[name], name, module.get_parameter(name))
            for name in known[1:]:
                _require_equal(files, pretrained.stored[name], names[0], name, module.get_parameter(name))
        for name, buffer in module.named_buffers():
            if name in pretrained.stored:
                _copy(files, pretrained.stored[name], name, buffer)
    if pretrained.new:
        new = draw_new(skeleton_on_meta(model), pretrained.new, pretrained.initialise, seed)
        for name, value in new.items():
            part = own_part(module.get_parameter(name))
            part.local.copy_(value[part.slices()])
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    left = [name for name, tensor in tensors.items() if tensor.is_meta]
    require(not left, f"{shortened(left)} still on meta, without a value: skeleton() must make buffers real")


def _require_complete(module: nn.Module, groups: list[list[str]], pretrained: Pretrained) -> None:
    known = pretrained.stored.keys() | set(pretrained.new)
    lost = [names[0] for names in groups if not known.intersection(names)]
    require(
        not lost, f"no value is known for {shortened(lost)}: pretrained() must name them among stored or new parameters"
    )
    unknown = sorted(known - {name for names in groups for name in names} - dict(module.named_buffers()).keys())
    require(not unknown, f"pretrained() names {shortened(unknown)}, which the module does not have")


def _copy(files: WeightFiles, stored: Stored, name: str, tensor: Tensor) -> None:
    part = own_part(tensor)
    for rows, value in _pieces(files, stored, name, tensor.shape, part):
        part.local[rows].copy_(value)


def _require_equal(files: WeightFiles, stored: Stored, first: str, name: str, tensor: Tensor) -> None:
    part = own_part(tensor)
    for rows, value in _pieces(files, stored, name, tensor.shape, part):
        require(
            torch.equal(part.local[rows].cpu(), value.to(tensor.dtype)),
            f"{first} and {name} are one parameter of the model, but differ in {stored.file}",
        )


def _pieces(
    files: WeightFiles, stored: Stored, name: str, shape: torch.Size, part: Slice
) -> Iterator[tuple[Any, Tensor]]:
    """The values of ``part``, a few rows at a time: which rows of it, and the tensor."""
    if not part.local.numel():  # more ranks than rows
        return
    if stored.transform is not None:
        value = stored.transform(files.read(stored.file, stored.key))
        _require_shape(stored, name, tuple(value.shape), shape)
        yield ..., value[part.slices()]
        return
    _require_shape(stored, name, files.shape(stored.file, stored.key), shape)
    if not shape:
        yield ..., files.read(stored.file, stored.key)
        return
    first, *others = part.slices()
    step = max(1, PIECE // max(1, part.local[:1].numel()))
    for start in range(first.start, first.stop, step):
        stop = min(start + step, first.stop)
        yield (
            slice(start - first.start, stop - first.start),
            files.read(stored.file, stored.key, (slice(start, stop), *others)),
        )


def _require_shape(stored: Stored, name: str, found: tuple[int, ...], wanted: torch.Size) -> None:
    require(
        found == tuple(wanted),
        f"{stored.key} in {stored.file} is {found}, but {name} of the model is {tuple(wanted)}",
    )


def draw_new(
    skeleton: nn.Module, names: Collection[str], initialise: Callable[[nn.Module], object] | None, seed: int
) -> dict[str, Tensor]:
    """The initial values of the parameters ``names``: float32, on the CPU, the same wherever and however they are used.

    Args:
        skeleton: on meta; the named parameters become real.
        names: of new parameters.
        initialise: as in :class:`~trainer.values.Pretrained`.
        seed: of the values.

    Raises:
        RecipeError: naming a parameter that ``initialise`` leaves without a value.
    """
    values = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
        for name in names:
            owner, leaf = _owner(skeleton, name)
            empty = torch.full(skeleton.get_parameter(name).shape, torch.nan)
            values[name] = owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would not be undone on a GPU
        if initialise is not None:
            initialise(skeleton)
        else:
            _reset_owners(skeleton, names)
    empty_ones = [name for name, value in values.items() if value.isnan().any()]
    require(not empty_ones, f"{shortened(empty_ones)} are new, and pretrained().initialise gives them no values")
    return {name: value.detach() for name, value in values.items()}


def _reset_owners(skeleton: nn.Module, names: Collection[str]) -> None:
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        owner = skeleton.get_submodule(path)
        reset = getattr(owner, "reset_parameters", None)
        require(
            callable(reset),
            f"{path or 'the module'} is new, and {type(owner).__name__} has no reset_parameters(): "
            "give Pretrained(initialise=...) for it",
        )
        reset()  # type: ignore[misc]
