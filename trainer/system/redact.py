"""Secrets taken out of what is written to files and logs or said in messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from trainer.errors import RecipeError

REDACTED = "<redacted>"  # stands in the place of a secret
_LEAST = 8  # characters from which on a variable's value is searched for in texts: "1" or "test" is no secret

_NAME = re.compile(  # secret settings and variables; not pad_token and its like, nor any key that sorts or groups
    r"token|(?:.*_)?(?:password|passwd|passphrase|secret|credentials?|apikey"
    r"|(?:api|access|secret|private|account)_?key|(?:api|auth|access|hub|hf|github|bearer|refresh|session|security)_?token)",
    re.IGNORECASE,
)

_QUERY_WORDS = {
    *("token", "key", "keyid", "sig", "signature", "secret", "password", "passwd", "pwd", "credential", "credentials"),
    *("auth", "authorization", "apikey", "accesskey", "accesskeyid", "passphrase", "jwt"),
}
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|sk-(?=[\w-]{0,99}\d)[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|xox[a-z]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"  # a JSON web token
    r")"
)
_USER = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]+)://(?P<user>[^/\s?#'\"]+)@")
_QUERY = re.compile(r"(?P<start>[?&;])(?P<name>[\w.%-]+)=(?P<value>[^&;\s'\"#<>]+)")
_BEARER = re.compile(r"(?P<start>\b(?:Bearer|Basic) )[A-Za-z0-9+/=._~-]{8,}")
_QUOTED = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]+)(?P<is>["']?\s*[=:]\s*)(?P<quote>["'])(?P<value>[^"'\n]+)(?P=quote)"""
)


def redact(text: str) -> str:
    """``text`` with :data:`REDACTED` for every secret that can be told as one.

    These are: user and password in a URL; query parameters such as token, key or sig; the tokens of Hugging Face,
    GitHub, GitLab, OpenAI, AWS, Google and Slack by their prefixes; ``api_key='...'`` and its like; and the values of
    this process's environment variables whose names say that they are secret, such as WANDB_API_KEY.
    """
    named = {name: value for name, value in os.environ.items() if len(value) >= _LEAST}
    values = {value for name, value in named.items() if _is_secret(name) or name.upper().endswith("_TOKEN")}
    for value in sorted(values, key=lambda value: (-len(value), value)):  # one may begin with another
        text = text.replace(value, REDACTED)
    text = _USER.sub(_without_user, text)
    text = _QUERY.sub(_without_parameter, text)
    text = _BEARER.sub(rf"\g<start>{REDACTED}", text)
    text = _QUOTED.sub(_without_value, text)
    return _TOKENS.sub(REDACTED, text)


def redact_value(value: Any, name: str = "") -> Any:
    """A setting, of plain YAML types, with its texts redacted; all of a text whose ``name`` says that it is secret."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return REDACTED if value and _is_secret(name) else redact(value)
    if isinstance(value, Mapping):
        return {key: redact_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item, name) for item in value]
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """The words of a command line, where flags may be ``--name value`` or ``--name=value``."""
    redacted, before = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        with_value = equals and name.startswith("--")
        redacted.append(f"{name}={redact_value(value, name[2:])}" if with_value else redact_value(word, before))
        before = word[2:] if word.startswith("--") and not equals else ""
    return redacted


def refuse_redacted(settings: Mapping[str, Any]) -> None:
    """Refuse settings, by their dotted names, that were read from a file which could not hold their secrets."""
    for key, value in settings.items():
        if REDACTED in str(value):
            raise RecipeError(f"{key} was written without its credentials: give it again as --{key}")


def _is_secret(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition(".")[2].replace("-", "_")) is not None


def _without_user(match: re.Match[str]) -> str:
    # A name alone is how ssh and its like say whose account is meant; with http it is often a token.
    is_secret = ":" in match["user"] or match["scheme"].lower().startswith("http")
    return f"{match['scheme']}://{REDACTED}@" if is_secret else match[0]


def _without_parameter(match: re.Match[str]) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match["name"]).lower()
    is_secret = not _QUERY_WORDS.isdisjoint([words.replace("_", ""), *re.split(r"[^a-z]+", words)])
    return f"{match['start']}{match['name']}={REDACTED}" if is_secret else match[0]


def _without_value(match: re.Match[str]) -> str:
    shown = f"{match['name']}{match['is']}{match['quote']}{REDACTED}{match['quote']}"
    return shown if _is_secret(match["name"]) else match[0]
