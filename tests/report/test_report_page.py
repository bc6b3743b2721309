"""``report.html``: it stands alone, holds what the run's files hold, and runs no code of others."""

from __future__ import annotations

import base64
import csv
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.page import BROWSER, WIDTHS_AND_SCHEMES, Nesting, answered, assert_layout

from trainer.report.html_report import MAX_ERRORS, write_report
from trainer.report.metrics import classification_report
from trainer.report.mistakes import Mistake, write_mistakes
from trainer.report.plots import plot_curves
from trainer.report.summary import Summary

needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
EVIL = "my</script><script>document.title='run'</script>&amp;<img src=x onerror=\"document.title='run'\">"
SECRET = "hf_" + "abcdefgh" * 4


def a_summary(**changes) -> Summary:
    fields = {"status": "finished", "steps": 12, "skipped_steps": 0, "world_size": 1, "launcher": "python", "nodes": 1}
    fields |= {"backend": None, "batch_size": 64, "micro_batch_size": 16, "accumulate": 4, "samples_per_second": 9.0}
    fields |= {"metrics": {"test": {"accuracy": 0.875, "loss": 0.5}}, "memory": {"reserved_gb": 1.0}, "seconds": 2.0}
    data = {"class": "TextFiles", "train": 1200, "val": None, "fingerprint": "c0ffee"}
    return Summary(**(fields | {"versions": {"torch": "2.11", "timm": None}, "data": data} | changes))


def page_of(folder: Path, name: str = "cat", classes: int = 2) -> str:
    """The page of a run with some classes, the first of which is called ``name``, and 60 mistakes."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        f"recipe: /home/me/own.py\nmodel:\n  tag: {name}\ndata:\n  val_fraction: 0.0\n# sha256 of the lines above: 0\n"
    )
    names, confusion = [name, "dog", *map(str, range(2, classes))], np.diag([3, 2, *range(2, classes)])
    confusion[0, 1] = 60
    (folder / "classification_report.txt").write_text(classification_report(confusion, names))
    mistakes = [Mistake(at, 0, 1, 0.9 - at / 1000, 0.1) for at in range(60)]
    write_mistakes(folder, confusion, mistakes, names, "test", f"{name} row {{}} {SECRET}".format)
    (folder / "metrics.csv").write_text("step,loss,lr,test_loss\n1,0.5,0.1,\n2,0.4,0.1,\n2,,,0.6\n")
    plot_curves(folder / "metrics.csv", folder / "curves.png")
    write_report(folder, a_summary(), f"batch 64, {name}", confusion, names)
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["cat", EVIL])
def test_a_page_is_well_formed_stands_alone_and_holds_what_the_files_hold(tmp_path, name):
    page = page_of(tmp_path / "my run", name)
    parsed = Nesting(page)
    assert parsed.open == ["html"] or parsed.open == []
    assert "script" not in parsed.seen
    assert parsed.seen.count("img") == 1  # the curves; a small confusion matrix is a table
    links = re.findall(r"(?:src|href)=\"([^\"]{0,40})|url\(|@import", page)
    assert [link[:22] for link in links] == ["data:image/png;base64,"]
    picture = re.findall(r"base64,([\w+/=]+)", page)[0]
    assert base64.b64decode(picture) == (tmp_path / "my run" / "curves.png").read_bytes()
    for text in ("finished · test accuracy 87.50 %", "1.00 GB reserved", "1,200", "c0ffee", "TextFiles", "2.11"):
        assert text in page
    assert "trainer fit &#39;" in page  # its folder has a blank
    assert "recipe.yaml&#39; --trust-recipe" in page
    assert (len(re.findall(r"<tr><td>.* row \d", page)), "10 more in errors.csv" in page) == (MAX_ERRORS, True)
    assert SECRET not in page
    assert "sha256" not in page
    assert "timm" not in page
    with open(tmp_path / "my run" / "errors.csv", newline="") as file:
        assert SECRET not in file.read()
        file.seek(0)
        assert len(list(csv.reader(file))) == 61


def test_a_run_that_failed_says_so_and_what_is_missing_is_left_out(tmp_path):
    (tmp_path / "run").mkdir()
    write_report(tmp_path / "run", a_summary(status="failed", steps=1, metrics={}, data={}), "plan")
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Details"]
    assert '<div class="verdict no">\n<p><b>failed · steps 1</b></p>\n</div>' in page


def test_a_page_starts_with_date_and_conclusion_and_details_come_last(tmp_path):
    page = page_of(tmp_path / "run")
    assert re.search(r'<p class="dim">\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4} · took 0:00:0\d · /', page)
    lines = re.findall(r"<p>(.*?)</p>", page.partition("<h2>")[0])
    assert lines == [
        "<b>finished · test accuracy 87.50 % · test loss 0.5000</b>",
        "model/ holds step 12, the last; there is no validation set to choose a better step. "
        "Lowest recall: cat, 4.8 % (3 of 63). Most frequent confusion: cat is predicted as dog (60 of 63).",
        "Try --data.val_fraction 0.1: without a validation set, the last step is kept instead of the best.",
    ]
    headings = ["Confusion matrix", "Classes of the test set (support: number of samples)", "Most confident mistakes"]
    assert re.findall(r"<h2>(.*?)</h2>", page) == [*headings, "Curves", "Details", "Repeat the run"]
    cells = re.findall(r"<tr><th>(\w+)</th><td [^>]*>(\d*)</td><td [^>]*>(\d*)</td></tr>", page)
    assert cells == [("cat", "3", "60"), ("dog", "", "2")]


def test_the_header_of_the_classification_report_stands_over_its_columns(tmp_path):
    table = re.findall(r"<pre>(.*?)</pre>", page_of(tmp_path / "run"), re.DOTALL)[0]
    header, _, first = table.splitlines()[:3]
    assert header.index("precision") + len("precision") == first.index("1.0000") + len("1.0000")
    assert header.index("support") + len("support") == len(first)


def test_many_classes_have_a_picture_of_the_confusion_matrix(tmp_path):
    page = page_of(tmp_path / "run", classes=11)
    assert re.findall(r'<img alt="(.*?)"', page) == ["confusion.png", "curves.png"]
    assert "<table>" not in page.partition("<h2>Classes")[0]
    assert page_of(tmp_path / "small", classes=10).partition("<h2>Classes")[0].count("<tr") == 11


def test_a_language_model_has_no_classes(tmp_path):
    (tmp_path / "classification_report.txt").write_text("loss 4.795100\nperplexity 120.916513\n")
    metrics = {"val": {"perplexity": 120.9165, "loss": 4.7951}}
    write_report(tmp_path, a_summary(metrics=metrics, data={"val": 9}), "plan")
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Details"]
    assert "<b>finished · val perplexity 120.9165 · val loss 4.7951</b>" in page


@needs_browser
@pytest.mark.first(2)
@pytest.mark.parametrize("classes", [10, 12])
@pytest.mark.parametrize(("width", "scheme"), WIDTHS_AND_SCHEMES)
def test_a_report_fits_the_window_in_light_and_dark(tmp_path, width, scheme, classes):
    page = page_of(tmp_path / "run", "sun & <b>heat</b> of a very long name", classes)
    assert_layout(page, tmp_path, width, scheme)


@needs_browser
def test_a_browser_shows_the_picture_and_runs_nothing(tmp_path):
    page = page_of(tmp_path / "run", EVIL)
    allowed = page.replace("img-src data:", "img-src data:; script-src 'unsafe-inline'")  # for the question below
    ask = """
        const image = document.querySelector("img");
        return [document.title, image.naturalWidth, image.naturalHeight, document.querySelectorAll("tr").length,
                document.querySelector(".verdict").textContent, document.querySelectorAll("script").length];"""
    title, wide, high, rows, verdict, scripts = answered(allowed, ask, tmp_path)
    assert (wide, high) == (1200, 800)
    assert verdict.strip().startswith("finished · test accuracy 87.50 %")
    assert (title, scripts) == ("Run run", 1)  # the one of this test
    assert rows > MAX_ERRORS
