"""Log-probabilities of preferences before training: computed once, cached by content, and kept with the samples.

They are data, so no second model is in memory. A model with new adapters computes what its base computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from trainer.contract import Data, splits_of
from trainer.data.cache import cache_folder, hash_of, read_cache_json, write_cache_json
from trainer.engine.cut import Cut, cut_batch, data_parallel_rank
from trainer.engine.data_feed import evaluation_micro_batches
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import Quarantine
from trainer.engine.window import MicroBatch
from trainer.models.causal import CausalLM
from trainer.run.collectives import all_gather_json, run_on_rank_zero
from trainer.run.session import Session, loader_of
from trainer.system.files import hash_file
from trainer.system.status_line import show_status
from trainer.values import Loss

BLOCK = 256  # pairs that are computed and cached together: an interrupted run continues after the last whole block
NO_EFFECT = ("_name_or_path", "transformers_version", "architectures", "use_cache")  # in the key of the cache


def compute_reference(session: Session, forward: Forward, say: Callable[[str], None]) -> None:
    """Set ``reference`` of every split to what ``forward``, still untrained, computes. A collective."""
    recipe, fabric = session.recipe, session.fabric
    model, data = recipe.model, recipe.data
    if not isinstance(model, CausalLM) or not model.needs_reference:
        return
    from trainer.data.language_samples import Pairs  # imports datasets
    from trainer.models.preference import ReferenceLogProbs

    computes = Forward(fabric, ReferenceLogProbs(model), forward.module)
    key = run_on_rank_zero(fabric, partial(_key_of_model, session, model))
    for name, split in splits_of(data).items():
        assert isinstance(split, Pairs)
        folder = _folder(data) / hash_of(key, run_on_rank_zero(fabric, split.fingerprint))
        new = 0
        for start in range(0, len(split), BLOCK):
            pairs, note = range(start, min(start + BLOCK, len(split))), folder / f"{start}.json"
            values = run_on_rank_zero(fabric, partial(read_cache_json, note))
            if values is None:
                show_status(f"reference log-probabilities of {name}: {start:,} of {len(split):,} pairs")
                values = _compute(session, computes, split, name, pairs)
                new += len(pairs)
                if session.is_first:
                    write_cache_json(note, values)
            split.reference[start : start + len(pairs)] = values
        known = "" if new == len(split) else f", {len(split) - new:,} of them from the cache"
        what = f"reference log-probabilities of {len(split):,} {name} pairs{known}"
        say(f"model.loss={model.loss}: {what}; no second model is in memory")


def _folder(data: Data) -> Path:
    return cache_folder(getattr(data, "cache_dir", None)) / "reference"


def _key_of_model(session: Session, model: CausalLM) -> str:
    """Hash everything except the samples that determines the log-probabilities."""
    memory = session.plan.memory
    config = {name: value for name, value in model._configuration().to_dict().items() if name not in NO_EFFECT}
    weights = [hash_file(path) for path in model.weight_files()]
    drawn = None if weights else [session.recipe.seed, model.lora.rank, model.lora.targets]
    versions = torch.__version__, transformers.__version__
    precision = memory.precision, memory.matmul_precision
    return hash_of(type(model).__qualname__, str(config), weights, drawn, model.lora.base, *versions, *precision)


def _compute(session: Session, forward: Forward, split: Any, name: str, pairs: range) -> list[list[float]]:
    """Return the log-probabilities of ``pairs``, computed by all ranks in micro-batches of the size of training."""
    cut, memory, rank = session.plan.initial_cut, session.recipe.memory, session.fabric.global_rank
    share, shares = data_parallel_rank(memory, rank, session.fabric.world_size)
    cut = Cut(len(pairs), cut.micro_batch_size, 1, cut.micro_batch_tokens)
    pieces = cut_batch(pairs, cut, shares, split.lengths, session.recipe.model.packs())  # type: ignore[attr-defined]
    found = _Collected()

    def micro_batches() -> Any:
        loader = loader_of(session, split)
        for micro in evaluation_micro_batches(name, pieces, loader, Quarantine(limit=None), share, shares):
            session.monitor.batch, found.micro = micro.batch, micro
            yield micro

    own = evaluate(forward, micro_batches(), found)
    values = {int(index): value for part in all_gather_json(session.fabric, own) for index, value in part.items()}
    return [values[index] for index in pairs]


class _Collected:
    """The log-probabilities of the pairs of this rank, by index; interface of the metrics of ``evaluate``."""

    micro: MicroBatch

    def reset(self) -> None:
        self.values: dict[int, list[float]] = {}

    def update(self, loss: Loss) -> None:
        assert loss.logits is not None
        self.values |= dict(zip(self.micro.indices, loss.logits.tolist(), strict=True))

    def compute(self) -> dict[int, list[float]]:
        return self.values
