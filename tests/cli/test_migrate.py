"""``trainer migrate``: what it prints is a recipe, its tables are complete, and wrong files are refused in one line."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.migration import DERIVED, FILES, LIBRARIES, PAGES, example, render, targets

import trainer.data
import trainer.models
from trainer import Memory, Recipe
from trainer.cli import run
from trainer.commands.classes import SWAPPABLE_SECTIONS, known_classes
from trainer.commands.migrate import read_table
from trainer.settings import settings_of

LARGE = 10**30
TABLES = {library: read_table(library) for library in LIBRARIES}


@pytest.fixture
def migrated(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from the content of a file and flags to the exit code, the recipe and the notes."""
    monkeypatch.chdir(tmp_path)

    def migrate(content: Any, *flags: str, name: str = "file.json") -> tuple[int, dict[str, Any], str]:
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        code = run(["migrate", name, *flags])
        out, err = capsys.readouterr()
        return code, yaml.safe_load(out), err

    return migrate


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted names; values that are lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {key: value for name, inner in tree.items() for key, value in flat(inner, f"{prefix}{name}.").items()}


def loaded(text: str, recipe: str | None, folder: Path) -> Recipe:
    """The recipe that ``trainer fit`` would train with what was printed."""
    from trainer.commands.recipes import parse_command

    path = folder / "printed.yaml"
    path.write_text(text)
    asked = parse_command("fit", "RECIPE", [recipe, "--config", str(path)] if recipe else [str(path)])
    assert asked is not None
    return asked.recipe


WITH = {"transformers": "text_files", "lightning": "image_folder", "accelerate": "lm_chat", "timm": None}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_printed_loads_and_pages_show_it(library, tmp_path):
    page = (PAGES / f"{library}.md").read_text()
    assert page == render(library), "cd tests && python -m helpers.migration"
    printed, _ = example(library, page)
    recipe = loaded(printed, WITH[library], tmp_path)
    found = {key: setting.value for key, setting in settings_of(recipe).items()}
    wanted = {key: value for key, value in flat(yaml.safe_load(printed)).items() if not key.endswith(".class")}
    wanted = {key: value for key, value in wanted.items() if not key.startswith("model.config.")}
    assert {key: found[key] for key in wanted} == wanted
    assert wanted


def test_the_examples_of_pages_are_recipes():
    for library in LIBRARIES:
        code = (PAGES / f"{library}.md").read_text().split("```python\n")[1].split("```")[0]
        names: dict[str, Any] = {"__name__": "example"}
        exec(code, names)
        assert isinstance(names["recipe"], Recipe)


def test_the_batch_is_the_product(migrated):
    file = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    code, recipe, err = migrated(file, "--ranks", "2")
    assert (code, recipe["batch_size"], recipe["memory"]["micro_batch_size"]) == (0, 24, 4)
    assert "4 (per_device_train_batch_size) × 3 (gradient_accumulation_steps) × 2 (--ranks) = 24" in err
    parts = {"devices": 2, "num_nodes": 3, "accumulate_grad_batches": 5}
    code, recipe, err = migrated({"trainer": parts, "data": {"batch_size": 7}})
    assert (code, recipe["batch_size"]) == (0, 210)
    assert "devices" not in recipe.get("run", {}), "on several nodes the launcher starts ranks"
    code, recipe, _ = migrated({"distributed_type": "NO", "gradient_accumulation_steps": 4}, "--from", "accelerate")
    assert (code, recipe["accumulate"], "batch_size" in recipe) == (0, 4, False)


def test_a_whole_file_of_transformers(migrated):
    transformers = pytest.importorskip("transformers")
    plain = transformers.TrainingArguments(output_dir="out").to_json_string()
    code, recipe, err = migrated(plain, name="training_args.json")
    assert (code, "no counterpart" in err, "unknown" in err) == (0, False, False), err
    given = {"max_steps": 9, "fp16": True, "optim": "adamw_bnb_8bit", "max_grad_norm": 0.0, "save_strategy": "no"}
    given |= {"fsdp": "shard_grad_op auto_wrap offload", "report_to": ["wandb", "comet_ml"], "adam_beta1": 0.8}
    code, recipe, err = migrated(json.loads(plain) | given)
    assert code == 0
    found = flat(recipe)
    assert (found["max_steps"], found["epochs"], found["checkpoint.every"], found["optim.clip_norm"]) == (
        9,
        9,
        None,
        None,
    )
    assert (found["memory.precision"], found["memory.optimizer_state_bits"]) == ("16-mixed", 8)
    sharded = {"strategy": "fsdp", "reshard_after_forward": False, "cpu_offload": "parameters"}
    assert recipe["memory"].items() >= sharded.items()
    assert (found["run.logger"], found["optim.betas"]) == (["wandb"], [0.8, 0.999])
    assert [line.strip().partition("=")[0] for line in err.split("no counterpart:\n")[1].splitlines()] == ["report_to"]


def test_two_precisions_are_named(migrated):
    code, recipe, err = migrated({"per_device_train_batch_size": 4, "fp16": True, "bf16": True})
    assert (code, recipe["memory"]["precision"]) == (0, "bf16-mixed")
    assert "fp16=True: not with bf16" in err


def test_names_that_a_file_gives_are_not_replaced_in(migrated):
    code, recipe, _ = migrated({"output_dir": "{seed}", "model_name_or_path": "{hub_token}", "hub_token": "no"})
    assert code == 0
    assert (recipe["run"]["dir"], recipe["model"]["name"]) == ("{seed}", "{hub_token}")


def test_every_argument_of_the_libraries_is_in_a_table():
    transformers = pytest.importorskip("transformers")
    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields.keys() - TABLES["transformers"]["keys"].keys() == set()
    cases = {name: TABLES["transformers"]["keys"][name][0] for name in fields}
    plain = json.loads(transformers.TrainingArguments(output_dir="out").to_json_string())
    differ = {name: (case.get("default"), plain[name]) for name, case in cases.items() if name != "output_dir"}
    differ = {name: (ours, theirs) for name, (ours, theirs) in differ.items() if ours != theirs and (ours or theirs)}
    assert differ == {
        "report_to": ("none", []),
        "hub_token": (None, "<HUB_TOKEN>"),
        "metric_for_best_model": ("loss", None),
    }
    lightning = pytest.importorskip("lightning.pytorch")
    arguments = {f"trainer.{name}" for name in inspect.signature(lightning.Trainer.__init__).parameters} - {
        "trainer.self"
    }
    assert arguments - TABLES["lightning"]["keys"].keys() == set()
    config = pytest.importorskip("accelerate.commands.config.config_args")
    names = {field.name for field in dataclasses.fields(config.ClusterConfig)}
    assert names - TABLES["accelerate"]["keys"].keys() == set()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_key_has_a_counterpart_that_exists_or_a_reason(library):
    known = {*settings_of(Recipe(model=trainer.models.MLP(), data=trainer.data.Digits(), batch_size=1)), "model.class"}
    for part in SWAPPABLE_SECTIONS:
        for kind in known_classes(part).values():
            blank = object.__new__(kind)
            blank.__dict__.update({field.name: None for field in dataclasses.fields(kind)})
            known |= {f"{part}.{field.name}" for field in dataclasses.fields(kind)} | {f"{part}.class"}
    known |= {f"model.loss.{field.name}" for field in dataclasses.fields(trainer.models.Objective)}
    for key, cases in TABLES[library]["keys"].items():
        ours = set(targets(key, cases))
        unknown = {one for one in ours - known if not one.startswith("model.config.model_args.")}
        assert unknown - {"model.config.model_args"} == set(), key
        assert ours or any("why" in case or case.get("values") or case.get("note") for case in cases), key
        for case in cases:
            allowed = {"default", "when", "to", "values", "why", "note", "each"}
            assert case.keys() <= allowed, key
            assert all(other in TABLES[library]["keys"] for other in case.get("when", {})), key
    assert all(hasattr(Memory(), key.removeprefix("memory.")) for key in known if key.startswith("memory."))
    assert DERIVED.keys() >= {"micro", "accumulate", "ranks"}


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "no file": (None, []),
    "empty": ("", []),
    "binary": (bytes(range(256)), []),
    "a list": ([1, 2], []),
    "text": ("hello", []),
    "broken": ('{"output_dir": ', []),
    "none of them": ({"alpha": 1}, []),
    "two of them": ({"learning_rate": 1e-4, "drop_path": 0.1}, []),
    "another library": ({"learning_rate": 1e-4}, ["--from", "jax"]),
    "a huge batch": ({"per_device_train_batch_size": LARGE}, []),
    "a negative batch": ({"per_device_train_batch_size": -8}, []),
    "a huge rate": ({"learning_rate": 1e300}, []),
    "a wrong rate": ({"learning_rate": "fast"}, []),
    "a negative rate": ({"learning_rate": -1.0}, []),
    "ranks that differ": ({"trainer": {"devices": 4}}, ["--ranks", "2"]),
    "no ranks": ({"learning_rate": 1e-4}, ["--ranks", "0"]),
    "another flag": ({"learning_rate": 1e-4}, ["--rank", "2"]),
    "epochs that are no number": ({"sched": "cosine", "epochs": "many"}, []),
    "deep": ("[" * 5000, []),
    "a section that is none": ({"trainer": 5, "seed_everything": "x"}, []),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_file_is_refused_in_one_line(name, migrated, golden, capsys):
    content, flags = MISTAKES[name]
    code, printed, err = migrated(content, *flags) if content is not None else (run(["migrate", "nope.json"]), None, "")
    err = err or capsys.readouterr().err
    assert (code, printed, err.count("\n")) == (2, None, 1), err
    golden(err)


def test_unknown_keys_are_listed_with_the_nearest_name(migrated, golden):
    code, recipe, err = migrated(
        {"learning_rate": 1e-4, "weight_decya": 0.1, "my_switch": True, "fsdp_config": "a.json"}
    )
    assert (code, recipe["optim"]["lr"]) == (0, 1e-4)
    golden(err)


def test_a_file_with_two_readings_is_read_as_asked(migrated):
    file = {"seed": 1, "output_dir": "out", "drop_path": 0.1}
    assert migrated(file, "--from", "transformers")[1]["run"]["dir"] == "out"
    assert migrated(file, "--from", "timm")[1]["model"]["config"] == {"model_args": {"drop_path_rate": 0.1}}


def test_neither_torch_nor_a_library_is_imported(tmp_path):
    for library, name in FILES.items():
        page = (PAGES / f"{library}.md").read_text()
        (tmp_path / name).write_text(
            page.split("```json\n" if name.endswith("json") else "```yaml\n")[1].split("```")[0]
        )
    heavy = ("torch", "transformers", "lightning", "accelerate", "timm")
    code = f"import sys; sys.modules.update(dict.fromkeys({heavy}))\nfrom trainer.cli import run\n"
    code += f"print([run(['migrate', name]) for name in {[*FILES.values(), 'nope']}], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 2]"


def test_it_is_a_command_of_the_help(capsys):
    assert run(["migrate", "--help"]) == 0
    assert "migrate FILE [--from" in capsys.readouterr().out
