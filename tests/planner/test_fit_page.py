"""The page "Will it fit?": its allocator, replay and times equal those of Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers.javascript import HAS_ENGINE, page_answers

from trainer.fakegpu.allocator import AllocatorSettings, CachingAllocator, DriverOutOfMemory

needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="neither mini-racer nor node is installed")
pytestmark = needs_engine

MIB = 2**20
CASES = 1000
ALLOCATE = """
    return given.map(({expandable, capacity, actions}) => {
      const allocator = new CachingAllocator(expandable, capacity ?? Infinity), blocks = [], history = [];
      try {
        for (const [kind, value, stream] of actions) {
          if (kind === "malloc") blocks.push(allocator.malloc(value, stream));
          else if (kind === "free") { allocator.free(blocks[value]); }
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
    """A list of allocations, frees and releases of the cache, sometimes with too little memory for all of them."""
    actions: list[tuple[Any, ...]] = []
    live: list[int] = []
    sizes = [1, 512, 4096, MIB, MIB + 1, 3 * MIB, 10 * MIB, 30 * MIB]
    for _ in range(chance.randint(5, 120)):
        roll, count = chance.random(), sum(one[0] == "malloc" for one in actions)
        if live and roll < 0.42:
            actions.append(("free", live.pop(chance.randrange(len(live))), 0))
        elif roll < 0.45:
            actions.append(("release", 0, 0))
        else:
            live.append(count)
            size = chance.choice(sizes) if chance.random() < 0.3 else int(chance.choice(sizes) * (chance.random() + 0.01)) + 1
            actions.append(("malloc", size, chance.choice((0, 0, 0, 1))))
    capacity = chance.choice((None, None, 25 * MIB, 60 * MIB, 120 * MIB + 1))
    return {"expandable": chance.random() < 0.5, "capacity": capacity, "actions": actions}


def python_answer(case: dict[str, Any]) -> list[Any]:
    allocator = CachingAllocator(AllocatorSettings(case["expandable"]), case["capacity"])
    blocks, history = [], []
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


def test_the_allocator_equals_python_to_the_byte(tmp_path: Path) -> None:
    chance = random.Random(7)
    cases = [random_case(chance) for _ in range(CASES)]
    wanted = [python_answer(case) for case in cases]
    assert sum(one[0][-1] == "out of memory" for one in wanted) > 20
    assert sum(one[3] > 0 for one in wanted) > 50
    assert page_answers(ALLOCATE, cases, tmp_path) == wanted
