"""Liger's kernels in language models: certified by their gradients, in single instances, seen by plans."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.kernels import Dispatches, interpreted
from helpers.language import FAMILIES, language_samples
from helpers.problems import collate
from torch import nn

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.models import CausalLM, LoRA
from trainer.models.liger import ARCHITECTURES, NORMS, PARTS, ROTATE
from trainer.system.child_jobs import run_in_child

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is missing: the extra kernels")
DEFAULT = ("phi3",)
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 61}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"padding_free": False},
    "packed": {},
    "recomputed": {"checkpoint": "full"},
    "products kept, adapters": {"checkpoint": "selective", "lora": LoRA(rank=2)},
    "adapters on 4 bits": {"lora": LoRA(rank=2, base="nf4")},
}


def liger() -> Any:
    """benchmarks/liger.py, in a process that interprets kernels."""
    with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        import liger

    return liger


def model(family: str = "llama", **options: Any) -> CausalLM:
    name, config = FAMILIES[family]
    return CausalLM(name, **{"tokenizer": "none", "config": config, "dropout": 0.0, **options})


# Certificates


def certified(*kinds: str) -> dict[str, tuple[str, ...]]:
    benchmark = liger()
    return {kind: tuple(benchmark.certify(kind).parts) for kind in kinds}


def with_a_wrong_kernel() -> list[Any]:
    """What is certified of phi, if a kernel is off by a ten thousandth."""
    from liger_kernel.ops import LigerRopeFunction

    benchmark, right = liger(), LigerRopeFunction.apply
    with patch.object(LigerRopeFunction, "apply", lambda query, *others: right(query * (1 + 1e-4), *others)):
        found = benchmark.certify("phi")
    return [found.parts, [*found.refused]]


def everything() -> tuple[Any, ...]:
    return certified(*DEFAULT), with_a_wrong_kernel(), differences()


@pytest.fixture(scope="module")
def found() -> tuple[Any, ...]:
    """What one process has interpreted: it imports for longer than it computes."""
    return interpreted(everything)


@pytest.mark.slow
@needs_liger
def test_gradients_are_those_of_transformers(found: Any) -> None:
    assert found[0] == {kind: ARCHITECTURES[kind] for kind in DEFAULT}


@needs_liger
@pytest.mark.slow
def test_an_architecture_of_each_row_is_what_the_table_says() -> None:
    """All of them take a quarter of an hour: benchmarks/liger.py."""
    kinds = (*(row.split()[0] for row in PARTS.values()), "seed_oss", "glm4", "phimoe")
    assert interpreted(partial(certified, *kinds)) == {kind: ARCHITECTURES.get(kind, ()) for kind in kinds}


@pytest.mark.slow
@needs_liger
def test_the_certificate_finds_a_wrong_kernel(found: Any) -> None:
    assert found[1] == [[], ["rotary"]]


def test_the_table_is_the_recorded_certificate() -> None:
    rows = json.loads((BENCHMARKS / "results/liger.json").read_text())["certificates"]
    assert {kind: tuple(row["parts"]) for kind, row in rows.items() if row["parts"]} == ARCHITECTURES
    assert all(not {*NORMS} & {*parts[1:]} for parts in ARCHITECTURES.values())
    page = (BENCHMARKS.parent / "docs/techniques/kernels.md").read_text()
    for parts, kinds in PARTS.items():
        names = [", ".join(f"`{name}`" for name in one) for one in (parts.split(), sorted(kinds.split()))]
        assert f"| {' | '.join(names)} |\n" in page


# Together with other techniques


def differences() -> dict[str, tuple[float, list[str]]]:
    """By way of computing a batch: how far the gradient with the kernels is from that of transformers, of the padded
    batch, and which kernels were used."""
    from trainer.memory.activation_checkpointing import checkpoint_blocks
    from trainer.run.attention import record_attention_kernels

    liger().interpret()
    batch = collate(language_samples(3, most=3))

    def computed(family: str, kernels: str, checkpoint: str = "none", **options: Any) -> Any:
        torch.manual_seed(0)
        made = model(family, kernels=kernels, **options)
        module: Any = made.build().train()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        checkpoint_blocks(module, list(module.get_submodule("model.layers")), checkpoint)
        used = record_attention_kernels(module)
        for loss in made.losses(module, made.packed(batch)):
            loss.total.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return gradients, [name for name in used if name.startswith("Liger")]

    found = {}
    for family in ("llama", "gemma2"):
        for way, options in WAYS.items() if family == "llama" else [("packed", WAYS["packed"])]:
            ours, used = computed(family, "liger", **options)
            theirs, none = computed(family, "none", **{**options, "padding_free": False, "checkpoint": "none"})
            assert ours.keys() == theirs.keys()
            assert none == []
            whole = torch.stack([value.norm() for value in theirs.values()]).norm()
            off = [(ours[name] - value).norm() / max(value.norm(), 1e-3 * whole) for name, value in theirs.items()]
            found[f"{family}, {way}"] = float(max(off)), used
    return found


@pytest.mark.slow
@needs_liger
def test_gradients_stay_with_packing_checkpointing_and_adapters(found: Any) -> None:
    assert len(found[2]) == len(WAYS) + 1
    for way, (off, used) in found[2].items():
        # Of a few hundred roundings of 2^-24 each in fp32; transformers' own are some 10 from fp64.
        assert off < 200 * 2.0**-24, way
        gated = "LigerGELUMul" if way.startswith("gemma2") else "LigerSiLUMul"
        assert used == sorted([gated, "LigerRMSNorm", "LigerRope"]), way


# Instances


@needs_liger
def test_only_the_instance_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    import liger_kernel.ops  # noqa: F401  before it sees a GPU that is not there
    from transformers.models.llama import modeling_llama as theirs

    before = {name: (value, getattr(value, "forward", None)) for name, value in vars(theirs).items()}
    plain = model(kernels="none").build()
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_available", lambda: True)
        fused = model().build()
    changed = {type(one).__name__ for one in fused.modules() if type(one) not in map(type, plain.modules())}
    assert changed == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    assert {name: (value, getattr(value, "forward", None)) for name, value in vars(theirs).items()} == before
    assert [type(one) for one in model(kernels="none").build().modules()] == [type(one) for one in plain.modules()]
    fused.load_state_dict(plain.state_dict())
    # On a CPU the same bits.
    batch = collate(language_samples(3))
    for one in (plain, fused):
        one(**batch).backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_without_a_gpu_nothing_changes() -> None:
    assert not any("liger" in type(one).__module__ for one in model().build().modules())
    kinds = [[type(one) for one in model(**kernels).build().modules()] for kernels in ({}, {"kernels": "none"})]
    assert kinds[0] == kinds[1]


def captured() -> int:
    """Graphs that the compiler makes of a block with kernels; none is run."""
    from trainer.models import liger as ours

    graphs = []

    class NotRun(Exception):
        """In place of a graph."""

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise NotRun

        graphs.append(sum("autograd_function_apply" in node.name for node in graph.graph.nodes))
        return run

    with patch("torch.cuda.is_available", lambda: True):
        block = model().build().train().model.layers[0]
    tokens, turns = torch.randn(2, 7, 16, requires_grad=True), (torch.randn(1, 7, 4), torch.randn(1, 7, 4))
    available = patch("torch.utils._triton.has_triton", lambda *_, **__: True)
    with available, patch.object(ours, "_takes", lambda *_: True), pytest.raises(NotRun):
        torch.compile(block, backend=backend, fullgraph=True)(tokens, position_embeddings=turns)
    return graphs


@needs_liger
def test_the_compiler_sees_the_kernels_in_one_graph() -> None:
    assert run_in_child(captured) == [4]  # two norms, rotations, the MLP


# Refusals


@needs_liger
@pytest.mark.parametrize(
    ("family", "message"),
    [("gpt2", "is not certified for gpt2: use auto or none"), ("llama", "needs a CUDA GPU: use auto or none")],
)
def test_what_the_kernels_cannot_compute_is_refused_by_name(family: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"model.kernels=liger {message}"):
        model(family, kernels="liger").build()


def test_a_missing_package_and_another_value_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(RecipeError, match=r"model.kernels=liger needs .* pip install 'exactbatch-trainer\[kernels\]'"):
        model(kernels="liger").build()
    with pytest.raises(RecipeError, match=r"model.kernels='triton' is not one of auto, liger, none"):
        model(kernels="triton")


# Plans


def traced(kernels: str) -> dict[str, Any]:
    """Of a forward and backward on a simulated GPU: operations, kernels, bytes moved and kept, parameters."""
    from trainer.fakegpu.torch_patches import patch_libraries

    with tracing(Target(gpu_named("h200"))) as tracer:
        with torch.device("cuda"):
            module: nn.Module = model("llama", config=SMALL, kernels=kernels).build().to(torch.bfloat16).train()
        patch_libraries(tracer.launch)
        ids = torch.zeros(4, 256, dtype=torch.int64, device="cuda")
        tracer.records_work = True
        begin = len(tracer.trace.events)
        with Dispatches() as asked:
            loss = module(input_ids=ids, labels=ids)
            end = len(tracer.trace.events)
            loss.backward()
        work, kept = tracer.trace.work, dict[int, int]()
        names = [one.op for one in work]
        for event in tracer.trace.events[begin:end]:
            if event.op != "cuBLAS workspace":
                kept[event.id] = event.bytes
        return {
            "operations": len(asked.names),
            "launches": sum(name != "view" for name in names),
            "bytes": sum(one.bytes for one in work),
            "activations": sum(kept.values()),
            "kernels": sorted({op for op in names if op.startswith("_") and op.endswith(("kernel", "rope"))}),
            "notes": [note for note in tracer.trace.notes if "Triton" in note],
            "parameters": [[name, [*value.shape], str(value.dtype)] for name, value in module.named_parameters()],
        }


@pytest.mark.slow
@needs_liger
def test_a_plan_sees_fewer_operations_and_less_memory() -> None:
    plain, fused = run_in_child(partial(traced, "none")), run_in_child(partial(traced, "liger"))
    assert fused["parameters"] == plain["parameters"]
    assert plain["kernels"] == plain["notes"] == []
    passes = [f"_{name}_{way}_kernel" for name in ("rms_norm", "swiglu") for way in ("backward", "forward")]
    assert fused["kernels"] == [*passes, "_triton_rope"]
    assert fused["notes"] == ["Triton kernels of liger_kernel compute parts of the model"]
    assert fused["operations"] < 0.8 * plain["operations"]
    assert fused["launches"] < 0.6 * plain["launches"]
    assert fused["bytes"] < 0.6 * plain["bytes"]
    assert fused["activations"] < 0.7 * plain["activations"]


def test_attention_of_transformers_is_found_by_its_name() -> None:
    """What a copy of the forward of an attention calls instead."""
    from transformers.models.llama import modeling_llama as theirs

    assert ROTATE in unwrap(theirs.LlamaAttention.forward).__code__.co_names
