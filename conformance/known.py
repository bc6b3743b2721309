"""Why cells are wrong, and what upstream says about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A cause of wrong cells.

    Args:
        trainers: names of adapters.
        cases: names of cases; ``*`` is every other one.
        cause: one sentence.
        thread: address of the upstream issue or documentation that mentions it, if one was found.
        since: date of that issue.
        fixed_in: the release with a fix.
        page: file in ``docs/upstream`` with a reproduction and the text of an issue.
    """

    trainers: tuple[str, ...]
    cases: tuple[str, ...]
    cause: str
    thread: str = ""
    since: str = ""
    fixed_in: str = ""
    page: str = ""

    def text(self) -> str:
        """Return the cause with its links, as Markdown for the page of results."""
        since = f", since {self.since}" if self.since else ""
        name = self.thread.removeprefix("https://").removeprefix("github.com/")
        parts = [
            self.cause,
            f"Upstream: [{name}]({self.thread}){since}." if self.thread else "No upstream thread was found.",
            f"Fixed in {self.fixed_in}." if self.fixed_in else "",
            f"[Reproduction](upstream/{self.page})." if self.page else "",
        ]
        return " ".join(part for part in parts if part)


def known(trainer: str, case: str) -> Known | None:
    """Return the cause of a wrong cell."""
    return next((one for one in KNOWN if trainer in one.trainers and (case in one.cases or "*" in one.cases)), None)


GITHUB = "https://github.com/"
HUGGING_FACE = ("transformers", "transformers_remedy", "transformers_before", "trl", "axolotl", "swift", "swift_before")
MEANS = "The loss of a micro-batch is a mean, and the means of a window have equal weights, also if their items differ."

KNOWN: tuple[Known, ...] = ()
