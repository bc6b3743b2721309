"""Collectives as a trace sees them: what each operation is, and who takes part."""

from __future__ import annotations

from typing import Any

import torch

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "reduce_scatter",  # as many bytes
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Operations of c10d and its functional twin, by what they are."""


def group_among(values: list[Any]) -> tuple[int, int]:
    """How many ranks the process group among the arguments of a collective has, and how far apart they are.

    ``(0, 1)``, which stands for all ranks, where there is no group among them.
    """
    for value in values:
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(value))
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return 0, 1
