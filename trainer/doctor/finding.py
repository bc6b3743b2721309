"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from trainer.errors import RecipeError, RunError
from trainer.system.redact import redact, redact_value
from trainer.system.reports import cause
from trainer.system.text import escaped

Status = Literal["ok", "warning", "FAIL", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Args:
        check: what was looked at, in a word or two.
        status: ok; warning, of what may go wrong; FAIL, of what will; skipped, of what could not be looked at.
        text: what was found.
        fix: what to do about it.
    """

    check: str
    status: Status
    text: str
    fix: str = ""

    def line(self) -> str:
        """For a person, without secrets."""
        line = f"{self.status:<8} {self.check:<18} {self.text}" + (f"; fix: {self.fix}" if self.fix else "")
        return escaped(redact(line))

    def to_json(self) -> dict[str, str]:
        """For a program, without secrets."""
        return redact_value(asdict(self))


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, fix: str) -> Finding:
    """Something may go wrong."""
    return Finding(check, "warning", text, fix)


def fail(check: str, text: str, fix: str = "") -> Finding:
    """Something will go wrong; messages of a :class:`RecipeError` have their fix within."""
    return Finding(check, "FAIL", text, fix)


def skipped(check: str, why: str) -> Finding:
    """It was not looked at."""
    return Finding(check, "skipped", why)


def findings(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What ``look`` finds; an error that it ends with is a finding, too."""
    try:
        yield from look()
    except (RecipeError, RunError) as error:
        yield fail(check, cause(error))
    except (Exception, SystemExit) as error:
        yield fail(check, f"the check ended with {cause(error)}", "if the run starts all the same, report this")
