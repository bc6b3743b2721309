"""Log-probabilities of preferences before training: computed once, cached by content, and kept with the samples.

They are data, so no second model is in memory. A model with new adapters computes what its base computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trainer.contract import Model, Samples, splits_of
from trainer.data import Preferences
from trainer.data.cache import cache_folder, hash_of, read_cache_json, write_cache_json
from trainer.engine.cut import Cut, cut_batch, data_parallel_rank
from trainer.engine.data_feed import evaluation_micro_batches
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import Quarantine
from trainer.engine.window import MicroBatch
from trainer.errors import RecipeError, require
from trainer.models.causal import CausalLM
from trainer.run.collectives import all_gather_json, run_on_rank_zero
from trainer.run.session import Session, loader_of
from trainer.system.files import hash_file
from trainer.system.status_line import show_status

BLOCK = 256  # pairs that are computed and cached together: an interrupted run continues after the last whole block
AUTO_SIZE = 8  # pairs of a micro-batch with memory.micro_batch_size auto, which finds later how many can be trained on
NO_EFFECT = ("_name_or_path", "transformers_version", "architectures", "use_cache")  # in the key of the cache


def compute_reference(session: Session, forward: Forward) -> None:
    """Set ``reference`` of every split to what ``forward``, still untrained, computes. A collective."""
    fabric, model, data = session.fabric, session.recipe.model, session.recipe.data
    if not isinstance(model, CausalLM) or not model.needs_reference:
        return
    if not isinstance(data, Preferences):
        raise RecipeError(f"model.loss={model.loss} needs the data Preferences, not {type(data).__name__}: set data")
    plain = copy.copy(model)
    plain.beta = 1.0  # with a reference of 0, rewards are log-probabilities
    computes = Forward(fabric, plain, forward.module)
    key = run_on_rank_zero(fabric, partial(_key_of_model, session, model))
    for name, split in splits_of(data).items():
        pairs: Any = split.original
        folder = cache_folder(data.cache_dir) / "reference" / hash_of(key, run_on_rank_zero(fabric, pairs.fingerprint))
        known = 0
        for start in range(0, len(pairs), BLOCK):
            block, note = range(start, min(start + BLOCK, len(pairs))), folder / f"{start}.json"
            values = run_on_rank_zero(fabric, partial(read_cache_json, note))
            known += 0 if values is None else len(block)
            if values is None:
                show_status(f"reference log-probabilities of {name}: {start:,} of {len(pairs):,} pairs")
                pairs.reference[block] = 0
                values = _compute(session, computes, pairs, name, block)
                if session.is_first:
                    write_cache_json(note, values)
            pairs.reference[block] = values
        what = f"reference log-probabilities of {len(pairs):,} {name} pairs, {known:,} of them from the cache"
        session.progress.notice(f"model.loss={model.loss}: {what}; no second model is in memory")


def require_reference(model: Model, split: Samples) -> None:
    """Reject an evaluation whose loss needs a reference that no training has computed."""
    cause = "model.loss=dpo and ipo compare with the model before training, which a finished run does not have"
    fix = "set data.val_files or data.test_files before training, as the run evaluates on them"
    if isinstance(model, CausalLM) and model.needs_reference:
        require(not np.isnan(split.original.reference).any(), f"{cause}: {fix}")


def _key_of_model(session: Session, model: CausalLM) -> str:
    """Hash everything except the samples that determines the log-probabilities."""
    import transformers  # slow, and training of other models does not need it

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
    size = min(cut.micro_batch_size, AUTO_SIZE) if memory.micro_batch_size == "auto" else cut.micro_batch_size
    cut = Cut(len(pairs), size, 1, cut.micro_batch_tokens)
    pieces = cut_batch(pairs, cut, shares, split.lengths, session.recipe.model.packs())  # type: ignore[attr-defined]
    own: dict[int, list[float]] = {}
    current: list[MicroBatch] = []

    def micro_batches() -> Iterator[MicroBatch]:
        loader = loader_of(session, split)
        for micro in evaluation_micro_batches(name, pieces, loader, Quarantine(limit=None), share, shares):
            session.monitor.batch, current[:] = micro.batch, [micro]
            yield micro

    def update(loss: Any) -> None:
        own.update(zip(current[0].indices, loss.logits.tolist(), strict=True))

    evaluate(forward, micro_batches(), SimpleNamespace(reset=own.clear, update=update, compute=dict))
    values = {int(index): value for part in all_gather_json(session.fabric, own) for index, value in part.items()}
    return [values[index] for index in pairs]
