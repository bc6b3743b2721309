"""The page "Will it fit?": its allocator, replay and times equal those of Python; its answers in a browser."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.javascript import HAS_ENGINE, page_answers
from helpers.page import BROWSER, WIDTHS_AND_SCHEMES, Nesting, answered, assert_layout, embedded
from helpers.traced import own_recipe, traced

from trainer.commands import fit_page
from trainer.fakegpu import cost
from trainer.fakegpu.allocator import AllocatorSettings, CachingAllocator, DriverOutOfMemory
from trainer.fakegpu.events import EMPTY_CACHE, Event, Trace
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.peaks import replay, retries_within
from trainer.fakegpu.snapshot import event_columns
from trainer.recipe import Memory

needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="neither mini-racer nor node is installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
BUILT = Path(__file__).parents[2] / "docs" / "fit"
STORED = sorted((BUILT / "data").glob("*.js"))
MIB = 2**20
CASES = 1000
ALLOCATE = """
    return given.map(({expandable, capacity, actions}) => {
      const allocator = new CachingAllocator(expandable, capacity ?? Infinity), blocks = [], history = [];
      try {
        for (const [kind, value, stream] of actions) {
          if (kind === "malloc") blocks.push(allocator.malloc(value, stream));
          else if (kind === "free") allocator.free(blocks[value]);
          else allocator.releaseCached();
          history.push([allocator.allocated, allocator.reserved]);
        }
      } catch (error) {
        if (!(error instanceof OutOfMemory)) throw error;
        history.push("out of memory");
      }
      return [history, allocator.peakAllocated, allocator.peakReserved, allocator.retries, allocator.freed];
    });"""


def random_case(chance: random.Random) -> dict[str, Any]:
    """Allocations, frees and releases of the cache, sometimes with too little memory for all of them."""
    actions: list[tuple[Any, ...]] = []
    live: list[int] = []
    sizes, count = [1, 512, 4096, MIB, MIB + 1, 3 * MIB, 10 * MIB, 30 * MIB], 0
    for _ in range(chance.randint(5, 120)):
        roll = chance.random()
        if live and roll < 0.42:
            actions.append(("free", live.pop(chance.randrange(len(live))), 0))
        elif roll < 0.45:
            actions.append(("release", 0, 0))
        else:
            share = 1.0 if chance.random() < 0.3 else chance.random()
            actions.append(("malloc", max(1, int(chance.choice(sizes) * share)), chance.choice((0, 0, 0, 1))))
            live.append(count)
            count += 1
    capacity = chance.choice((None, None, 25 * MIB, 60 * MIB, 120 * MIB + 1))
    return {"expandable": chance.random() < 0.5, "capacity": capacity, "actions": actions}


def python_answer(case: dict[str, Any]) -> list[Any]:
    allocator = CachingAllocator(AllocatorSettings(case["expandable"]), case["capacity"])
    blocks, history = [], list[Any]()
    try:
        for kind, value, stream in case["actions"]:
            if kind == "malloc":
                blocks.append(allocator.malloc(value, stream))
            elif kind == "free":
                allocator.free(blocks[value])
            else:
                allocator.release_cached()
            history.append([allocator.allocated, allocator.reserved])
    except DriverOutOfMemory:
        history.append("out of memory")
    return [history, allocator.peak_allocated, allocator.peak_reserved, allocator.retries, allocator.freed]


@needs_engine
def test_the_allocator_equals_python_to_the_byte(tmp_path: Path) -> None:
    chance = random.Random(7)
    cases = [random_case(chance) for _ in range(CASES)]
    wanted = [python_answer(case) for case in cases]
    assert sum(one[0][-1] == "out of memory" for one in wanted) > 20
    assert sum(one[3] > 0 for one in wanted) > 50
    assert page_answers(ALLOCATE, cases, tmp_path) == wanted


REPLAY = """
    return given.plans.map(([columns, cases]) => {
      const template = new Template(columns);
      return cases.map(([micro, whole, expandable, share]) => {
        const bytes = template.bytes(micro, given.workspace), events = template.events(whole);
        const all = replay(events, bytes, template.blocks, {expandable, details: true});
        const limit = {expandable, capacity: Math.floor(share * all.reserved)};
        const less = share ? replay(events, bytes, template.blocks, limit) : null;
        const retries = less && [less.retries, less.freed];
        const floor = template.floor(micro, whole, given.workspace), steps = whole ? 1 : 2;
        const seconds = template.seconds(micro, steps, withRates(given.card, given.costs), given.costs);
        return [all.allocated, all.reserved, all.categories, retries, floor <= all.allocated, seconds];
      });
    });"""
CARD = gpu_named("a100-80gb")


def page_replays(plans: list[Any], folder: Path) -> list[Any]:
    """What the page finds for ``plans``: pairs of columns, and (micro-batch, one micro-step, expandable, capacity)."""
    facts = fit_page.facts()
    (card,) = (one for one in facts["cards"] if one["name"] == CARD.name)
    given = {"plans": plans, "workspace": CARD.cublas_workspace, "card": card, "costs": facts["costs"]}
    return page_answers(REPLAY, given, folder)


def python_replay(trace: Trace, expandable: bool, share: float) -> list[Any]:
    settings = AllocatorSettings(expandable)
    memory = replay(trace, settings)
    retries = retries_within(trace, int(share * memory.peak_reserved), settings) if share else None
    fewer = None if retries is None or retries.times is None else [*retries]
    return [memory.peak_allocated, memory.peak_reserved, memory.categories, fewer]


def agree(page: list[Any], python: list[Any]) -> None:
    shown = {name: size for name, size in page[2].items() if size}
    assert [page[0], page[1], shown, page[3]] == python
    assert page[4], "the lower bound is above the peak"


@pytest.fixture(scope="module")
def own_traces() -> dict[str, Trace]:
    """Traces of ``Own`` with micro-batches of 4, 8 and 16, twice a step and once."""
    sizes = {"4": (4, 8), "8": (8, 16), "16": (16, 32), "8 whole": (8, 8)}
    recipes = {
        name: (own_recipe(Memory(micro_batch_size=size), batch_size=batch), 1) for name, (size, batch) in sizes.items()
    }
    return traced(recipes)


@needs_engine
def test_a_template_gives_memory_and_time_of_another_micro_batch(own_traces: dict[str, Trace], tmp_path: Path) -> None:
    columns = event_columns({4: own_traces["4"], 16: own_traces["16"]})
    ways = [(expandable, share) for expandable in (False, True) for share in (0, 0.9, 0.6)]
    cases = [(size, name, *way) for size, name in ((4, "4"), (8, "8"), (16, "16"), (8, "8 whole")) for way in ways]
    asked = [[size, name.endswith("whole"), *way] for size, name, *way in cases]
    (answers,) = page_replays([[columns, asked]], tmp_path)
    for (_, name, expandable, share), answer in zip(cases, answers, strict=True):
        agree(answer, python_replay(own_traces[name], expandable, share))
        wanted = cost.step_cost(own_traces[name], CARD, lambda item: ("", 0.0)).step_ms
        assert answer[5] * 1e3 == pytest.approx(wanted, rel=1e-3)


SEARCH = """
    const card = withRates(given.card, given.facts.costs);
    return given.asked.map(([flags, batch, isTraced]) => {
      const asked = { batch, isTraced, micro: 0, budget: 1e10, expandable: false };
      const found = search(combine([{ ...given.columns, flags }]), asked, card, given.facts);
      return found && [found.micro, found.steps, found.memory.reserved];
    });"""


@needs_engine
def test_the_page_keeps_the_segments_of_a_plan_and_the_micro_batch_of_a_traced_batch(tmp_path: Path) -> None:
    sizes = [(1, 30 * MIB), (1, 0), (2, 10 * MIB), (3, 28 * MIB)]
    trace = Trace(events=[Event(number, size, "mm", "forward") for number, size in sizes], marks=[(0, "forward")])
    facts = fit_page.facts()
    (card,) = (one for one in facts["cards"] if one["name"] == CARD.name)
    asked = [[{}, 16, True], [{"memory.expandable_segments": True}, 16, True], [{}, 19, True], [{}, 19, False]]
    given = {"asked": asked, "card": card, "facts": facts, "columns": event_columns({8: trace})}
    fixed, expandable = 58 * MIB, 40 * MIB
    assert page_answers(SEARCH, given, tmp_path) == [[8, 2, fixed], [8, 2, expandable], [8, 3, fixed], None]


def unpacked(text: str) -> list[dict[str, Any]]:
    (packed,) = re.findall(r', "([^"]*)"\);', text)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def as_trace(columns: Mapping[str, Any], place: int) -> Trace:
    """Rebuild the trace with the traced micro-batch at ``place`` of a template's sizes."""
    events: list[Event] = []
    live: list[int] = []
    categories = {}
    for number, code in enumerate(columns["code"]):
        if code > 0:
            op, phase, stream, category, *sizes = columns["blocks"][code - 1]
            events.append(Event(number, sizes[place], op, phase, stream))
            live.insert(0, number)
            categories[number] = category
        else:
            events.append(Event(live.pop(-1 - code) if code else EMPTY_CACHE, 0, "", "", 0))
    return Trace(events, categories)


@needs_engine
@pytest.mark.skipif(not STORED, reason="docs/fit/build.py has stored no templates")
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stored_templates_replay_as_in_python(quick: bool, tmp_path: Path) -> None:
    def plans() -> Iterator[dict[str, Any]]:
        for path in sorted(STORED, key=lambda one: one.stat().st_size)[: 2 if quick else None]:
            yield from unpacked(path.read_text())[: 1 if quick else None]

    asked = [(columns, [[size, False, False, 0.97] for size in columns["sizes"]]) for columns in plans()]
    for (columns, _), answers in zip(asked, page_replays([[*one] for one in asked], tmp_path), strict=True):
        for place, answer in enumerate(answers):
            agree(answer, python_replay(as_trace(columns, place), False, 0.97))


STATE = """
    const text = id => document.getElementById(id).textContent;
    const rows = id => [...document.querySelectorAll(`#${id} tbody tr`)];
    return {
      verdict: text("verdict"), code: document.querySelector("#verdict code").textContent, title: document.title,
      plans: rows("plans").map(row => [...row.cells].map(cell => cell.textContent)), parts: rows("parts").length,
      errors: rows("errors").length, shapes: document.querySelectorAll("#curve polygon").length,
      labels: [...document.querySelectorAll("select, input")].every(one => one.closest("label")),
    };"""
WAIT = 4000
EVIL = "my</script><script>document.title='run'</script><img src=x>"


def own_page(own_traces: Mapping[str, Trace], folder: Path, name: str = "own") -> str:
    """The page about two plans of ``Own`` with micro-batches of 8."""
    settings: list[dict[str, Any]] = [{}, {"memory.activation_checkpointing": 0.5}]
    plans = [{"flags": flags, **event_columns({8: own_traces["8"]})} for flags in settings]
    known = {
        "card": CARD.name,
        "traced": CARD.title,
        "models": [{"name": name, "command": "trainer fit own", "batch": 16}],
    }
    fit_page.write_fit_page(folder / "fit.html", known, fit_page.data_script(name, plans))
    return (folder / "fit.html").read_text()


@needs_browser
@pytest.mark.parametrize("name", ["own", EVIL])
def test_the_page_answers_with_a_plan_its_parts_and_the_command(
    own_traces: dict[str, Trace], tmp_path: Path, name: str
) -> None:
    page = own_page(own_traces, tmp_path, name)
    assert Nesting(page).open == []
    assert "img" not in Nesting(page).seen
    assert embedded(page, "facts")["models"][0]["name"] == name
    state = answered(page, STATE, tmp_path, wait=WAIT)
    memory = replay(own_traces["8"])
    assert state["verdict"].startswith("fits: ")
    assert f"{memory.peak_reserved / 1e6:.0f} MB of " in state["verdict"]
    assert "traced" in state["verdict"]
    assert state["code"] == "trainer fit own --memory.micro_batch_size 8"
    assert [row[1:3] for row in state["plans"]] == [["2 × 8", f"{memory.peak_reserved / 1e6:.0f} MB"]] * 2
    assert (state["errors"], state["title"], state["labels"]) == (5, "Will it fit?", True)
    assert state["shapes"] == 6
    assert state["parts"] >= 4


@needs_browser
@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), WIDTHS_AND_SCHEMES)
def test_the_page_fits_the_window_in_light_and_dark(
    own_traces: dict[str, Trace], tmp_path: Path, width: int, scheme: str
) -> None:
    assert_layout(own_page(own_traces, tmp_path, "own_" * 40), tmp_path, width, scheme, WAIT)


def test_the_built_page_is_current_asks_no_host_and_is_small() -> None:
    page = (BUILT / "index.html").read_text()
    files = [BUILT / model["file"] for model in embedded(page, "facts")["models"]]
    assert files
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?:https?:)?//|url\(|@import|fetch\(|import\(", page) == []
    current = json.loads(json.dumps(fit_page.facts()))
    outdated = [name for name, value in current.items() if embedded(page, "facts")[name] != value]
    outdated += [script.name for script in fit_page.FOLDER.glob("*.js") if script.read_text() not in page]
    assert outdated == [], "write the page again: python docs/fit/build.py --minutes 0"
    assert (BUILT / "index.html").stat().st_size + sum(file.stat().st_size for file in files) < 5e6
