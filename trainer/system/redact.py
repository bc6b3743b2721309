"""Redaction of secrets in files, logs and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from trainer.errors import require

REDACTED = "<redacted>"
_MIN_SECRET_CHARS = 8  # shorter values of variables, such as "1" or "test", would match too often in texts

_NAME = re.compile(  # secret settings and variables, but not pad_token or sort_key
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
_QUOTED = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)(?P<is>["']?\s*[=:]\s*)(?P<quote>["'])[^"'\n]+(?P=quote)""")


def redact(text: str) -> str:
    """Replace every recognizable secret in ``text`` by :data:`REDACTED`: user and password in a URL; query parameters
    such as token, key or sig; tokens of Hugging Face, GitHub, GitLab, OpenAI, AWS, Google and Slack, by their prefixes;
    values such as ``api_key='...'``; and those of environment variables with secret names, such as WANDB_API_KEY."""
    named = {name: value for name, value in os.environ.items() if len(value) >= _MIN_SECRET_CHARS}
    values = {value for name, value in named.items() if _is_secret(name) or name.upper().endswith("_TOKEN")}
    for value in sorted(values, key=lambda value: (-len(value), value)):  # a value may be the start of another
        text = text.replace(value, REDACTED)
    text = _USER.sub(_without_user, text)
    text = _QUERY.sub(_without_parameter, text)
    text = _BEARER.sub(rf"\g<start>{REDACTED}", text)
    text = _QUOTED.sub(_without_value, text)
    return _TOKENS.sub(REDACTED, text)


def redact_value(value: Any, name: str = "") -> Any:
    """Redact the texts in a setting of plain YAML types; a text with a secret ``name`` is redacted entirely."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return REDACTED if value and _is_secret(name) else redact(value)
    if isinstance(value, Mapping):
        return {key: redact_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item, name) for item in value]
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """Redact the words of a command line with flags ``--name value`` or ``--name=value``."""
    redacted, before = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        with_value = equals and name.startswith("--")
        redacted.append(f"{name}={redact_value(value, name[2:])}" if with_value else redact_value(word, before))
        before = word[2:] if word.startswith("--") and not equals else ""
    return redacted


def refuse_redacted(settings: Mapping[str, Any]) -> None:
    """Raise a RecipeError if a setting (by dotted name) was read from a file in which its secret was redacted."""
    for key, value in settings.items():
        require(REDACTED not in str(value), f"{key} was written without its credentials: give it again as --{key}")


def _is_secret(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition(".")[2].replace("-", "_")) is not None


def _without_user(match: re.Match[str]) -> str:
    # A user name alone is an account for ssh, but often a token for http.
    is_secret = ":" in match["user"] or match["scheme"].lower().startswith("http")
    return f"{match['scheme']}://{REDACTED}@" if is_secret else match[0]


def _without_parameter(match: re.Match[str]) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match["name"]).lower()
    is_secret = not _QUERY_WORDS.isdisjoint([words.replace("_", ""), *re.split(r"[^a-z]+", words)])
    return f"{match['start']}{match['name']}={REDACTED}" if is_secret else match[0]


def _without_value(match: re.Match[str]) -> str:
    shown = f"{match['name']}{match['is']}{match['quote']}{REDACTED}{match['quote']}"
    return shown if _is_secret(match["name"]) else match[0]
