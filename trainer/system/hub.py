"""Whether the Hugging Face hub is there: asked once, before its libraries try to reach it for a minute."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from threading import Thread

from trainer.system.text import escaped

SECONDS = 3.0  # that the hub may take to answer


def away() -> str:
    """Why nothing can be had from the hub but its cache; empty if it answers. If not, this process and its children are
    offline from here on, as with ``HF_HUB_OFFLINE=1``."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not _gone_offline():
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"], os.environ[OURS] = True, "1", "1"
        if "datasets" in sys.modules:  # which has read the other already
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} does not answer within {SECONDS:g} s" if _gone_offline() else ""


def advice() -> str:
    """What to do where something cannot be had from the hub."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not _gone_offline():
        return "unset HF_HUB_OFFLINE to ask the hub"
    return "HF_ENDPOINT names a mirror of the hub, and HF_HUB_OFFLINE=1 asks nobody"


@cache
def tell_of_cache() -> None:
    """Say, once, that files are of the hub's cache because the hub did not answer."""
    if _gone_offline():
        said = f"{away()}: what its cache holds is taken; {advice()}"
        print(escaped(f"trainer: warning: {said}"), file=sys.stderr, flush=True)


OURS = "TRAINER_HUB_IS_AWAY"  # tells child processes why they are offline


def _gone_offline() -> bool:
    return os.environ.get(OURS) == "1"


@cache
def _answers(endpoint: str) -> bool:
    """Whether anything at all answers; in a thread, for looking a name up knows no limit of time."""
    answered = []

    def ask() -> None:
        from huggingface_hub.utils import get_session

        with suppress(Exception):
            get_session().head(endpoint, timeout=SECONDS)
            answered.append(True)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return bool(answered)
