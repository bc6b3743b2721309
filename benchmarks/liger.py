"""Which models of transformers Liger's kernels compute: a certificate for each part of every architecture.

A tiny model of every architecture, with random weights and dropout, computes the loss of padded documents and its
gradients: in fp64 by transformers (the reference), and in fp32 and a half precision by transformers and with Liger's
kernels. A part (RMSNorm, rotary embedding, gated MLP) is certified if the kernels' error is at most ``MAX_RATIO`` times
that of transformers in the same precision, plus ``ROUNDINGS`` units. On a GPU the kernels run as they are, half
precision is bf16; without one they run in Triton's interpreter, and half precision is fp16: the interpreter has no
arithmetic in bf16.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # before Triton is imported

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

from common import Record
from packing import TYPES, Double, build, distances, documents, gradients, losses, padded, tiny
from torch import Tensor, nn

from trainer.models import liger
from trainer.models.liger import ARCHITECTURES, NORMS, use_kernels
from trainer.run.attention import record_attention_kernels

LENGTHS = (5, 1, 3)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TYPES_OF = {torch.float32: 2.0**-24, **({torch.bfloat16: 2.0**-8} if ON_GPU else {torch.float16: 2.0**-11})}
MAX_RATIO = 2.0
"""Of errors. A kernel rounds at most as often as the operations that it replaces, but elsewhere. Errors of both are
sums of the same number of roundings of random sign, so their ratio is near 1; a factor of 2 allows for chance."""
ROUNDINGS = 4
"""Units in the last place that are no error: for gradients that transformers happens to have nearly right."""
MAX_THEIRS = 100
"""Units of error up to which transformers' own is an error of rounding: with routes drawn at random it is not."""
DROPOUT = 0.25  # masks are those of the same seed, in every type


@dataclass
class Certificate:
    """What was found out about an architecture."""

    architecture: str
    parts: list[str] = field(default_factory=list)  # that are certified, each by itself and all together
    errors: dict[str, float] = field(default_factory=dict)  # of the certified parts together, by type
    theirs: dict[str, float] = field(default_factory=dict)  # of transformers, by type
    refused: dict[str, str] = field(default_factory=dict)  # parts that are there and not certified, and why
    seconds: float = 0.0


@cache
def interpret() -> None:
    """Let Liger's kernels run on a CPU. Triton's interpreter gets what they use and it lacks: scalars in fp32, as the
    compiler has them, and two functions of CUDA's own library."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def as_tensor(value: Any) -> Any:
        if type(value) is not float:
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = as_tensor
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)
    geglu.tanh = lambda value: 2 * tl.sigmoid(2 * value) - 1
    torch.cuda.is_available = lambda: True
    liger._takes = lambda *tensors: all(one.dtype in TYPES_OF for one in tensors)


def dropping(config: Any) -> Any:
    """``config`` with dropout wherever it has some."""
    for key, value in config.to_dict().items():
        if "drop" in key and type(value) in (int, float):
            setattr(config, key, DROPOUT)
    return config


class NotThere(Exception):
    """A module has none of the parts, or the kernels were not called for it."""


def computed(module: nn.Module, dtype: torch.dtype, parts: Sequence[str] = ()) -> dict[str, Tensor]:
    """The losses (named "") and gradients of ``module`` in ``dtype``, ``parts`` of it computed by Liger's kernels."""
    module = copy.deepcopy(module).to(DEVICE, dtype).train()
    with patch.dict(ARCHITECTURES, {module.config.model_type: tuple(parts)}):  # type: ignore[union-attr, dict-item]
        use_kernels(module, "auto")
    batch = {key: value.to(DEVICE) for key, value in padded(documents(lengths=LENGTHS)).items()}
    seen = record_attention_kernels(module)
    torch.manual_seed(0)
    each = losses(module, batch)
    if parts and len([name for name in seen if name.startswith("Liger")]) < len(parts):
        raise NotThere
    found = gradients(module, each.sum())
    return {key: value.double().cpu() for key, value in ({"": each.detach()} | found).items()}


def certify(kind: str) -> Certificate:
    """Try to certify the model type ``kind``, of a tiny configuration."""
    if not ON_GPU:
        interpret()
    began = time.perf_counter()
    module = build(dropping(tiny(kind)), None)
    found = Certificate(type(module).__name__)
    with Double():
        exact = computed(module, torch.float64)
    theirs = {dtype: computed(module, dtype) for dtype in TYPES_OF}
    limits = {dtype: max(distances(one, exact).values()) for dtype, one in theirs.items()}
    found.theirs = {str(dtype).removeprefix("torch."): limit for dtype, limit in limits.items()}
    if any(limit > MAX_THEIRS * TYPES_OF[dtype] for dtype, limit in limits.items()):
        found.refused = dict.fromkeys(("RMSNorm", "rotary", "mlp"), "transformers' own gradient is not that in fp64")
        return found
    limits = {dtype: MAX_RATIO * limit + ROUNDINGS * TYPES_OF[dtype] for dtype, limit in limits.items()}
    apart: dict[str, float] = {}  # in half precision, from what transformers has
    for part in (*NORMS, "rotary", "mlp"):
        try:
            for dtype, limit in limits.items():
                ours = computed(module, dtype, [part])
                apart[part] = max(distances(ours, theirs[dtype]).values())  # of half precision at the end
                if not (worst := max(distances(ours, exact).values())) <= limit:
                    found.refused[part] = f"gradient off by {worst:.0e} in {dtype}"
                    del apart[part]
                    break
        except NotThere:
            continue
        except Exception as error:  # of shapes that the kernels do not take
            apart.pop(part, None)
            found.refused[part] = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
    norms = sorted((part for part in apart if part in NORMS), key=lambda part: apart[part])
    parts = [*norms[:1], *(part for part in apart if part not in NORMS)]
    if norms:
        found.refused = {part: why for part, why in found.refused.items() if part not in NORMS}
    if parts:
        errors = {dtype: max(distances(computed(module, dtype, parts), exact).values()) for dtype in TYPES_OF}
        found.errors = {str(dtype).removeprefix("torch."): error for dtype, error in errors.items()}
        found.parts = parts if all(errors[dtype] <= limit for dtype, limit in limits.items()) else []
    found.seconds = round(time.perf_counter() - began, 2)
    return found


def table(certificates: dict[str, dict[str, Any]]) -> str:
    """Of what the record has, the rows as docs/techniques/kernels.md shows them."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind, row in sorted(certificates.items()):
        rows.setdefault(tuple(row["parts"]), []).append(f"`{kind}`")
    del rows[()]
    lines = [
        f"| {', '.join(f'`{part}`' for part in parts)} | {', '.join(kinds)} |"
        for parts, kinds in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]
    return "\n".join(["| parts | model types |", "|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help=f"model types to certify (default: {len(TYPES)} of them)")
    wanted = parser.parse_args().types
    rows = {}
    for kind in wanted or TYPES:
        rows[kind] = asdict(found := certify(kind))
        print(
            f"{kind:20} {' '.join(found.parts) or 'none':25} {found.errors} {found.theirs} {found.refused}", flush=True
        )
    if not wanted and not ON_GPU:
        settings = {"lengths": LENGTHS, "max_ratio": MAX_RATIO, "roundings": ROUNDINGS, "dropout": DROPOUT}
        Record("liger", settings).write(certificates=rows, complete=True)
        print(table(rows))


if __name__ == "__main__":
    main()
