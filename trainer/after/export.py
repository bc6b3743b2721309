"""Export of a trained model to ONNX, transformers, peft or the Hugging Face hub; each export is checked."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.after.predict import InputReader, prediction_task, verified_model_folder
from trainer.checkpoint.export import load_model
from trainer.contract import Exportable, capability
from trainer.errors import RecipeError, RunError, require, require_package
from trainer.models.hub import ADAPTER_FOLDER, HubModel, max_positions
from trainer.models.lora import ADAPTERS, dequantised_in_place, name_in_peft
from trainer.recipe import Recipe
from trainer.system.error_reports import describe_error
from trainer.system.files import hash_file, room_in, scratch_folder, staged_file, staged_folder
from trainer.system.hub import offline_advice, offline_reason
from trainer.system.status_line import show_status
from trainer.weights.files import read_weights
from trainer.weights.streaming import default_dtype, skeleton_on_meta

MAX_DIFFERENCE = 1e-3  # max difference from the trained model's outputs, relative to the largest: kernels round
MAX_MERGED_DIFFERENCE = 0.02  # the same, if its adapters were merged into half-precision weights

LENGTHS = ((3,), (12, 5), (7, 30, 2))
"""Batches of the check: words of each text, or one image each. No two batches have the same shape."""


def export(recipe: Recipe, run_dir: str | Path, to: str, output: str | None, repo: str | None, public: bool) -> str:
    """Export the model of ``run_dir``, check the export, and return a line that describes it.

    Args:
        recipe: the recipe of the run.
        run_dir: a finished run, or one whose model was written by ``trainer checkpoint export``.
        to: onnx (a file), hf (a folder that from_pretrained loads), peft (adapters alone) or hub (a repository on the
            Hugging Face hub).
        output: the file or folder; by default model.onnx, hf or peft in the run directory.
        repo: repository on the hub, such as name/model.
        public: make a new repository public.

    Raises:
        RecipeError: if the export cannot work, for example because a package is missing.
        RunError: if the outputs of the export differ from the trained model's; the export is then deleted.
    """
    if to == "hub":
        return _to_hub(verified_model_folder(run_dir), repo, public)
    target = Path(output) if output else Path(run_dir) / ("model.onnx" if to == "onnx" else to)
    kind = "file" if to == "onnx" else "folder"
    require(not target.exists(), f"--output={target} exists: remove it or give another {kind}")
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package("--to onnx", package, "onnx")
    folder = verified_model_folder(run_dir)
    trained: Any = recipe.model
    model: Any = trained.saved_in(folder) if capability(trained, Exportable).own_format else trained
    why = f"--to hf is for transformers models, and {type(model).__name__} is not one: use --to onnx"
    require(to != "hf" or isinstance(model, HubModel), f"{why}, or --to hub to upload it unchanged")
    require(trained.task != "pairs", f"trainer export is not for embeddings: use {folder} (docs/embeddings.md)")
    if to == "peft":
        require_package("--to peft", "peft", "lora")
        has_adapters = isinstance(trained, HubModel) and trained.lora.rank > 0 and trained.weights is not None
        why = f"--to peft is for LoRA adapters of pretrained transformers models, and {folder} has none"
        require(has_adapters and (folder / ADAPTER_FOLDER).is_dir(), f"{why}: use --to onnx, hf or hub")
    show_status("loading the model")
    module = _loaded(folder, partial(load_model, model, folder))
    room = max_positions(module.config.to_dict()) if isinstance(model, HubModel) else None
    batches = _batches(InputReader(model, recipe.replace(model=model).data, (), ()), target, room)
    write = _to_onnx if to == "onnx" else partial(_to_peft, trained) if to == "peft" else _to_hf
    with room_in(target.absolute().parent, "give another path with --output"):
        far = write(_Outputs(model, module, list(batches[0])).eval(), batches, folder, target)
    quantized = " (base weights in NF4, as in training)" if to == "peft" and trained.lora.base == "nf4" else ""
    return f"{target}: checked: same outputs as the trained model{quantized}, within {far:.1e} of the largest"


def _loaded(folder: Path, load: Callable[[], Any]) -> Any:
    """Return ``load()`` in eval mode; a file that does not fit the weights becomes a ``RecipeError``."""
    try:
        return load().eval()
    except (RecipeError, RunError):
        raise
    except Exception as error:  # torch and transformers raise errors of any type
        why = f"{folder} cannot be loaded ({describe_error(error)})"
        raise RecipeError(f"{why}: was its config.json changed?") from error


class _Outputs(nn.Module):
    def __init__(self, model: Any, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.model, self.names = module, model, list(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        batch, model = dict(zip(self.names, tensors, strict=True)), self.model
        first, task = tensors[0], prediction_task(model)
        if task in ("language", "masked_language"):
            return self.module(**batch).logits
        if task in ("multi_label", "regression"):
            labels = torch.zeros(first.shape[0], model.num_classes)
        else:
            labels = torch.zeros(first.shape[: 2 if task == "token" else 1], dtype=torch.long)
        logits = next(iter(model.losses(self.module, {**batch, "labels": labels}))).logits
        if logits is None:
            name = type(model).__name__
            raise RecipeError(f"{name}.losses yields no logits to export: yield Loss(..., logits=...)")
        return logits

    @torch.no_grad()
    def of(self, batch: Mapping[str, Tensor]) -> Tensor:
        try:
            return self(*batch.values())
        except IndexError as error:
            why = f"{type(self.model).__name__} has no embedding for a token of its tokenizer ({error})"
            raise RecipeError(f"{why}: were the files of the tokenizer changed?") from error


def _batches(reader: InputReader, target: Path, room: int | None) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    if reader.of_images:
        from PIL import Image

        with scratch_folder(target) as scratch:
            path = f"{scratch}/image.png"
            Image.new("RGB", (64, 64)).save(path)
            shape = reader.data.load_image(path).shape
        return [{"pixel_values": torch.randn(len(lengths), *shape, generator=drawn)} for lengths in LENGTHS]
    tokenizer, batches = reader.tokenizer, []
    special, words = set(tokenizer.all_special_ids), sorted(map(str, tokenizer.get_vocab()))
    plain = [word for word in words if tokenizer.convert_tokens_to_ids(word) not in special]
    for lengths in LENGTHS:
        picked = [torch.randint(0, len(plain), (length,), generator=drawn).tolist() for length in lengths]
        joined = [tokenizer.convert_tokens_to_string([plain[at] for at in places]).strip() for places in picked]
        batch = reader.batch([text or plain[0] for text in joined])
        batches.append({name: tensor[:, :room] for name, tensor in batch.items() if name != "words"})
    return batches


def _require_same(
    outputs: _Outputs, batches: Sequence[Any], found: Sequence[Tensor], what: Path, allowed: float = MAX_DIFFERENCE
) -> float:
    """Return the largest difference of ``found`` from the trained model's outputs; a RunError if it is too large."""
    most = 0.0
    for batch, other in zip(batches, found, strict=True):
        one = outputs.of(batch)
        fits = one.shape == other.shape and bool(other.isfinite().all())
        far = float((one - other).abs().max() / one.abs().max().clamp(min=1e-6)) if fits else float("inf")
        if far > allowed:
            differ = f"differ from the trained model's by {far:.1e} of the largest"
            raise RunError(f"the outputs of {what} {differ}: the export was deleted")
        most = max(most, far)
    return most


def _to_onnx(outputs: _Outputs, batches: list[dict[str, Tensor]], folder: Path, target: Path) -> float:
    import onnxruntime

    show_status("exporting to ONNX")
    largest, dynamic = batches[-1], torch.export.Dim.DYNAMIC
    shapes = tuple({0: dynamic} if "pixel_values" in largest else {0: dynamic, 1: dynamic} for _ in largest)
    with staged_file(target) as part:
        try:
            how: Any = {"input_names": list(largest), "output_names": ["logits"], "dynamic_shapes": (shapes,)}
            how |= {"external_data": False, "dynamo": True, "verbose": False}
            torch.onnx.export(outputs, tuple(largest.values()), part, **how)
        except RecipeError:
            raise
        except Exception as error:  # torch's exporter raises errors of any type
            name = type(outputs.model).__name__
            raise RunError(f"torch.onnx.export cannot export {name}: {describe_error(error)}") from error
        session = onnxruntime.InferenceSession(part, providers=["CPUExecutionProvider"])
        asked = {one.name for one in session.get_inputs()}  # the exporter drops unused inputs
        given = [{name: tensor.numpy() for name, tensor in batch.items() if name in asked} for batch in batches]
        found = [torch.from_numpy(session.run(["logits"], inputs)[0]) for inputs in given]
        return _require_same(outputs, batches, found, target)


def _to_hf(outputs: _Outputs, batches: list[dict[str, Tensor]], folder: Path, target: Path) -> float:
    import transformers

    for path in folder.rglob("*"):
        require(not path.is_symlink(), f"{path} is a symbolic link, and only regular files are exported: remove it")
    with staged_folder(target) as part:
        shutil.copytree(folder, part, dirs_exist_ok=True)
        load = getattr(transformers, outputs.model.auto)  # never a class named by a file
        options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        loaded = _loaded(folder, partial(load.from_pretrained, part, **options))
        copied = _Outputs(outputs.model, loaded, outputs.names)
        return _require_same(outputs, batches, [copied.of(batch) for batch in batches], target)


def _to_peft(trained: Any, outputs: _Outputs, batches: list[dict[str, Tensor]], folder: Path, target: Path) -> float:
    """Write the adapters, and check them with peft on the base weights they were trained with; nothing is unpickled."""
    from peft import PeftModel

    own = {"weights": trained.weights, "revision": trained.revision}
    adapted = skeleton_on_meta(dataclasses.replace(outputs.model, lora=dataclasses.replace(trained.lora, base="full")))
    state = _adapters_in(folder / ADAPTER_FOLDER / ADAPTERS, adapted)
    dtype = next(iter(state.values())).dtype
    coded, half = trained.lora.base == "nf4", dtype in (torch.bfloat16, torch.float16)
    with default_dtype(torch.float32 if coded else dtype):  # NF4 is computed from the file's fp32 values
        base = dataclasses.replace(outputs.model, **own).build()
    if coded:
        dequantised_in_place(base, trained.blocks)
    base = base.to(dtype).to(next(outputs.parameters()).dtype)  # as in training
    with staged_folder(target) as part:
        trained.save_adapters(adapted, state, part)
        with warnings.catch_warnings():  # peft uses a name that transformers has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            joined = PeftModel.from_pretrained(base, str(part)).eval()
        loaded = _Outputs(outputs.model, joined, outputs.names)
        found = [loaded.of(batch) for batch in batches]
        return _require_same(outputs, batches, found, target, MAX_MERGED_DIFFERENCE if half else MAX_DIFFERENCE)


def _adapters_in(path: Path, module: nn.Module) -> dict[str, Tensor]:
    found, wanted = read_weights(path), {name: p for name, p in module.named_parameters() if p.requires_grad}
    shapes = {key: tensor.shape for key, tensor in found.items() if tensor.is_floating_point()}
    if shapes != {name_in_peft(name): parameter.shape for name, parameter in wanted.items()}:
        raise RecipeError(f"{path} does not have the adapters of model.lora in recipe.yaml: export the original run")
    return {name: found[name_in_peft(name)] for name in wanted}


def _to_hub(folder: Path, repo: str | None, public: bool) -> str:
    from huggingface_hub import HfApi

    if repo is None or repo.count("/") != 1:
        raise RecipeError("--to hub needs --repo NAME/MODEL, the repository on the Hugging Face hub")
    api, names = HfApi(), sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="trainer export")
        there = {one.path: one for one in api.get_paths_info(repo, names, revision=commit.oid)}
    except Exception as error:  # no network, no token, no permission: many exception types
        why = offline_reason()
        fix = offline_advice() if why else "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
        raise RecipeError(f"--to hub: {repo} could not be written ({why or describe_error(error)}): {fix}") from error
    wrong = [name for name in names if not is_the_same(folder / name, there.get(name))]
    if wrong:
        raise RunError(f"{repo} on the hub differs from the uploaded files: {', '.join(wrong)}; upload again")
    return f"https://huggingface.co/{repo}: {len(names)} files uploaded, hashes verified"


def is_the_same(path: Path, entry: Any) -> bool:
    """Return whether the hub's ``entry`` matches ``path``, by size and sha256 or git blob hash."""
    from huggingface_hub.utils.sha import git_hash

    if entry is None or entry.size != path.stat().st_size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == hash_file(path)
    return entry.blob_id == git_hash(path.read_bytes())
