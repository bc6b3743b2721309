"""TRL's RewardTrainer."""

from __future__ import annotations

import torch
from trl import RewardConfig, RewardTrainer

from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers, trl

TITLE, VERSION_OF = "TRL RewardTrainer", "trl"
DOCS = "https://huggingface.co/docs/trl/reward_trainer"
FEATURES = {"reward"}


def train(job: Job) -> None:
    """Train with the arguments of the page, on tokens."""
    if job.case.task != "reward":
        raise UnsupportedError("it trains reward models")
    rows = [
        {f"{side}_ids": torch.cat([one["prompt"], one[side]]).tolist() for side in ("chosen", "rejected")}
        for one in job.dataset
    ]
    transformers.run(job, lambda: trl.build(job, RewardTrainer, RewardConfig, rows))
