"""``optim.name muon``: matrices get orthogonalized updates, each computed once, whole, by one rank.

Every rank updates the momentum of its shards. The result, rounded to bfloat16 as in ``torch.optim.Muon``, goes to the
rank that owns the matrix, which runs the Newton-Schulz iteration. Each rank gets back the rows that it holds. See
docs/muon.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from trainer.errors import require
from trainer.memory.custom_optimizer import build_custom_optimizer
from trainer.memory.parameter_groups import UpdateRule, to_param_groups
from trainer.memory.sharding import TENSOR, local_shard
from trainer.recipe import Optim
from trainer.weights.streaming import local_slice

BUCKET = 2**23  # max elements of the matrices that one exchange moves, unless one per owner is more (16 MB in bfloat16)

DEFAULTS = {"adjust_lr_fn": "match_rms_adamw"}  # so that one learning rate fits the matrices and AdamW's parameters

Item = tuple[Tensor, dict[str, Any]]  # a tensor to update, and its group


@dataclass(frozen=True)
class Matrix:
    """A matrix that one rank orthogonalizes: where its rows are, and where it is computed.

    Ranks that hold one copy are neighbours: rank r holds part r % ``shards`` of copy r // ``shards``.
    """

    shape: torch.Size
    shards: int  # number of ranks that hold one copy
    owner: int  # the rank that orthogonalizes it
    device: torch.device
    layout: DTensor | None = None  # with tensor parallelism: where its parts are; all ranks get all of them first

    def size(self, rank: int) -> int:
        """Return the number of elements that ``rank`` holds."""
        return Shard.local_shard_size_and_offset(self.shape[0], self.shards, rank % self.shards)[0] * self.shape[1]

    def is_sent(self, source: int, to: int) -> bool:
        """Return whether ``source`` sends its rows to an owner ``to``: they hold parts of the same copy."""
        return source // self.shards == to // self.shards


class Muon(Optimizer):
    """Muon for the matrices that ``rules`` name, AdamW for all other tensors, with one state.

    The groups of matrices have the settings of ``torch.optim.Muon``. All ranks must have gradients of the same tensors.
    """

    def __init__(self, rules: Mapping[Tensor, UpdateRule], optim: Optim, **adamw: Any) -> None:
        found = {tensor: rule for tensor, rule in rules.items() if rule.matrix is not None}
        others = {tensor: rule for tensor, rule in rules.items() if rule.matrix is None}
        require(bool(found), "optim.name=muon found no trained matrix in the blocks of the model: use adamw")
        for name, count in Counter(rule.name for rule in found.values() if rule.name).items():
            cause = f"optim.name=muon needs {name} as one matrix, but memory.tensor_parallel cuts it into {count}"
            require(count == 1, f"{cause}: use memory.strategy fsdp without it, or adamw")
        options: dict[str, Any] = {"betas": None, "eps": None, "arguments": DEFAULTS | optim.arguments}
        as_torch = replace(optim, name="torch.optim.Muon", **options)
        muon = build_custom_optimizer(to_param_groups(found, optim.lr), as_torch)
        # A group without parameters, because AdamW rejects a list without groups.
        self.adamw = AdamW(to_param_groups(others, optim.lr) or [{"params": []}], lr=optim.lr, **adamw)
        super().__init__([*muon.param_groups, *(g for g in self.adamw.param_groups if g["params"])], {})
        is_alone = not torch.distributed.is_initialized()
        self.ranks = 1 if is_alone else torch.distributed.get_world_size()
        self.rank = 0 if is_alone else torch.distributed.get_rank()
        self.matrices = dict(zip(found, self._assign([rule.matrix for rule in found.values()]), strict=True))

    def _assign(self, parameters: Sequence[Any]) -> list[Matrix]:
        """Return where each matrix is and who owns it: the most costly first, to the rank with the least work."""
        loads, found = [0] * self.ranks, dict[int, Matrix]()
        for number in sorted(range(len(parameters)), key=lambda number: -newton_schulz_cost(parameters[number].shape)):
            parameter, owner = parameters[number], loads.index(min(loads))
            loads[owner] += newton_schulz_cost(parameter.shape)
            shards, device, layout = 1, parameter.device, None
            if isinstance(parameter, DTensor):  # with offloaded weights the mesh has the device that computes
                mesh, device = parameter.device_mesh, torch.device(parameter.device_mesh.device_type)
                shards = max(mesh.size(at) if kind.is_shard() else 1 for at, kind in enumerate(parameter.placements))
                if TENSOR in (mesh.mesh_dim_names or ()) or mesh.size() < self.ranks:
                    shards, layout = 1, parameter
            found[number] = Matrix(parameter.shape, shards, owner, device, layout)
        return [found[number] for number in range(len(parameters))]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for turn in self._turns([group for group in self.param_groups if "ns_steps" in group]):
            self._update(turn)
        # Loading a state dict replaces these attributes of this optimizer, so AdamW gets them again.
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if "ns_steps" not in group]
        self.adamw.step()

    def _turns(self, groups: Sequence[dict[str, Any]]) -> Iterator[list[Item]]:
        """Yield the matrices with gradients in turns, in which every owner has about the same work."""
        items = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        items.sort(key=lambda item: -newton_schulz_cost(self.matrices[item[0]].shape))
        queues = [[item for item in items if self.matrices[item[0]].owner == rank] for rank in range(self.ranks)]
        turn: list[Item] = []
        for row in zip_longest(*queues):
            found = [item for item in row if item is not None]
            elements = sum(self.matrices[p].shape.numel() for p, _ in (*turn, *found))
            if turn and (self.ranks == 1 or elements > BUCKET):
                yield turn
                turn = []
            turn += found
        if turn:
            yield turn

    def _update(self, turn: Sequence[Item]) -> None:
        matrices = [self.matrices[p] for p, _ in turn]
        wholes = self._gather(matrices, [self._directions(p, group, self.matrices[p]) for p, group in turn])
        mine = [group for (_, group), matrix in zip(turn, matrices, strict=True) if matrix.owner == self.rank]
        settings = [(group["ns_coefficients"], group["ns_steps"], group["eps"]) for group in mine]
        ready = [_zeropower_via_newtonschulz(wholes.pop(0), *options) for options in settings]
        for (parameter, group), matrix, change in zip(turn, matrices, self._scatter(matrices, ready), strict=True):
            weights, rate = local_shard(parameter.detach()), float(group["lr"])
            weights.mul_(1 - rate * group["weight_decay"])
            length = _adjust_lr(rate, group["adjust_lr_fn"], matrix.shape)
            if (layout := matrix.layout) is not None:
                change = change.view(layout.shape)[local_slice(layout).as_index()]
            weights.add_(change.view(weights.shape).to(weights.device), alpha=-length)

    def _directions(self, parameter: Tensor, group: Mapping[str, Any], matrix: Matrix) -> Tensor:
        """Update the momentum that this rank holds; return what is to be orthogonalized, flat and in bfloat16."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, momentum = local_shard(parameter.grad), local_shard(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        change = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        change = change.to(torch.bfloat16, copy=change is momentum)  # torch 2.11 divides it in place
        if (layout := matrix.layout) is not None:
            size: Any = {"shape": layout.shape, "stride": layout.stride()}
            parts = DTensor.from_local(change, layout.device_mesh, layout.placements, run_check=False, **size)
            change = parts.full_tensor()
        return change.to(matrix.device).reshape(-1)

    def _gather(self, matrices: Sequence[Matrix], parts: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's ``parts`` of all matrices to their owners; return the whole matrices that it owns."""
        mine, ranks = [matrix for matrix in matrices if matrix.owner == self.rank], range(self.ranks)
        pairs = list(zip(matrices, parts, strict=True))
        sent = [[p for m, p in pairs if m.owner == rank and m.is_sent(self.rank, rank)] for rank in ranks]
        sizes = [[m.size(rank) for m in mine if m.is_sent(rank, self.rank)] for rank in ranks]
        is_whole = all(matrix.shards == 1 for matrix in matrices)  # every rank has every row
        received = [iter(part) for part in (sent if is_whole else exchange(sent, sizes, parts[0]))]
        rows = [[next(received[rank]) for rank in ranks if m.is_sent(rank, self.rank)] for m in mine]
        wholes = [found[0] if len(found) == 1 else torch.cat(found) for found in rows]
        return [whole.view(matrix.shape) for whole, matrix in zip(wholes, mine, strict=True)]

    def _scatter(self, matrices: Sequence[Matrix], mine: Sequence[Tensor]) -> list[Tensor]:
        """Send the matrices that this rank owns, ``mine``, to all; return its rows of all matrices."""
        owned, ranks = [matrix for matrix in matrices if matrix.owner == self.rank], range(self.ranks)
        flat = [matrix.contiguous().view(-1) for matrix in mine]
        cuts = [[m.size(part) for part in range(m.shards)] for m in owned]
        pieces = [whole.split(cut) for whole, cut in zip(flat, cuts, strict=True)]
        sent = [[cut[rank % len(cut)] for cut in pieces] for rank in ranks]
        sizes = [[m.size(self.rank) for m in matrices if m.owner == rank] for rank in ranks]
        like = torch.empty(0, dtype=torch.bfloat16, device=matrices[0].device)
        received = [iter(part) for part in (sent if self.ranks == 1 else exchange(sent, sizes, like))]
        return [next(received[matrix.owner]) for matrix in matrices]


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Return the FLOPs of an iteration on a matrix: two products with it, and one of its Gram matrix with itself."""
    small, large = sorted(shape)
    return 4 * small**2 * large + 2 * small**3


def exchange(sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor) -> list[list[Tensor]]:
    """Send the flat tensors ``sent[rank]`` to each rank; return those that it sent, of ``sizes[rank]``."""
    given = [sum(tensor.numel() for tensor in part) for part in sent]
    taken = [sum(part) for part in sizes]
    flat = torch.cat([like[:0], *(tensor for part in sent for tensor in part)])
    received = like.new_empty(sum(taken))
    torch.distributed.all_to_all_single(received, flat, taken, given)
    return [list(part.split(own)) for part, own in zip(received.split(taken), map(list, sizes), strict=True)]
