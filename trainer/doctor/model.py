"""The model and its data: whether they can be prepared, and fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.doctor.finding import Finding, fail, ok, skipped
from trainer.doctor.samples import SPLITS
from trainer.doctor.subject import Subject
from trainer.errors import RecipeError
from trainer.faults.reports import cause
from trainer.recipe import Recipe


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Whether the model has a row for every token that the tokenizer makes."""
    tokenizer = subject.recipe.model.tokenizer_or_none()
    if tokenizer is None:
        return
    check = "vocabulary"
    embed = getattr(subject.module, "get_input_embeddings", None)
    if embed is None:
        yield skipped(check, f"{type(subject.module).__name__} does not say which its embeddings are")
        return
    rows, tokens = embed().num_embeddings, len(tokenizer)
    text = f"{tokens:,} tokens, {rows:,} rows of embeddings"
    if tokens > rows:
        yield fail(check, text, "the tokenizer of this model (model.tokenizer), or model.config.vocab_size")
    else:
        yield ok(check, text)


def model_and_data(subject: Subject, prepare: Callable[[Recipe], Recipe]) -> Iterator[Finding]:
    """Prepare them: files, columns, classes and weights' configuration are checked on the way."""
    try:
        subject.recipe = prepare(subject.recipe)
    except RecipeError as error:
        yield fail("model and data", cause(error))
        return
    subject.ready = True
    data = subject.recipe.data
    sizes = ", ".join(f"{len(getattr(data, name)):,} {name}" for name in SPLITS if getattr(data, name) is not None)
    parameters = sum(parameter.numel() for parameter in subject.module.parameters())
    yield ok("model and data", f"{type(subject.recipe.model).__name__} of {parameters:,} parameters; {sizes}")


def plan_of(subject: Subject) -> Iterator[Finding]:
    """How the batch is cut, and which techniques are used: refused here as they would be by the run."""
    if subject.plan is None:
        yield skipped("plan", "the planner decides when the run starts")
    else:
        yield ok("plan", subject.plan.describe())
