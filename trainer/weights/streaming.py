"""Loads safetensors files into a module that was built on meta: tensor by tensor, each rank only its slices."""

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
from trainer.system.text import format_names
from trainer.values import StoredTensor
from trainer.weights.nf4 import CHUNK_ROWS, WEIGHTS_PER_ROW, NF4Linear, quantise

if TYPE_CHECKING:
    from trainer.contract import Streamable

MAX_INDEX_BYTES, PIECE_ELEMENTS = 64 * 2**20, 1 << 22
"""Max bytes of an index file; and elements copied at a time, which bounds the extra memory of a dtype conversion."""

SAFETENSORS_FILE, SAFETENSORS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class WeightFiles(ExitStack):
    """Safetensors files, opened once and memory-mapped, so that only the requested slices are read."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def shape(self, file: Path, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header of its file."""
        return tuple(self._slice(file, key).get_shape())

    def read(self, file: Path, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read a slice of the tensor ``key`` to the CPU in its stored dtype; all of it without ``index``."""
        return self._slice(file, key)[index if index else ...]

    def _slice(self, file: Path, key: str) -> Any:
        try:
            return self.open(file).get_slice(key)
        except SafetensorError as error:
            raise RecipeError(f"{file} has no tensor {key}: {error}") from error

    def open(self, file: Path) -> Any:
        if file not in self._opened:
            require(file.is_file(), f"{file} does not exist: give the path of a safetensors file")
            try:
                self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                raise RecipeError(f"{file} is corrupt or not a safetensors file: {error}") from error
        return self._opened[file]


def tensors_in(path: str | Path) -> dict[str, tuple[StoredTensor, tuple[int, ...]]]:
    """Return place and shape of every tensor in ``path`` by name. Only headers are read.

    ``path`` is a safetensors file, an index of shards, or a folder with one of them. A bad file raises ``RecipeError``.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (SAFETENSORS_FILE, SAFETENSORS_INDEX_FILE) if (path / name).is_file()]
        names = f"{SAFETENSORS_FILE} nor {SAFETENSORS_INDEX_FILE}"
        require(bool(found), f"{path} has neither {names}: weights can only be streamed from safetensors")
        path = found[0]
    with WeightFiles() as files:
        places = _places(path) if path.suffix == ".json" else dict.fromkeys(files.open(path).keys(), path)
        return {key: (StoredTensor(file, key), files.shape(file, key)) for key, file in places.items()}


def _places(path: Path) -> dict[str, Path]:
    try:
        index = dict(json.loads(read_regular(path, MAX_INDEX_BYTES))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path} is corrupt or not an index of safetensors files: {error!r}") from error
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RecipeError(f"{path} names {name!r}: shards must be .safetensors files in the same folder")
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


def skeleton_on_meta(model: Streamable) -> nn.Module:
    """Build the adapted skeleton of ``model`` with parameters on meta and real buffers on the CPU."""
    return on_meta(lambda: model.adapt(model.skeleton()))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Call ``build`` with parameters on meta and real buffers on the CPU."""
    from accelerate import init_empty_weights  # imported here, because it takes 0.1 s and is rarely needed

    with init_empty_weights(include_buffers=False), torch.device("cpu"):
        module = build()
    # Registering a parameter on meta creates a new object, but tied parameters still share their storage.
    first: dict[tuple, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.shape, parameter.stride())
        _register(module, name, first.setdefault(place, parameter))
    # If transformers pads a tied bias, one of the two gets a separate storage.
    for name, source in getattr(module, "all_tied_weights_keys", {}).items():
        _register(module, name, module.get_parameter(source))
    return module


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of every parameter: several if it is tied, otherwise one."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


class PackedSlice(NamedTuple):
    """The place of a parameter's rows in a packed parameter of the model as built; it is one third of that."""

    name: str  # name of the packed parameter
    number: int  # index of the third, from 0

    def to_packed(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Convert the ``offset`` in a parameter of ``shape`` to that in the packed one; also return its shape."""
        return (offset[0] + self.number * shape[0], *offset[1:]), (3 * shape[0], *shape[1:])


def find_packed_slices(module: nn.Module) -> dict[str, PackedSlice]:
    """Return the parameters that are parts of one packed parameter of the model as built (``SplitAttention``)."""
    return {
        f"{prefix}.{name}": PackedSlice(f"{prefix}.{packed}", number)
        for prefix, part in module.named_modules()
        for name, (packed, number) in getattr(part, "packed_names", {}).items()
    }


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._parameters[leaf] = parameter


def build_streamed(model: Streamable) -> nn.Module:
    """Build the module on the default device with pretrained weights. New parameters use torch's current seed."""
    module = skeleton_on_meta(model)
    allocate(module, torch.get_default_device())
    load_into(module, model, torch.initial_seed())
    return module


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Allocate every parameter on ``device``, uninitialised. Tied parameters stay tied, sharded ones sharded.

    Real buffers move too, unless parameters are sharded: ``fully_shard`` has put them on the compute device, which
    differs from the device of offloaded parameters. Floating-point tensors get ``dtype``; ``None`` keeps theirs.
    """
    groups = tied_names(module)
    sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    buffers = {id(buffer) for buffer in module.buffers()}
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) in buffers:
            return tensor  # its value may be unknown, which fill() rejects
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not tensor.is_meta:
            return tensor.to(tensor.device if sharded else device, wanted)
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device, dtype=wanted)
        return made[id(tensor)]

    module._apply(real)  # FSDP hooks into _apply and updates its references to the parameters
    for first, *others in groups:
        for name in others:
            _register(module, name, module.get_parameter(first))


def move_to_meta(module: nn.Module) -> dict[str, Tensor]:
    """Move the parameters to meta and return their values by name, once each, for :func:`restore_from_meta`."""
    groups, buffers = tied_names(module), {id(buffer) for buffer in module.buffers()}
    values = {names[0]: module.get_parameter(names[0]).detach() for names in groups}
    module._apply(lambda tensor: tensor if id(tensor) in buffers else torch.empty_like(tensor, device="meta"))
    for first, *others in groups:
        for name in others:
            _register(module, name, module.get_parameter(first))
    return values


@torch.no_grad()
def restore_from_meta(module: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Allocate the parameters of ``module`` on ``device``, sharded or not, with ``values``. This empties ``values``."""
    allocate(module, device)
    for name in [*values]:
        part = local_slice(module.get_parameter(name))
        part.local.copy_(values.pop(name)[part.as_index()])


class LocalSlice(NamedTuple):
    """This rank's part of a tensor: its memory, and its offset in the whole along every dimension."""

    local: Tensor
    offset: tuple[int, ...]

    def as_index(self) -> tuple[slice, ...]:
        """Return the slices of the whole that this part covers."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.local.shape, strict=True))


def local_slice(tensor: Tensor) -> LocalSlice:
    """Return this rank's part of ``tensor``: its shard, or all of it if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return LocalSlice(tensor, (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalSlice(tensor.to_local(), tuple(offset))


@torch.no_grad()
def load_into(module: nn.Module, model: Streamable, seed: int) -> None:
    """Fill ``module``, an allocated skeleton of ``model``, sharded or not; ``seed`` draws new parameters."""
    pretrained = model.pretrained()
    groups, buffers, parts = tied_names(module), dict(module.named_buffers()), find_packed_slices(module)
    built = [[parts[name].name if name in parts else name for name in names] for names in groups]
    known = pretrained.stored.keys() | set(pretrained.new)
    lost = format_names([names[0] for names in built if not known.intersection(names)])
    require(not lost, f"{lost} have no value: pretrained() must name them among stored or new parameters")
    unknown = format_names(sorted(known.difference(*built, buffers)))
    require(not unknown, f"pretrained() names {unknown}, which the module does not have")
    with WeightFiles() as files:
        for names, as_built in [*zip(groups, built, strict=True), *(([name], [name]) for name in buffers)]:
            stored = {name: pretrained.stored[name] for name in as_built if name in pretrained.stored}
            tensor = buffers[names[0]] if names[0] in buffers else module.get_parameter(names[0])
            part, shape = local_slice(tensor), tuple(tensor.shape)
            path, _, leaf = names[0].rpartition(".")
            layer: Any = module.get_submodule(path)
            if names[0] in parts:
                offset, shape = parts[names[0]].to_packed(part.offset, shape)
                part = LocalSlice(part.local, offset)
            coded = leaf == "codes" and isinstance(layer, NF4Linear)
            for number, (name, place) in enumerate(stored.items()):
                iterate: Any = _iter_nf4_codes if coded else _iter_pieces
                for rows, value in iterate(files, place, name, layer if coded else shape, part):
                    if number == 0:
                        part.local[rows].copy_(value)
                        continue
                    if not torch.equal(part.local[rows].cpu(), value.to(tensor.dtype)):
                        tied = f"{names[0]} and {name} are one parameter of the model"
                        raise RecipeError(f"{tied}, but differ in {place.file}")
    if pretrained.new:
        new = init_new_parameters(skeleton_on_meta(model), pretrained.new, pretrained.initialise, seed)
        for name, value in new.items():
            part = local_slice(module.get_parameter(name))
            part.local.copy_(value[part.as_index()])
    left = format_names([name for name, tensor in [*module.named_parameters(), *buffers.items()] if tensor.is_meta])
    require(not left, f"{left} are still on meta without a value: skeleton() must create real buffers")


def _iter_pieces(
    files: WeightFiles, stored: StoredTensor, name: str, shape: tuple[int, ...], part: LocalSlice
) -> Iterator[Any]:
    """Yield the values of ``part``, a few rows at a time: the rows, and the tensor."""
    if not part.local.numel():  # more ranks than rows
        return
    whole = None if stored.transform is None else stored.transform(files.read(stored.file, stored.key))
    found = files.shape(stored.file, stored.key) if whole is None else tuple(whole.shape)
    require(found == shape, f"{stored.key} in {stored.file} has shape {found}, but {name} of the model has {shape}")
    if whole is not None:
        yield ..., whole[part.as_index()]
        return
    if not shape:
        yield ..., files.read(stored.file, stored.key)
        return
    first, *others = part.as_index()
    step = max(1, PIECE_ELEMENTS // max(1, part.local[:1].numel()))
    for start in range(first.start, first.stop, step):
        stop = min(start + step, first.stop)
        value = files.read(stored.file, stored.key, (slice(start, stop), *others))
        yield slice(start - first.start, stop - first.start), value


def _iter_nf4_codes(
    files: WeightFiles, stored: StoredTensor, name: str, layer: NF4Linear, part: LocalSlice
) -> Iterator[Any]:
    """Yield the codes of ``part`` in pieces, with their rows. They do not depend on ranks or precision."""
    first, count, width = part.offset[0], len(part.local), layer.shape[1]
    for start in range(first, first + count, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, first + count)
        begin, end = start * WEIGHTS_PER_ROW, min(stop * WEIGHTS_PER_ROW, math.prod(layer.shape))
        lines = slice(begin // width, -(-end // width))
        wanted = LocalSlice(torch.empty(lines.stop - lines.start, width, device="meta"), (lines.start, 0))
        read = torch.cat([value for _, value in _iter_pieces(files, stored, name, layer.shape, wanted)]).flatten()
        value = read[begin - lines.start * width : end - lines.start * width].to(part.local.device, torch.float32)
        cause = f"{stored.key} in {stored.file} has values that are not finite, which NF4 cannot encode"
        require(bool(value.isfinite().all()), f"{cause}: use model.lora.base full, or other weights")
        yield slice(start - first, stop - first), quantise(value)


def init_new_parameters(
    skeleton: nn.Module, names: Collection[str], initialise: Callable[[nn.Module], object] | None, seed: int
) -> dict[str, Tensor]:
    """Draw initial values of the parameters ``names``: float32 on the CPU, independent of device, dtype and sharding.

    They become real in the ``skeleton``, which is on meta. ``PretrainedWeights.initialise`` must set all of them.
    """
    values = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32), torch.no_grad():
        for name in names:
            values[name] = nn.Parameter(torch.full(skeleton.get_parameter(name).shape, torch.nan), requires_grad=False)
            _register(skeleton, name, values[name])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, which fork_rng does not restore
        if initialise is not None:
            initialise(skeleton)
            names = []
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            owner = skeleton.get_submodule(path)
            if not callable(getattr(owner, "reset_parameters", None)):
                new = f"{path or 'the module'} is new, and {type(owner).__name__} has no reset_parameters()"
                raise RecipeError(f"{new}: give PretrainedWeights(initialise=...) for it")
            owner.reset_parameters()  # type: ignore[operator]
    unset = format_names([name for name, value in values.items() if value.isnan().any()])
    require(not unset, f"{unset} are new, and pretrained().initialise does not set their values")
    return {name: value.detach() for name, value in values.items()}
