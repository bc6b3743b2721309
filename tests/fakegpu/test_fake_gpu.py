"""``fake_gpu``: any training loop on a simulated card, measured as by hand, and torch given back afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torchvision
from helpers.tiny import target_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from trainer.data import Digits
from trainer.errors import RecipeError, RunError
from trainer.fakegpu import torch_patches
from trainer.fakegpu.allocator import MIN_BLOCK, AllocatorSettings, round_up
from trainer.fakegpu.peaks import replay
from trainer.fakegpu.tracer import tracing
from trainer.memory.plan import decide_plan
from trainer.models import VisionTransformer
from trainer.planner import FakeGPU, fake_gpu
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.recipe import Memory, Optim, Recipe, Run
from trainer.system.child_jobs import run_in_child, run_in_children

WORDS, WIDTH, BLOCKS, TOKENS, SAMPLES = 5000, 64, 2, 128, 16
Enter = Callable[[str], None]


class Block(nn.Module):
    """Of GPT-2: causal attention and a multilayer perceptron, each beside the way straight on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.heads(self.first(x)).split(WIDTH, -1)]
        x = x + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(BLOCKS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.size(1), device=words.device))
        return self.head(self.norm(self.blocks(x)))


def gpt_loop(enter: Enter = lambda phase: None, model: nn.Module | None = None, accumulate: int = 1) -> None:
    """Three steps in bf16 autocast."""
    model = (model or GPT()).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in range(accumulate):
            text = torch.zeros(SAMPLES // accumulate, TOKENS + 1, dtype=torch.long).to("cuda")
            enter("forward")
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / accumulate
            enter("backward")
            loss.backward()
            enter("other")
        enter("step")
        optimizer.step()
        enter("other")
        optimizer.zero_grad()


def taken(loop: Callable[[], object], draws: bool = False) -> dict[str, Any]:
    """What a loop takes, maybe with a picture of it, and whether torch's own questions are answered with the same."""
    with fake_gpu("a100-80gb") as gpu:
        loop()
        assert torch.cuda.max_memory_allocated() == gpu.allocated
        assert torch.cuda.memory_reserved() == gpu.reserved
    assert not torch.cuda.is_available()
    figures = ("allocated", "reserved", "host", "fits", "categories", "peak_phase", "steps", "step_ms", "notes")
    phases = [[name, *peak] for name, peak in gpu.phases.items()]
    found = {name: getattr(gpu, name) for name in figures}
    found |= {"phases": phases, "largest": [list(one) for one in gpu.largest]}
    return found | {"draws": draws and can_draw(gpu)}


def can_draw(gpu: FakeGPU) -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder, "memory.png")
        gpu.plot(path)
        return path.read_bytes().startswith(b"\x89PNG")


@cache
def gpt_figures(expandable: bool = False, accumulate: int = 1) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
        return run_in_child(partial(taken, partial(gpt_loop, accumulate=accumulate), draws=expandable))


def by_hand(loop: Callable[[Enter], object], settings: AllocatorSettings) -> dict[str, Any]:
    with tracing(target_of()) as tracer:
        tracer.enter("init")
        loop(tracer.enter)
    memory = replay(tracer.trace, settings)
    phases = [[name, *peak] for name, peak in memory.phases.items()]
    figures = {"allocated": memory.peak_allocated, "reserved": memory.peak_reserved, "phases": phases}
    return {**figures, "host": tracer.trace.host_bytes, "peak_phase": memory.allocated_phase}


def bytes_of(module: nn.Module) -> int:
    """What the allocator takes for its parameters, each once."""
    return sum(round_up(4 * parameter.numel(), MIN_BLOCK) for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True])
def test_a_loop_has_the_figures_of_a_trace_by_hand_and_a_picture(expandable: bool) -> None:
    found, wanted = gpt_figures(expandable), run_in_child(partial(by_hand, gpt_loop, AllocatorSettings(expandable)))
    assert found["draws"] == expandable
    assert {name: found[name] for name in wanted} == wanted
    weights = bytes_of(GPT())
    assert found["categories"]["params"] == weights  # the head is no other matrix than the embedding
    if (
        expandable
    ):  # else a state counts what it does not leave of a block that was free: none on torch 2.15, some on 2.11
        assert found["categories"]["optimizer"] == 2 * weights
    assert found["categories"]["batch"] == round_up(8 * SAMPLES * (TOKENS + 1), MIN_BLOCK)
    assert sum(found["categories"].values()) == found["allocated"]
    assert [row[0] for row in found["phases"]] == ["init", "forward", "backward", "step", "other"]
    assert (found["steps"], found["fits"], found["notes"]) == (3, True, [])
    assert found["step_ms"] > 0
    names = {row[2]: row for row in found["largest"]}
    assert names["words.weight"][:2] + names["words.weight"][3:] == [
        4 * WORDS * WIDTH, "params", [WORDS, WIDTH], "float32", "init"
    ]  # fmt: skip
    assert names["exp_avg of words.weight"][1] == "optimizer"
    assert names["addmm in blocks.0.up"][3:5] == [[SAMPLES * TOKENS, 4 * WIDTH], "bfloat16"]


def outside(meta: bool, optimizer_first: bool) -> dict[str, Any]:
    """A module from outside of the block, perhaps with an optimizer of before it was moved."""
    with torch.device("meta" if meta else "cpu"):
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop() -> None:
        text = torch.zeros(SAMPLES, TOKENS + 1, dtype=torch.long)
        model.to("cuda")
        mine = optimizer if optimizer_first else torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            moved = text.to("cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(model(moved[:, :-1]).flatten(0, 1), moved[:, 1:].flatten()) / 1
            loss.backward()
            mine.step()
            mine.zero_grad()

    return taken(loop)


@pytest.mark.slow
def test_modules_from_outside_take_what_those_made_inside_take() -> None:
    inside = gpt_figures()
    calls = [partial(outside, meta, first) for meta, first in ((False, False), (False, True), (True, False))]
    for _, found in run_in_children(calls):
        assert not isinstance(found, Exception), found
        for name in ("allocated", "reserved", "categories", "steps"):
            assert found[name] == inside[name], name


@pytest.mark.slow
def test_accumulated_gradients_stay_and_activations_shrink() -> None:
    whole, cut = (gpt_figures(accumulate=count) for count in (1, 4))
    assert cut["categories"]["gradients"] == bytes_of(GPT())
    assert cut["categories"]["activations"] < whole["categories"]["activations"] / 3
    assert (cut["steps"], cut["categories"]["optimizer"]) == (3, whole["categories"]["optimizer"])
    assert cut["step_ms"] > whole["step_ms"]  # more kernels, none of them full


class Pictures(Dataset[Any]):
    """Random pictures, of which a worker makes some."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 64, 64), index % 10


def pictures_loop(loaded: bool) -> None:
    """MobileNet in fp16 with a scaler, clipped, and evaluated."""
    model = torchvision.models.mobilenet_v2(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    batches = DataLoader(Pictures(), 16, shuffle=True, num_workers=2, pin_memory=True) if loaded else None
    for batch in batches or [(torch.empty(16, 3, 64, 64), torch.zeros(16, dtype=torch.long)) for _ in range(4)]:
        pictures, labels = (part.to("cuda", non_blocking=True) for part in batch)
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.inference_mode():
        model(pictures).argmax(1)


@pytest.mark.slow
def test_a_torchvision_model_with_a_scaler_and_a_loader() -> None:
    loaded, made = (run_in_child(partial(taken, partial(pictures_loop, kind))) for kind in (True, False))
    for name in ("allocated", "reserved", "categories", "phases", "steps", "step_ms", "peak_phase"):
        assert loaded[name] == made[name], name
    assert [row[0] for row in loaded["phases"]] == ["init", "forward", "backward", "other", "step", "evaluation"]
    assert loaded["steps"] == 4
    module = torchvision.models.mobilenet_v2(num_classes=10)
    buffers = sum(round_up(b.numel() * b.element_size(), MIN_BLOCK) for b in module.buffers())
    assert loaded["categories"]["params"] == bytes_of(module) + buffers
    assert loaded["categories"]["optimizer"] == bytes_of(module)
    assert loaded["notes"] == []


class Factored(torch.optim.Optimizer):
    """Adafactor's second moments: of a matrix one figure a row and one a column (Shazeer and Stern, 2018)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            square, state = parameter.grad.square().add_(1e-30), self.state[parameter]
            sizes = {"row": -1, "column": -2} if parameter.dim() > 1 else {"all": None}
            for name, dim in sizes.items():
                mean = square if dim is None else square.mean(dim)
                if name not in state:
                    state[name] = torch.zeros(mean.shape).to(mean)  # as transformers' Adafactor makes it
                state[name].lerp_(mean, 0.1)
            if parameter.dim() > 1:
                scale = (state["row"] / state["row"].mean()).rsqrt_()[:, None] * state["column"].rsqrt()
            else:
                scale = state["all"].rsqrt()
            parameter.add_(parameter.grad * scale, alpha=-1e-3)


def factored_loop() -> None:
    model = GPT().to("cuda")
    optimizer = Factored(model.parameters())
    for _ in range(2):
        model(torch.zeros(2, TOKENS, dtype=torch.long, device="cuda")).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_of_ones_own() -> None:
    found, shapes = run_in_child(partial(taken, factored_loop)), [tuple(p.shape) for p in GPT().parameters()]
    state = sum(round_up(4 * size, MIN_BLOCK) for shape in shapes for size in (shape if len(shape) > 1 else [shape[0]]))
    assert found["categories"]["optimizer"] == state
    assert (found["steps"], found["categories"]["params"]) == (2, bytes_of(GPT()))


# ------------------------------------------------------------------------------------------- beside our own engine

VIT = VisionTransformer("custom", patch_size=1, layers=4, heads=4, width=256, mlp_width=1024)
RECIPE = Recipe(
    model=VIT,
    data=Digits(),
    optim=Optim("adamw", lr=1e-3, schedule="constant"),
    batch_size=64,
    epochs=1,
    memory=Memory(micro_batch_size=64, precision="bf16-mixed"),
    run=Run(evaluate=False),
)


def by_engine() -> dict[str, Any]:
    recipe = prepare_recipe(RECIPE)
    return predict_in_process(recipe, decide_plan(recipe, 1), target_of())


def plain_loop() -> None:
    recipe = prepare_recipe(RECIPE)
    model, sample = recipe.model.build().to("cuda"), recipe.data.train[0]["pixel_values"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # as the engine has it on a GPU
    for _ in range(3):
        pictures, labels = sample.expand(64, 3, 8, 8).to("cuda"), torch.zeros(64, dtype=torch.long).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(pictures), labels, reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del pictures, labels, loss


@pytest.mark.slow
def test_our_engine_and_a_plain_loop_of_the_same_recipe_agree() -> None:
    engine, loop = run_in_child(by_engine), run_in_child(partial(taken, plain_loop))
    assert loop["reserved"] == pytest.approx(engine["reserved"], rel=0.01)
    assert loop["allocated"] == pytest.approx(engine["allocated"], rel=0.01)
    assert loop["peak_phase"] == engine["peak_phase"]
    for name in ("params", "optimizer"):
        assert loop["categories"][name] == pytest.approx(engine["categories"][name], rel=0.01), name


# ------------------------------------------------------------------------------------------- what may go wrong


def mistakes() -> list[str]:
    """What is said of each; in a process of its own, which afterwards can compute as before."""
    said = []
    with fake_gpu("rtx-4060", torch_version="2.11") as gpu:
        with pytest.raises(RunError) as nested, fake_gpu("a100-80gb"):
            pass
        said.append(str(nested.value))
        big = torch.empty(3 * 10**9, device="cuda")  # 12 GB on a card of 8
        del big
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
    said += [str(gpu), json.dumps(gpu.to_json())]
    with pytest.raises(ZeroDivisionError), fake_gpu("a100-80gb") as gpu:
        nn.Linear(2, 2).to("cuda").weight.data.numel() / 0
    said.append(str(gpu))
    with fake_gpu("a100-80gb") as gpu:
        pass
    said.append(str(gpu))
    for wrong in ({"card": "a1000"}, {"card": "t4", "torch_version": "new"}):
        with pytest.raises(RecipeError) as refused, fake_gpu(**wrong):
            pass
        said.append(str(refused.value))
    with pytest.raises(RunError) as drawn:
        gpu.plot("memory.png")
    said.append(str(drawn.value))
    assert not torch.cuda.is_available()
    weight = torch.ones(2, requires_grad=True)
    (3 * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]
    return said


def test_mistakes_are_named_and_torch_is_given_back() -> None:
    nested, full, as_json, failed, empty, card, version, drawn = run_in_child(mistakes)
    assert nested == "a process can simulate one GPU at a time: end the other block first"
    assert full.startswith("card      RTX 4060 with 7.69 GB for torch: it does not fit: it needs 12.00 GB"), full
    assert "no optimizer step was taken" in full
    assert json.loads(as_json)["reserved_gb"] == pytest.approx(12, rel=0.001)
    assert "peak      in init: params" in failed
    assert 'no tensor is on the GPU: move the model and the batches with .to("cuda")' in empty
    assert "a1000 is not in the planner's table; did you mean a100-80gb?" in card
    assert version == "torch_version='new' must be a version such as '2.6'"
    assert drawn.startswith("memory.png cannot be drawn: no tensor is on the GPU")


def cuda_in_use() -> str:
    torch.cuda.is_initialized = lambda: True  # what a process says that has used its GPU
    with pytest.raises(RunError) as refused, fake_gpu("a100-80gb"):
        pass
    return str(refused.value)


def test_a_process_that_uses_its_gpu_is_refused() -> None:
    assert run_in_child(cuda_in_use).startswith("this process has used its GPU already")


# ------------------------------------------------------------------------------------------- what is said of a loop


def step(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def asking() -> list[Any]:
    """Of a loop that decides by a value, and compiles: notes within the block, and after it."""
    with fake_gpu("a100-80gb") as gpu:
        model = nn.Linear(8, 8).to("cuda")
        for compiled in (torch.compile(model, disable=True), torch.compile(backend="eager")(model)):
            assert compiled is model
        torch.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            step(model, model(torch.ones(4, 8, device="cuda")).sum(), optimizer)
            assert len(gpu.notes) == 2 - number
        x = model(torch.ones(4, 8, device="cuda"))
        if x.argmax() > 1:  # the line that is named
            raise ValueError("not the first")
        inside = list(gpu.notes)
    return [inside, gpu.notes]


def test_guesses_and_compiled_models_are_noted_also_within_the_block() -> None:
    inside, after = run_in_child(asking)
    line = asking.__code__.co_firstlineno + 12
    assert inside == after
    assert inside[0].startswith("torch.compile")
    assert inside[1:] == [f"an unknown value is read at {__file__}:{line}"]


def sparse_loop() -> None:
    words = nn.Embedding(WORDS, WIDTH, sparse=True).to("cuda")
    for _ in range(2):  # the second adds to gradients that are sparse
        words(torch.zeros(SAMPLES, dtype=torch.long, device="cuda")).sum().backward()


def test_sparse_gradients_add_up() -> None:
    found = run_in_child(partial(taken, sparse_loop))
    assert found["allocated"] < 2 * 4 * WORDS * WIDTH  # no gradient is as large as the weight


def metric_loop() -> None:
    model, metric = nn.Linear(8, WORDS).to("cuda"), nn.Softmax(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        logits = model(torch.zeros(TOKENS, 8, device="cuda"))
        metric(logits.detach())
        step(model, logits.exp().sum(), optimizer)


def test_what_a_metric_sees_is_no_batch() -> None:
    found = run_in_child(partial(taken, metric_loop))
    assert found["categories"]["batch"] == round_up(4 * TOKENS * 8, MIN_BLOCK)
    assert found["categories"]["activations"] >= 4 * TOKENS * WORDS


def peaks() -> list[Any]:
    with fake_gpu("a100-80gb"):
        big = torch.empty(2**20, device="cuda")
        del big
        torch.cuda.reset_max_memory_allocated()
        return [torch.cuda.max_memory_allocated(), torch.cuda.memory_summary()]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_peak_is_reset_by_its_old_name_and_a_summary_has_figures() -> None:
    peak, summary = run_in_child(peaks)
    assert peak == 0
    assert "GPU reserved memory" in summary
    assert " 4096 KiB" in summary or " 20480 KiB" in summary, summary


def changed() -> list[bool]:
    """Whether torch is as before after a block that ended, and after one that failed halfway."""

    def now() -> list[Any]:
        return [set(torch.serialization.get_safe_globals()), dict(vars(torch.UntypedStorage)), torch.cuda.is_available]

    with fake_gpu("t4"):
        pass
    before, kernels = now(), torch_patches.install_kernels

    def fails(*args: Any) -> None:
        raise KeyboardInterrupt

    torch_patches.install_kernels = fails
    with pytest.raises(KeyboardInterrupt), fake_gpu("t4"):
        pass
    after = now()
    torch_patches.install_kernels = kernels
    with fake_gpu("t4") as gpu:
        torch.empty(5, device="cuda")
    ours = [one for one in before[0] if getattr(one, "__module__", None) == torch_patches.__name__]
    return [before == after, not ours, "resize_" not in before[1], gpu.allocated > 0]


def test_nothing_is_left_of_a_block_that_fails_halfway() -> None:
    assert run_in_child(changed) == [True, True, True, True]
