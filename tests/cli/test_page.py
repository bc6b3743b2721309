"""``plan.html``: it holds what plan.json holds, runs no code of others, and answers the sliders as a search would."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.page import BROWSER, WIDTHS_AND_SCHEMES, Nesting, answered, assert_layout, embedded

from trainer.commands.plan import write_page
from trainer.planner.report import Candidate
from trainer.planner.search import BUDGET_MARGIN, _rank
from trainer.system.text import format_bytes

needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
EVIL = "my</script><script>document.title='run'</script>&amp;<img src=x onerror=\"document.title='run'\">"
SIZES = (8, 4, 2, 1)
BUDGET = 4.0


def candidates() -> list[Candidate]:
    """Plans with made-up figures, two of which are equal, in the order of a search with a budget of 4 GB."""
    chance, found = random.Random(3), []
    for number, technique in enumerate(("none", "selective", "full")):
        for size in SIZES:
            flags: dict[str, Any] = {"memory.micro_batch_size": size}
            if number:
                flags["memory.activation_checkpointing"] = technique
            reserved, time = round(1 + size * (1.1 - 0.3 * number) + chance.random(), 3), 100 + 40 * number + 80 / size
            text = f"batch 8 = 1 rank × {8 // size} micro-batches of {size}, {technique}"
            sizes = (int(1e9 * reserved), int(1e9 * reserved), 0)
            found.append(Candidate(flags, text, *sizes, time, traced=size in (8, 1)))
    found.append(dataclasses.replace(found[0], flags={**found[0].flags, "memory.activation_offload": True}))
    return ranked(found, BUDGET)


def ranked(found: list[Candidate], budget: float) -> list[Candidate]:
    fitting = [dataclasses.replace(one, fits=one.reserved * (1 + BUDGET_MARGIN) <= budget * 1e9) for one in found]
    return sorted(fitting, key=_rank)


def content(name: str = "vit") -> dict[str, Any]:
    """What plan.json holds."""
    rows = candidates()
    refused = Candidate({"memory.strategy": "fsdp"}, "", reason=f"cannot: {name}")
    about = {"recipe": name, "date": "today", "device": "A100", "devices": 1, "nodes": 1, "parameters": 10}
    figures = {"budget_gb": BUDGET, "margin": BUDGET_MARGIN, "outside_gb": 0.5, "command": f"trainer fit {name}"}
    found = [one.to_json() for one in [*rows, refused]]
    return {**about, **figures, "chosen": found[0], "candidates": found, "explanations": [name], "notes": [name]}


TIMELINE = {
    "allocated": {"params": [10**9] * 3, "activations": [0, 2 * 10**9, 0]},
    "reserved": [10**9, 3 * 10**9, 3 * 10**9],
    "marks": [[0, "init"], [1, "forward"]],
}


def page_of(folder: Path, name: str = "vit", timeline: Any = TIMELINE, **changes: Any) -> str:
    write_page(folder / "plan.html", content(name) | changes, timeline)
    return (folder / "plan.html").read_text()


@pytest.mark.parametrize("name", ["vit", EVIL])
def test_a_page_is_well_formed_stands_alone_and_holds_all_of_plan_json(tmp_path: Path, name: str) -> None:
    page = page_of(tmp_path, name)
    parsed = Nesting(page)
    assert parsed.open == []
    assert parsed.seen.count("script") == 3  # none that somebody has named
    assert "img" not in parsed.seen
    assert re.findall(r"(?:src|href)\s*=|url\(|@import|fetch\(|import\(", page.replace("src=x", "")) == []
    assert embedded(page, "plan") == content(name)
    assert embedded(page, "timeline").items() >= TIMELINE.items()


STATE = """
const move = (name, value) => {
  const slider = document.getElementById(name);
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
};
const state = () => ({
  title: document.title,
  budget: budgetAt(+document.getElementById("budget").value),
  sentence: document.querySelector("#verdict p").textContent,
  chosen: document.querySelector("#verdict p:last-of-type").textContent,
  sliders: [...document.querySelectorAll("label")].filter(label => label.offsetHeight).length,
  caption: document.querySelector("#caption").textContent,
  code: document.querySelector("#verdict code")?.textContent ?? "",
  rows: [...document.querySelectorAll("#table tbody tr")].map(row => [...row.cells].map(cell => cell.textContent)),
  shapes: document.querySelectorAll("#curve polygon").length,
  about: document.getElementById("caption").textContent,
});
"""


@pytest.mark.slow
@needs_browser
def test_sliders_choose_as_the_search_does(tmp_path: Path) -> None:
    places, rows = range(0, 1001, 50), candidates()
    ask = f"""{STATE}
        const found = [state()];
        for (const place of {list(places)}) for (let size = 0; size <= {len(SIZES)}; size++) {{
            move("budget", place); move("size", size);
            found.push({{...state(), size: sizes[size]}});
        }}
        return found;"""
    first, *others = answered(page_of(tmp_path), ask, tmp_path)
    assert first["budget"] == BUDGET
    assert first["code"] == "trainer fit vit"
    assert [row[1] for row in first["rows"][:-1]] == [one.plan.removeprefix("batch 8 = ") for one in rows]
    assert first["rows"][-1][-1] == "cannot: vit"
    assert (first["shapes"], "3.00 GB reserved, 3.00 GB allocated" in first["about"]) == (6, True)
    verdicts = set()
    for state in others:
        wanted = [one for one in rows if state["size"] in (0, one.flags["memory.micro_batch_size"])]
        best = ranked(wanted, state["budget"])[0]
        verdicts.add(best.fits)
        assert best.reserved is not None
        if not best.fits:
            assert state["sentence"].startswith("no plan fits in"), state
            assert state["sentence"].endswith(f": the smallest needs {format_bytes(best.reserved)}")
            continue
        assert state["sentence"].startswith(f"fits: {format_bytes(best.reserved)} of "), state
        assert state["chosen"].startswith(f"chosen: {best.plan.removeprefix('batch 8 = ')}"), state
        assert ("~" in state["chosen"]) == (not best.traced)
        assert state["code"] == best.command, "of two equal plans the one with fewer techniques"
        assert all(
            row[2].startswith("~") == row[0].startswith("~") == (row[0] not in ("8", "1")) for row in state["rows"][:-1]
        )
    assert verdicts == {True, False}


@needs_browser
def test_a_column_sorts_and_names_of_others_do_not_run(tmp_path: Path) -> None:
    ask = f"""{STATE}
        const click = number => document.querySelectorAll("th button")[number].click();
        click(2); const up = state(); click(2);
        return [up, state(), document.querySelectorAll("script, img").length, document.title];"""
    up, down, active, title = answered(page_of(tmp_path, EVIL, None), ask, tmp_path)
    sizes = [[float(row[2].lstrip("~").removesuffix(" GB")) for row in state["rows"][:-1]] for state in (up, down)]
    assert sizes[0] == sorted(sizes[0])
    assert sizes[1] == sorted(sizes[0], reverse=True)
    assert all(state["rows"][-1][2] == "" for state in (up, down))  # refused ones stay at the end
    assert (active, up["shapes"]) == (4, 0)  # ours, and the one of this test
    assert title == f"Plan of {EVIL}"


SMALL = Candidate({}, "batch 8 = 1 rank × 1 micro-batch of 8", 5_300_000, 45_300_000, 0, 62.0, fits=True).to_json()
SMALL_TIMELINE = {
    "allocated": {"params": [10**6] * 2, "activations": [0, 4 * 10**6]},
    "reserved": [6_300_000] * 2,
    "marks": [[0, "init"], [1, "forward"]],
}


@needs_browser
def test_a_single_plan_has_no_slider_one_sentence_and_one_format_of_memory(tmp_path: Path) -> None:
    page = page_of(tmp_path, timeline=SMALL_TIMELINE, candidates=[SMALL], chosen=SMALL, budget_gb=11.24)
    state = answered(page, f"{STATE} return state();", tmp_path)
    assert (state["sentence"], state["sliders"]) == ("fits: 45 MB of 11.24 GB", 0)
    assert state["rows"] == [["8", "1 rank × 1 micro-batch of 8", "45 MB", "0 MB", "62.0", "yes", "chosen"]]
    assert "6.3 MB reserved, 5.0 MB allocated" in state["caption"]
    assert state["caption"].endswith("the plan adds 39 MB outside of tensors")
    several = answered(page_of(tmp_path), f"{STATE} return state();", tmp_path)
    assert several["sliders"] == 2
    one_size = [one for one in content()["candidates"] if one["flags"].get("memory.micro_batch_size") == 1]
    assert answered(page_of(tmp_path, candidates=one_size), f"{STATE} return state();", tmp_path)["sliders"] == 1


@needs_browser
@pytest.mark.first(1)
@pytest.mark.parametrize(("width", "scheme"), WIDTHS_AND_SCHEMES)
def test_a_plan_fits_the_window_in_light_and_dark(tmp_path: Path, width: int, scheme: str) -> None:
    assert_layout(page_of(tmp_path, "vit_" * 40), tmp_path, width, scheme)
