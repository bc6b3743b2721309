"""``report.html``: it stands alone, holds what the run's files hold, and runs no code of others."""

from __future__ import annotations

import base64
import csv
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.page import BROWSER, Nesting, answered

from trainer.report.html_report import MAX_ERRORS, write_report
from trainer.report.mistakes import Mistake, write_mistakes

needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
EVIL = "my</script><script>document.title='run'</script>&amp;<img src=x onerror=\"document.title='run'\">"
SECRET = "hf_" + "abcdefgh" * 4


def page_of(folder: Path, name: str = "cat", status: str = "finished") -> str:
    """The page of a run with two classes, one of which is called ``name``, and 60 mistakes."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        f"recipe: /home/me/own.py\nmodel:\n  tag: {name}\n# sha256 of the lines above: 0\n"
    )
    (folder / "classification_report.txt").write_text(f"precision\n{name} 0.9\n")
    mistakes = [Mistake(at, 0, 1, 0.9 - at / 1000, 0.1) for at in range(60)]
    write_mistakes(
        folder, np.array([[3, 60], [0, 2]]), mistakes, [name, "dog"], "test", f"{name} row {{}} {SECRET}".format
    )
    facts = [("status", status), ("test accuracy", "87.50 %"), ("steps", "12"), ("peak memory", "1.00 GB reserved")]
    data = {"class": "TextFiles", "train": 1200, "val": None, "fingerprint": "c0ffee"}
    write_report(folder, facts, f"batch 64, {name}", data, {"torch": "2.11", "timm": None})
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["cat", EVIL])
def test_a_page_is_well_formed_stands_alone_and_holds_what_the_files_hold(tmp_path, name):
    page = page_of(tmp_path / "my run", name)
    parsed = Nesting(page)
    assert parsed.open == ["html"] or parsed.open == []
    assert "script" not in parsed.seen
    assert parsed.seen.count("img") == 1  # the one picture that there is
    links = re.findall(r"(?:src|href)=\"([^\"]{0,40})|url\(|@import", page)
    assert [link[:22] for link in links] == ["data:image/png;base64,"]
    picture = re.findall(r"base64,([\w+/=]+)", page)[0]
    assert base64.b64decode(picture) == (tmp_path / "my run" / "confusion.png").read_bytes()
    for text in ("finished · test accuracy 87.50 %", "1.00 GB reserved", "1,200", "c0ffee", "TextFiles", "2.11"):
        assert text in page
    assert "trainer fit &#39;" in page  # its folder has a blank
    assert "recipe.yaml&#39; --trust-recipe" in page
    assert (page.count("<tr><td>test</td>"), "10 more in errors.csv" in page) == (MAX_ERRORS, True)
    assert SECRET not in page
    assert "sha256" not in page
    assert "timm" not in page
    with open(tmp_path / "my run" / "errors.csv", newline="") as file:
        assert SECRET not in file.read()
        file.seek(0)
        assert len(list(csv.reader(file))) == 61


def test_a_run_that_failed_says_so_and_what_is_missing_is_left_out(tmp_path):
    (tmp_path / "run").mkdir()
    write_report(tmp_path / "run", [("status", "failed"), ("steps", "1")], "plan", {}, {})
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Results"]
    assert '<p class="verdict no">failed · steps 1</p>' in page


@needs_browser
def test_a_browser_shows_the_picture_and_runs_nothing(tmp_path):
    page = page_of(tmp_path / "run", EVIL)
    allowed = page.replace("img-src data:", "img-src data:; script-src 'unsafe-inline'")  # for the question below
    ask = """
        const image = document.querySelector("img");
        return [document.title, image.naturalWidth, image.naturalHeight, document.querySelectorAll("tr").length,
                document.querySelector(".verdict").textContent, document.querySelectorAll("script").length];"""
    title, wide, high, rows, verdict, scripts = answered(allowed, ask, tmp_path)
    assert (wide, high) == (1200, 1000)
    assert verdict == "finished · test accuracy 87.50 %"
    assert (title, scripts) == ("Run run", 1)  # the one of this test
    assert rows > MAX_ERRORS
