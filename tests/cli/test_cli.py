"""The command line: commands, exit codes, one-line errors."""

import logging
import os
import subprocess
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

import trainer
from trainer import cli
from trainer.cli import COMMANDS, run
from trainer.commands.recipes import packaged_recipes
from trainer.errors import RecipeError

ROOT = Path(trainer.__file__).parent.parent


def error_of(capsys: pytest.CaptureFixture, *argv: object) -> str:
    """The one line that a command line is refused with."""
    assert run([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trainer: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("trainer: error: ").strip()


def python(*argv: object, **environment: str) -> subprocess.CompletedProcess:
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *map(str, argv)], env=given, capture_output=True, text=True, check=False)


def test_fit_trains_the_recipe_with_its_source(recipe_file, calls):
    assert run(["fit", "--epochs", "3", str(recipe_file), "--optim.lr=1e-4", "--model.kind", "wide"]) == 0
    [(command, recipe, source)] = calls
    assert (command, source) == ("fit", str(recipe_file))
    assert (recipe.epochs, recipe.optim.lr, recipe.model.kind) == (3, 1e-4, "wide")
    assert (recipe.batch_size, recipe.model.width, recipe.data.root) == (64, 8, "points")  # the recipe's own


def test_a_recipe_path_may_be_relative_and_it_may_import_what_lies_beside_it(recipe_file, calls, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(recipe_file.parent)
    (recipe_file.parent / "beside_the_recipe.py").write_text("EPOCHS = 11\n")
    text = recipe_file.read_text().replace("batch_size=64", "batch_size=64, epochs=EPOCHS")
    recipe_file.write_text(text.replace("from trainer", "from beside_the_recipe import EPOCHS\nfrom trainer", 1))
    assert run(["fit", recipe_file.name]) == 0
    assert (calls[0][1].epochs, calls[0][2]) == (11, str(recipe_file))


def test_errors_of_training_keep_their_exit_codes(recipe_file, calls, monkeypatch, capsys):
    def fail_with(error):
        def fit(recipe, source):
            raise error

        monkeypatch.setattr(sys.modules["trainer.api"], "fit", fit)

    fail_with(RecipeError("data.root='x' holds\n  no images"))
    assert error_of(capsys, "fit", recipe_file) == "data.root='x' holds no images"
    fail_with(KeyboardInterrupt())
    assert run(["fit", str(recipe_file)]) == 130
    fail_with(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        run(["fit", str(recipe_file)])


def test_an_error_says_which_rank_has_it(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for rank, prefix in ((None, "[rank 1] "), ("5", "[rank 5] "), ("0", "")):
        if rank:
            monkeypatch.setenv("RANK", rank)
        assert run(["fit"]) == 2
        assert capsys.readouterr().err.startswith(f"{prefix}trainer: error: ")


def test_a_custom_recipe_needs_the_switch_only_if_a_yaml_file_names_it(run_dir, recipe_file, calls, capsys, golden):
    for words in (["evaluate", run_dir], ["fit", run_dir / "recipe.yaml"], ["plan", run_dir / "recipe.yaml"]):
        golden(error_of(capsys, *words))
    assert run(["fit", str(run_dir / "recipe.yaml"), "--trust-recipe"]) == 0
    assert run(["fit", str(recipe_file), "--config", str(run_dir / "recipe.yaml")]) == 0
    assert [(call[1].seed, call[2]) for call in calls] == [(7, str(recipe_file))] * 2


def test_evaluate_and_predict_take_flags_and_predict_texts_or_images(run_dir, calls, tmp_path):
    assert run(["evaluate", str(run_dir), "--trust-recipe", "--data.root", "elsewhere"]) == 0
    command, recipe, folder, file = calls.pop()
    assert (command, recipe.seed, recipe.data.root, folder, file) == ("evaluate", 7, "elsewhere", run_dir, None)
    trusted = ["predict", str(run_dir), "--trust-recipe"]
    assert run([*trusted, "--text", "one", "two", "--seed", "3", "--text=--three"]) == 0
    image = tmp_path / "image.png"
    image.touch()
    assert run([*trusted, "--image", str(image)]) == 0
    files = ["a.png", "more/*.png", "--output", "out.csv", "--top-k=3", "--probabilities", "--batch-size", "7"]
    assert run([*trusted, *files, "--batch_size", "9"]) == 0
    how = {"output": "out.csv", "top_k": 3, "probabilities": True, "batch_size": 7}
    drawn = ["--max-new-tokens", "5", "--temperature=0.8", "--top-p", ".9"]
    assert run([*trusted, "--text", "def", *drawn]) == 0
    asked = [(["one", "two", "--three"], [], [], {}), ([], [str(image)], [], {}), ([], [], files[:2], how)]
    asked.append((["def"], [], [], {"max_new_tokens": 5, "temperature": 0.8, "top_p": 0.9}))
    assert run([*trusted, "-", "--lines"]) == 0
    asked.append(([], [], ["-"], {"lines": True}))
    assert [call[3:] for call in calls] == [(*given, {**how, "collect": False}) for *given, how in asked]
    assert [(call[1].seed, call[1].batch_size) for call in calls] == [(3, 64), (7, 64), (7, 9), (7, 64), (7, 64)]


def test_help_shows_every_flag_with_type_meaning_and_value(recipe_file, calls, capsys):
    assert run(["fit", str(recipe_file), "--help"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "--batch_size int|null samples per optimizer step over all ranks" in page
    assert "--model.width int features of a layer, at most 90% of them used. (default: 8)" in page
    assert "--model.kind wide|deep (default: deep)" in page
    for flag in ("config", "print_config", "memory.strategy", "data.root", "run.logger, --run.logger+"):
        assert f"--{flag} " in page
    assert "--model.function" not in page  # a function cannot be written on a command line
    assert calls == []


def test_help_and_version_at_the_top(capsys):
    assert run([]) == 0
    page = capsys.readouterr().out
    assert run(["--help"]) == 0
    assert capsys.readouterr().out == page
    known = {"vit_digits", "mlp_fashion_mnist", "vit_cifar10", "distilbert_imdb", "bigbird_imdb"}
    assert known <= set(packaged_recipes())
    assert [name for name in [*packaged_recipes(), *(f"\n  {name} " for name in COMMANDS)] if name not in page] == []
    assert run(["fit", "--help"]) == 0
    assert capsys.readouterr().out == page
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"trainer {trainer.__version__}\n"


def test_looking_loads_nothing_heavy():
    looks = [["--help"], ["fit", "vit_digits", "--help"], ["plan", "vit_digits", "--help"]]
    looks += [["fit", "distilbert_imdb", "--print_config", "--epochs", "3"]]
    heavy = "print('loaded', {'torch', 'jsonargparse'} & set(sys.modules), file=sys.stderr)"
    code = f"import sys; from trainer.cli import run\nfor argv in {looks}:\n  assert run(argv) == 0\n  {heavy}"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == ["loaded set()", *["loaded {'jsonargparse'}"] * 3]


@pytest.mark.slow
def test_a_recipe_is_a_script_with_the_same_flags_and_exit_codes(recipe_file):
    printed = python(recipe_file, "--print_config", "--epochs", "3")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[0] == f"recipe: {recipe_file}"
    assert "epochs: 3" in printed.stdout.splitlines()
    refused = python(recipe_file, "--epoch", "3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "trainer: error: unknown flag --epoch (value '3'); did you mean --epochs?\n"
    assert python(recipe_file, "fit").returncode == 2
    refused = python("-m", "trainer", "fit", "vit_digits", "--epochs", "three", RANK="1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "[rank 1] trainer: error: epochs='three' must be int\n"


def test_what_torch_says_of_torchao_is_not_shown_and_all_else_is(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # some versions of torch set it to False
    assert run(["--version"]) == 0
    ours, theirs = Enum("Ours", ["ONE"]), Enum("KernelPreference", ["AUTO"])
    theirs.__module__ = "torchao.quantization.quantize_.common"
    log = logging.getLogger("torch.utils._pytree")
    with caplog.at_level(logging.WARNING, logger=log.name):
        for kind in (theirs, ours):
            log.warning("%s is an Enum subclass and is now natively supported by torch.compile", kind)
    assert {record.args for record in caplog.records} == {(ours,)}


def test_a_library_that_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys, golden):
    (tmp_path / "brokenlib").mkdir()
    (tmp_path / "brokenlib" / "__init__.py").write_text("import brokenlib.config")
    (tmp_path / "brokenlib" / "config.py").write_text("class Trace:\n    level = int('abc')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as caught:
        import_module("brokenlib")
    assert cli._exit_code(caught.value) == 1
    golden(capsys.readouterr().err)
