"""Check once whether the Hugging Face hub is reachable, because its libraries would retry for a minute."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from threading import Thread

from trainer.system.text import escaped

ANSWER_TIMEOUT = 3.0  # timeout for the hub's answer


def offline_reason() -> str:
    """Return why only the hub's local cache is available; an empty string if the hub answers.

    If the hub does not answer, this process and its children use ``HF_HUB_OFFLINE=1`` from then on.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not _gone_offline():
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"], os.environ[OURS] = True, "1", "1"
        if "datasets" in sys.modules:  # it copied the constant when it was imported
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"{constants.ENDPOINT} does not answer within {ANSWER_TIMEOUT:g} s" if _gone_offline() else ""


def offline_advice() -> str:
    """Return what to do if something cannot be downloaded from the hub."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not _gone_offline():
        return "unset HF_HUB_OFFLINE to ask the hub"
    return "set HF_ENDPOINT to a mirror of the hub, or HF_HUB_OFFLINE=1 to use only the cache"


@cache
def warn_offline_cache() -> None:
    """Warn once if files come from the local cache because the hub did not answer."""
    if _gone_offline():
        message = f"{offline_reason()}: using its local cache; {offline_advice()}"
        print(escaped(f"trainer: warning: {message}"), file=sys.stderr, flush=True)


OURS = "TRAINER_HUB_IS_AWAY"  # shows child processes that trainer, not the user, set HF_HUB_OFFLINE


def _gone_offline() -> bool:
    return os.environ.get(OURS) == "1"


@cache
def _answers(endpoint: str) -> bool:
    """Return whether the endpoint answers at all. A thread is used because a DNS lookup has no timeout."""
    answered = []

    def ask() -> None:
        from huggingface_hub.utils import get_session

        with suppress(Exception):
            get_session().head(endpoint, timeout=ANSWER_TIMEOUT)
            answered.append(True)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT)
    return bool(answered)
