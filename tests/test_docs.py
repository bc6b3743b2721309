"""The code that README and docs show is the code that runs."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
import pytest
import torch
from helpers.benchmark import imported
from helpers.problems import make_model
from helpers.rounding import ROUNDING
from helpers.warm import forks, python
from PIL import Image
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from conformance.cases import CASES
from conformance.verdict import VISIBLE
from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.data import Conversations, Documents, HubText, ImageFolder, Mixture, Preferences, StreamedText, TextFiles
from trainer.memory.initialize import build_on_meta, materialise
from trainer.models import CausalLM, ImageClassifier, MaskedLM, SentenceEmbedder
from trainer.recipe import Memory
from trainer.settings import settings_of
from trainer.system.child_jobs import run_in_child

ROOT = Path(__file__).parents[1]


def blocks(path, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_the_recipe_in_the_quickstart_is_the_packaged_one():
    assert blocks("docs/quickstart.md")[0] == (ROOT / "recipes" / "vit_digits.py").read_text()


@pytest.mark.slow
def test_the_first_python_of_the_readme_trains(tmp_path):
    (tmp_path / "first.py").write_text(blocks("README.md")[0].replace("epochs=10", "epochs=2"))
    done = python("first.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0.5 < float(done.stdout.splitlines()[-1]) <= 1


CELLS = json.loads((ROOT / "conformance" / "results.json").read_text())["cells"]
"""Results of conformance by trainer and case."""

ROWS_OF_WHY = {"ragged window": "ragged", "padded tokens": "padded", "uneven ranks": "2-ranks-uneven"}
COLUMNS_OF_WHY = ("transformers", "accelerate", "lightning", "trl", "ours")


def shown(trainer, case):
    """What the README shows of a cell."""
    cell = CELLS[f"{trainer}/{case}"]
    if cell["verdict"] == "crashed":
        assert "no end within" in cell["detail"], (trainer, case, cell)
        return "hangs"
    texts = {"exact": "exact", "rounding": "exact", "unsupported": ""}
    return texts[cell["verdict"]] if cell["verdict"] in texts else f"{cell['error']:.2g}"


def test_the_errors_in_the_readme_are_those_that_were_measured():
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\| \[([\w ]+)\]\[r\] \|(.*)\|$", text, re.MULTILINE)
    assert [name for name, _ in lines] == list(ROWS_OF_WHY)
    for name, row in lines:
        for cell, trainer in zip(row.split("|"), COLUMNS_OF_WHY, strict=True):
            said = re.sub(r"\[(.*?)\]\[\w+\]", r"\1", cell).strip()
            found = [shown(trainer, ROWS_OF_WHY[name])]
            if found[0] not in ("exact", ""):
                found.append(shown(f"{trainer}_remedy", ROWS_OF_WHY[name]))
            assert said == " → ".join(found), (name, trainer)


def test_the_versions_in_the_readme_are_those_that_were_measured():
    head = re.search(r"^\| \| (transformers .*) \| trainer \|$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    for title, trainer in zip(head.split(" | "), COLUMNS_OF_WHY, strict=False):
        measured = {cell["version"] for name, cell in CELLS.items() if name.startswith(f"{trainer}/")}
        assert len(measured) == 1, trainer
        assert f"{measured.pop()}.".startswith(f"{title.split()[1]}."), title


def test_the_errors_of_dpo_are_those_that_were_measured():
    page = (ROOT / "docs" / "preferences.md").read_text()
    ours, theirs = (CELLS[f"{trainer}/dpo"]["error"] for trainer in ("ours_language", "trl_dpo"))
    assert f"that of the whole batch to {ours:.0e}".replace("e-0", "e-") in page
    assert f"relative error of {theirs:.2f}" in page


def test_the_memory_of_long_texts_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks" / "results" / "long_texts.json").read_text())
    page = (ROOT / "docs" / "long-texts.md").read_text()
    for tokens in measured["increase_mb"]["trainer"]:
        cells = [f"{median(measured['increase_mb'][name][tokens]):,.0f} MB" for name in ("transformers", "trainer")]
        assert f"| {int(tokens):,} | {' | '.join(cells)} |" in page
    slopes = [f"{measured['kb_per_token'][name]:.0f} kB per token" for name in ("transformers", "trainer")]
    assert f"| slope over all | {' | '.join(slopes)} |" in page


def test_the_errors_of_every_split_are_rounding():
    rows = re.findall(r"^\| \d+ samples?.*?\|(.*)\|$", (ROOT / "docs" / "equality.md").read_text(), re.MULTILINE)
    errors = [float(cell) for row in rows for cell in row.split("|")]
    assert len(errors) == 6 * 4 * 6  # losses, splits, places
    assert max(errors) <= ROUNDING


PEERS = {
    "exact": (
        *("accelerate_remedy/ragged", "accelerate_remedy/padded", "accelerate_remedy/short-window"),
        *("accelerate_remedy/class-weights", "accelerate_remedy/2-ranks-uneven", "accelerate_remedy/2-ranks-weights"),
        *("transformers/texts", "transformers/padded", "transformers/packed", "transformers/short-window"),
        *("transformers_remedy/ragged", "transformers_remedy/classifier", "transformers_remedy/2-ranks-uneven"),
        *("trl/texts", "trl/padded", "trl/packed", "trl/short-window", "trl/2-ranks-padded"),
    ),
    "ragged": (
        *("accelerate/ragged", "lightning/ragged", "keras/ragged", "lightning_remedy/ragged", "transformers/ragged"),
        *("accelerate/padded", "lightning/padded", "lightning_remedy/padded", "transformers/tokens"),
    ),
    "factor": (
        *("accelerate/short-window", "lightning/short-window", "transformers/classifier", "transformers/gpt2"),
        *("transformers_remedy/class-weights", "transformers_remedy/gpt2", "trl/gpt2"),
    ),
    "samples": (
        *("accelerate/2-ranks-uneven", "transformers/2-ranks-uneven", "trl/2-ranks-uneven"),
        *("lightning/2-ranks-uneven", "lightning_remedy/short-window"),
    ),
    "crashed": ("trl_remedy/2-ranks-uneven",),
}
"""The verdicts that docs/peers.md describes."""


@pytest.mark.parametrize("kind", PEERS)
def test_other_trainers_accumulate_as_the_page_says(kind):
    verdicts = {cell: CELLS[cell]["verdict"].replace("rounding", "exact") for cell in PEERS[kind]}
    assert {cell: verdict for cell, verdict in verdicts.items() if verdict != kind} == {}


def test_a_classifier_in_transformers_is_off_by_all_micro_batches():
    """Four of them, on each of two ranks."""
    assert CELLS["transformers/classifier"]["detail"].endswith(": 4 times the gradient of the whole batch")
    assert CELLS["transformers/2-ranks-classifier"]["detail"].endswith(": 8 times the gradient of the whole batch")


REJECTING = ("transformers_drop_in", "trl_drop_in")


@pytest.mark.parametrize("trainer", [*REJECTING, "lightning_drop_in", "accumulate", "ours", "ours_language"])
def test_drop_ins_and_this_trainer_are_exact_as_the_pages_say(trainer):
    cells = {case: CELLS[f"{trainer}/{case}"] for case in CASES}
    depend = {cells.pop(case)["verdict"] for case in ("moe", "batch-norm")}  # no sums over samples
    assert depend <= {"rejected" if trainer in REJECTING else "other", "rejected", "unsupported"}
    # The sum in bfloat16, and what a drop-in leaves to the other trainer, are red in the table.
    for case in ("bf16", *(("evaluate-texts", "2-ranks-dropout") if trainer in REJECTING else ())):
        del cells[case]
    rejected = {case for case, cell in cells.items() if cell["verdict"] == "rejected"}
    assert rejected <= ({"label-smoothing", "two-losses"} if trainer in REJECTING else set())  # not in the logits
    measured = {case: cell for case, cell in cells.items() if cell["verdict"] not in ("rejected", "unsupported")}
    assert len(measured) > 15
    assert {cell["verdict"] for cell in measured.values()} <= {"exact", "rounding"}
    assert max(cell["error"] for cell in measured.values()) <= VISIBLE


@pytest.mark.slow
def test_a_model_of_ones_own_runs_as_written(tmp_path):
    (tmp_path / "spirals.py").write_text(blocks("docs/your-own-model.md")[0])
    done = python("spirals.py", "--run.dir", "out", "--model.width", "32", "--data.size", "450", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "status" in done.stdout
    accuracy = float(re.search(r"test +accuracy ([\d.]+)", done.stdout)[1])
    assert accuracy > 80


def test_the_pretrained_model_of_ones_own_starts_as_written(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text("\n".join(blocks("docs/your-own-model.md")))
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_network")
    source = own.Network(width=8, num_classes=3).build()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = own.PretrainedNetwork(width=8, num_classes=2, weights=str(tmp_path / "w.safetensors"))
    torch.manual_seed(1)
    built, streamed = model.build(), build_on_meta(model, seed=1)
    materialise(streamed, model, torch.device("cpu"), seed=1)
    assert torch.equal(built[0].weight, source[0].weight)
    for name, value in built.state_dict().items():
        assert torch.equal(value, streamed.state_dict()[name]), name


def test_the_loop_of_ones_own_runs_as_written():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    before = model.weight.clone()
    loader = [(torch.randn(size, 2), torch.arange(size) % 3) for size in (4, 4, 1)] * 4
    names = {"torch": torch, "model": model, "loader": loader, "cross_entropy": cross_entropy}
    inner = {}
    names["scheduler"] = type("Scheduler", (), {"step": lambda self: inner.update(steps=inner.get("steps", 0) + 1)})()
    exec(blocks("docs/your-own-loop.md")[0], names)
    assert inner == {"steps": 1}  # 12 micro-batches: a window of 8, and the flushed rest
    assert not torch.equal(model.weight, before)


def test_new_names_of_the_glossary_are_in_the_code():
    """Each name in the first column of "Renamed code" is a word of the package, or of the file that the row names."""
    files = {path: path.read_text() for path in (ROOT / "trainer").rglob("*.py")}
    table = (ROOT / "docs/glossary.md").read_text().partition("## Renamed code")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    missing = []
    for names, meaning, _ in rows:
        place = re.match(r"In `(\S+\.py)`", meaning)
        code = files[ROOT / "trainer" / place[1]] if place else "\n".join(files.values())
        words = {word for name in re.findall(r"`(.*?)`", names) if "..." not in name for word in name.split(".")}
        missing += [word for word in sorted(words) if not re.search(rf"\b{word}\b", code)]
    assert len(rows) > 50
    assert missing == []


MYPY = ["--strict", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir", "cache"]
TYPE_CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", *MYPY, "--disable-error-code", "no-untyped-call"],  # for Tensor.backward
    "pyright": ["pyright", "--pythonpath", sys.executable],  # its strict mode rejects what torch and datasets leave out
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", TYPE_CHECKERS)
def test_the_examples_pass_a_strict_type_checker(checker, tmp_path):
    """The package is typed (py.typed), so the examples of the pages are checked as a user's own code would be."""
    if checker == "mypy":
        pytest.importorskip("mypy")
    elif not shutil.which("pyright"):
        pytest.skip("needs pyright, see CONTRIBUTING.md")
    fragments = {"your-own-loop", "drop-in"}  # loops and classes whose names the reader has
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!u]*/*.md")]  # not upstream/
    for page in pages:
        if (found := blocks(page)) and page.stem not in fragments:
            for number, text in enumerate(["\n".join(found)] if page.stem == "your-own-model" else found):
                name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
                (tmp_path / f"{name}_{number}.py").write_text(text)
    files = sorted(map(str, tmp_path.glob("*.py")))
    assert len(files) > 8
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "pythonVersion": "3.10"}))
    command = [*TYPE_CHECKERS[checker], *(files if checker == "mypy" else [])]  # pyright reads its settings alone
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert (ROOT / "trainer" / "py.typed").is_file()


@pytest.mark.slow
def test_the_recipes_for_own_data_run_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "review;stars\nw2 w3;5\nw4 w5 w6;1\nw7;5\nw8 w9;1\n"
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(rows)
    for part, label, number in itertools.product(("train", "test"), ("cat", "dog"), range(2)):
        (tmp_path / "photos" / part / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (40 * number, 90, 9)).save(tmp_path / "photos" / part / label / f"{number}.png")
    lines = [shlex.split(line)[1:] for line in blocks("docs/data.md", "console")[0].splitlines()]
    assert [line[:2] for line in lines] == [["fit", "text_files"], ["fit", "image_folder"]]
    bert, vit = make_model("distilbert"), {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    vit |= {"image_size": 16, "patch_size": 8, "intermediate_size": 8}
    tiny = {"text_files": ["distilbert", bert.config, "--model.tokenizer", bert.tokenizer, "--data.max_length", "32"]}
    tiny["image_folder"] = ["vit", vit, "--data.image_size", "16"]
    for line in lines:
        name, config, *more = tiny[line[1]]
        flags = ["--model.name", name, "--model.weights", "null", "--model.config", json.dumps(config), *more]
        flags += ["--data.cache_dir", "cache", "--run.dir", line[1], "--run.predict", "false", "--epochs", "1"]
        assert run([*line, *flags]) == 0
        assert json.loads((tmp_path / line[1] / "summary.json").read_text())["status"] == "finished"


def test_shards_are_written_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": f"film {number}", "label": number % 2} for number in range(4000)]
    for part in (0, 1):
        lines = "".join(json.dumps(row) + "\n" for row in rows[2000 * part : 2000 * (part + 1)])
        (tmp_path / f"reviews-{part}.jsonl").write_text(lines)
    (tmp_path / "shards" / "train").mkdir(parents=True)
    exec(blocks("docs/data.md")[0], {})
    files = sorted((tmp_path / "shards" / "train").iterdir())
    assert [path.name for path in files] == [f"part-{number}.parquet" for number in range(8)]
    assert [row for path in files for row in pq.read_table(path).to_pylist()] == rows
    assert pq.ParquetFile(files[0]).metadata.row_group(0).num_rows == 500


@pytest.mark.slow
def test_the_loop_on_a_fake_gpu_prints_what_the_readme_says(tmp_path):
    both = r"```python\n(from torch|import torch.*?)```\n```text\n(.*?)```"
    code, printed = re.findall(both, (ROOT / "README.md").read_text(), re.S)[0]
    (tmp_path / "loop.py").write_text(code)
    done = python("loop.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number = r"\d[\d,.]*"
    said, shown = (re.sub(number, "#", text).split() for text in (done.stdout, printed))
    first = shown.index("…")
    end = shown[first + 1 :]
    assert (said[:first], said[-len(end) - 2 : -2]) == (shown[:first], end)  # the last line is about notes
    for name in ("card", "reserved"):
        ours, theirs = (re.search(rf"^{name}.*?({number}) GB", text, re.M)[1] for text in (done.stdout, printed))
        assert abs(float(ours) / float(theirs) - 1) < 0.01, name


@pytest.mark.parametrize("page", ["README.md", "docs/language-models.md"])
def test_runs_that_a_page_shows_are_taken(page, capsys, tmp_path, monkeypatch):
    (tmp_path / "my.csv").write_text("text,label\ngood film,1\nbad film,0\nfine,1\npoor,0\n")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("trainer fit ")]
    assert len(lines) >= 4
    for line in lines:
        assert run([*shlex.split(line, comments=True)[1:], "--print_config"]) == 0, (line, capsys.readouterr().err)


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
NAMED = r"(?:--|`|\b(?=memory\.|optim\.|run\.))((?:memory|optim|run|model|data)\.[a-z_]+(?:\.[a-z_]+)?)"
RECIPES = ("vit_digits", "mlp_fashion_mnist", "distilbert_imdb", "bigbird_imdb")


def test_every_setting_that_a_page_names_exists():
    known = {key for name in RECIPES for key in settings_of(load_recipe(name)[0])}
    kinds = (HubText, ImageFolder, Mixture, TextFiles, StreamedText, Conversations, Documents, Preferences)
    fields = {
        field.name
        for kind in (*kinds, ImageClassifier, CausalLM, MaskedLM, SentenceEmbedder)
        for field in dataclasses.fields(kind)
    }
    known |= {f"{part}.{name}" for part in ("data", "model") for name in fields}
    known |= {key.rsplit(".", 1)[0] for key in known}
    known |= {
        "memory.png",
        "memory.svg",
        "memory.py",
        "model.safetensors",
        "model.safetensors.index",
        "run.lock",
    }  # files
    known |= {"model.parameters", "model.loss_function", "optim.lr_scheduler"}  # what code calls so
    known |= {"data.size"}  # of the network in docs/your-own-model.md
    known |= {"run.greeting", "memory.release_cache"}  # of the examples in CONTRIBUTING.md
    named = {(page, key) for page in [*PAGES, "CHANGELOG.md", "benchmarks/README.md"] for key in found_in(page)}
    assert len({key for _, key in named}) > 40
    assert {(page, key) for page, key in named if key not in known} == set()


def found_in(page):
    return re.findall(NAMED, (ROOT / page).read_text())


def test_every_memory_setting_is_on_the_pages_of_techniques():
    ours = {f"memory.{name}" for name in vars(Memory()) if name != "budget"}
    pages = (ROOT / "docs" / "techniques").glob("*.md")
    assert ours - {key for page in pages for key in found_in(page)} == set()


@pytest.mark.parametrize("part", ["Dependencies", "Extras"])
def test_the_page_of_the_installation_has_every_dependency_and_extra(part):
    section = (ROOT / "docs" / "install.md").read_text().split(f"## {part}\n")[1].split("## ")[0]
    text = (ROOT / "pyproject.toml").read_text()
    names = {
        "Dependencies": re.findall(r'^    "([\w-]+)', text.split("dependencies = [")[1].split("\n]")[0], re.MULTILINE),
        "Extras": re.findall(r"^(\w+) = \[", text.split("optional-dependencies]")[1].split("\n[")[0], re.MULTILINE),
    }[part]
    assert len(names) > 10
    assert sorted(re.findall(r"^\| ([\w-]+) \|", section, re.MULTILINE)[1:]) == sorted(names)


def headings(path):
    lines = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_links_lead_to_a_file_or_a_heading():
    for page in PAGES:
        text = re.sub(r"^\[\w+\]: (.*)", r"[](\1)", (ROOT / page).read_text(), flags=re.MULTILINE)
        for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            if path.is_relative_to(ROOT / "docs" / "reference"):  # generated, so mkdocs checks the link
                continue
            assert path.exists(), (page, target)
            assert not heading or heading in headings(path), (page, target, heading)


def test_what_is_said_of_predictions_is_what_was_found():
    """Every row of the benchmarks is in the page, with its error, and the README's figures are those of the rows."""
    results = ROOT / "benchmarks" / "results"
    page, readme = ((ROOT / path).read_text() for path in ("docs/planner/accuracy.md", "README.md"))
    page = page.replace("\u2212", "-")
    found = json.loads((results / "planner_holdout.json").read_text())
    assert found["complete"]
    for row in found["rows"]:
        lines = [line for line in page.splitlines() if f"{row['source']}: {row['configuration']}" in line]
        said = [line for line in lines if (f"({row['note']})" in line) == bool(row["note"])]
        if "error" in row:
            error = f"{100 * row['error']:+.2f} %"
        else:
            error = "right" if row["fitted"] == row["predicted_fits"] else "wrong"
        assert any(f"{row['card']}, {row['torch']} | " in line and error in line for line in said), row
    for row in json.loads((results / "planner_cpu.json").read_text())["rows"]:
        cells = (row["name"], f"{row['measured_gb']:.3f}", f"{row['predicted_gb']:.3f}", f"{100 * row['error']:+.1f} %")
        assert any(all(cell in line for cell in cells) for line in page.splitlines()), row
    claimed = re.search(r"On (\d+) published runs of (\w+) authors it is within ([\d.]+) %", readme).groups()
    summary = found["summary"]["torch 2.4 to 2.6"]
    eager = [row for row in found["rows"] if row["eager"] and "error" in row and row["torch"] in ("2.4", "2.5", "2.6")]
    assert (str(len(eager)), "four", f"{100 * summary['worst']:.1f}") == claimed
    assert (len(eager), len({row["source"] for row in eager})) == (summary["rows"], 4)
    assert found["summary"]["torch 2.1, in sample"]["rows"] == 10
    assert found["summary"]["torch 2.1, in sample"]["worst"] < 0.03


def sizes_of_some():
    """Predicted GB by script, of eight that take the least time: for a process that never trained."""
    (holdout,) = imported("planner_holdout")
    rows = [*holdout.GPT2_ROWS, *holdout.HEAD_ROWS]
    found = {row.configuration: run_in_child(partial(holdout.predicted, row))[row.kind] for row in rows if row.eager}
    return {name: round(size / 1e9, 3) for name, size in found.items()}


@pytest.mark.slow
def test_peaks_are_predicted_as_the_results_say():
    with ProcessPoolExecutor(1, forks) as pool:
        sizes = pool.submit(sizes_of_some).result()
    rows = json.loads((ROOT / "benchmarks/results/planner_holdout.json").read_text())["rows"]
    assert len(sizes) == 8
    assert sizes == {row["configuration"]: row["predicted_gb"] for row in rows if row["configuration"] in sizes}
