"""The loss in chunks is that of whole logits, for every chunk, head and transform, in far less memory."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from helpers.kernels import AdaptedHead
from helpers.language import EXACT, FAMILIES, WORDS, language_model, language_samples
from helpers.live_bytes import LiveBytes
from helpers.matrix import perturbed
from helpers.problems import Problem, collate, engine_run, errors, initial_module, plain_run
from helpers.rounding import ROUNDING
from helpers.tiny import InMemory, target_of
from helpers.traced import held, traces
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import Memory, Recipe, RecipeError
from trainer.fakegpu.events import Trace
from trainer.fakegpu.gpus import host_as_device
from trainer.fakegpu.target import Target
from trainer.memory.plan import decide_plan
from trainer.models import CausalLM, LoRA
from trainer.models.chunked_loss import (
    LogitTransform,
    chunked_loss,
    detect_logit_transform,
    patch_forward_to_return_loss,
    target_positions,
    token_loss,
)
from trainer.planner.predict import prepare_recipe
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.weights.blocks import find_blocks

TOKENS, WIDTH = 37, 12
CHUNKS = (1, 7, 36, 37, 500, None)
TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(1 / 3),
    "capped": LogitTransform(1.0, 2.5),
    "both": LogitTransform(4, 3.0),
}


def head_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    head = nn.Linear(WIDTH, WORDS, bias=kind == "biased")
    if kind == "adapted":
        return AdaptedHead(WIDTH, WORDS)
    return head.requires_grad_(kind != "frozen")


def states(count: int = TOKENS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return (2 * torch.randn(count, WIDTH, dtype=dtype)).requires_grad_(), torch.randint(WORDS, (count,))


def whole_loss(hidden: Tensor, head: nn.Module, targets: Tensor, transform: LogitTransform) -> Tensor:
    """As a textbook writes it."""
    logits = head(hidden) * transform.scale
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    return cross_entropy(logits, targets, reduction="sum")


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *(p for p in head.parameters() if p.requires_grad)]))


@pytest.mark.parametrize("kind", ["plain", "biased", "frozen", "adapted"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_chunk_gives_the_gradient_of_whole_logits(kind: str, transform: LogitTransform) -> None:
    head, (hidden, targets) = head_of(kind).double(), states()
    whole = whole_loss(hidden, head, targets, transform)
    expected = gradients(0.3 * whole, hidden, head)
    for chunk in CHUNKS:
        loss = chunked_loss(hidden, head, targets, transform, chunk)
        torch.testing.assert_close(loss, whole, rtol=ROUNDING, atol=0)
        for ours, theirs in zip(gradients(0.3 * loss, hidden, head), expected, strict=True):
            assert (ours - theirs).norm() <= ROUNDING * theirs.norm(), chunk


def test_logits_may_be_as_large_as_they_like() -> None:
    """The largest is taken off before exponentials: e^1000 is no number in fp64."""
    head, (hidden, targets) = head_of("plain").double(), states()
    hidden = (1e3 * hidden).detach().requires_grad_()
    whole, loss = (of(hidden, head, targets, LogitTransform()) for of in (whole_loss, chunked_loss))
    torch.testing.assert_close(loss, whole, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(gradients(loss, hidden, head)[0], gradients(whole, hidden, head)[0])


def test_nothing_to_predict_is_a_loss_of_nothing() -> None:
    head, (hidden, targets) = head_of("biased").double(), states(0)
    loss = chunked_loss(hidden, head, targets, LogitTransform(), 4)
    assert loss.item() == 0.0
    assert [gradient.abs().sum().item() for gradient in gradients(loss, hidden, head)] == [0.0, 0.0, 0.0]


def bounds(x: Tensor, weight: Tensor, targets: Tensor, mixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """How far the loss and the gradients of x and weight may be from those of real numbers, elementwise, in bf16.

    With u = 2^-8 each number that becomes bf16 is off by its u-th part at most. A logit z does, and so do with
    ``mixed`` the factors it is summed of: it is off by d = u max |z| + mixed (2u + u²) Σ |x w|. Then the loss of a
    token is off by 2d, a probability p by p (e^2d - 1), and the error p - [is target] is rounded: off by e in all.
    Gradients are products of it with x and w (rounded again if mixed), are rounded, and that of x is a sum of rounded
    parts, whose absolute values add up to Σ |error| |w|. Nothing of it depends on the chunks. All else is fp32: 2^-16.
    """
    u, fp32 = 2.0**-8, 2.0**-16
    logits = x @ weight.T
    d = u * logits.abs().amax(1, keepdim=True) + mixed * (2 * u + u * u) * (x.abs() @ weight.abs().T)
    d = (d + fp32 * logits.abs().amax()).amax(1, keepdim=True)
    p = logits.softmax(1)
    errors = p - torch.nn.functional.one_hot(targets, WORDS)
    e = p * ((2 * d).exp() - 1) * (1 + u) + (u + fp32) * errors.abs()
    reach = errors.abs() + e
    of_x = (e + (1 + mixed) * u * reach) @ weight.abs() + (u + fp32) * (reach @ weight.abs())
    of_weight = (e + mixed * u * reach).T @ x.abs() + (u + fp32) * (reach.T @ x.abs())
    return 2 * d.sum(), of_x, of_weight


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_half_precision_is_off_by_no_more_than_its_roundings(precision: str, chunk: int | None) -> None:
    head, (hidden, targets), mixed = head_of("plain"), states(300, torch.float32), precision == "bf16-mixed"
    if not mixed:
        head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = chunked_loss(hidden, head, targets, LogitTransform(), chunk)
    assert loss.dtype == torch.float32
    found = [loss.detach(), *gradients(loss, hidden, head)]
    assert [one.dtype for one in found[1:]] == [hidden.dtype, hidden.dtype]
    x, exact = hidden.detach().double().requires_grad_(), head.double()
    whole = whole_loss(x, exact, targets, LogitTransform())
    limits = bounds(x.detach(), exact.weight.detach(), targets, mixed)
    for ours, theirs, limit in zip(found, [whole.detach(), *gradients(whole, x, exact)], limits, strict=True):
        assert ((ours.double() - theirs).abs() <= limit).all()
        assert limit.norm() < 0.6 * theirs.norm()  # a bound that says something


def peak(chunk: int, tokens: int = 4096, words: int = 50_000, width: int = 64) -> int:
    """Bytes of the loss and its gradients, beside the weight, the states and the gradients of both."""
    with FakeTensorMode(), LiveBytes() as live:
        head, hidden = nn.Linear(width, words, bias=False), torch.zeros(1, tokens, width, requires_grad=True)
        labels = torch.zeros(1, tokens, dtype=torch.long)
        before, live.peak = live.now, live.now
        inputs = hidden[0, :-1], head, labels[0, 1:], LogitTransform(), chunk
        loss = chunked_loss(*inputs) if chunk else token_loss(head(hidden), labels)
        loss.backward()
        return live.peak - before - head.weight.nbytes - hidden.nbytes


@pytest.mark.slow
def test_chunks_take_a_seventh_of_the_memory_of_whole_logits_at_least() -> None:
    """Of 4,096 tokens and 50,000 words."""
    whole, by_itself, few = peak(0), peak(2**24 // 50_000), peak(64)
    assert whole > 2 * 4096 * 50_000 * 4
    assert 7 * by_itself < whole
    assert 40 * few < whole


def long_recipe(chunk: int | None) -> Recipe:
    """Of 4,096 tokens and 50,000 words a micro-batch."""
    config = FAMILIES["llama"][1] | {"vocab_size": 50_000, "hidden_size": 64, "max_position_embeddings": 4096}
    model = CausalLM("llama", config=config, tokenizer="none", loss_chunk=chunk)
    samples = [{name: torch.zeros(4096, dtype=torch.long) for name in ("input_ids", "labels")} for _ in range(2)]
    memory = Memory(micro_batch_size=1, precision="bf16-mixed")
    return prepare_recipe(Recipe(model=model, data=InMemory(samples=samples), batch_size=2, memory=memory))


def most_beside_weights(chunk: int | None, on_gpu: bool) -> Trace:
    recipe = long_recipe(chunk)
    plan = decide_plan(recipe, 1)
    return trace_run(recipe, plan, draw_samples(recipe, plan), target_of() if on_gpu else Target(host_as_device()))


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [True, False])
def test_plans_see_what_chunks_save(on_gpu: bool) -> None:
    """A run's forward, backward and step, on a GPU and on a CPU that nothing is computed on."""
    found = traces({str(chunk): partial(most_beside_weights, chunk, on_gpu) for chunk in (0, None)})
    whole, chunked = (max(held(found[chunk], "temporaries")) for chunk in ("0", "None"))
    assert whole > 4096 * 50_000 * 4
    assert 7 * chunked < whole
    assert found["None"].guesses == 0


@pytest.mark.first(3)
@pytest.mark.parametrize("family", EXACT)
@pytest.mark.parametrize(("chunk", "cut"), [(5, (3, None)), (0, (4, 90))], ids=str)
def test_models_take_the_steps_of_whole_batches_and_whole_logits(family: str, chunk: int, cut: tuple[Any, Any]) -> None:
    """Of batches with tokens that are not to be predicted, a sample of one token, and one without a label."""
    problem = Problem(family, 19, 8, cut[0], micro_batch_tokens=cut[1])
    module = initial_module(problem)
    module.loss_chunk = chunk
    ours = engine_run(problem, of=(language_model(family, loss_chunk=chunk), module))
    assert max(errors(ours, plain_run(problem)).values()) < ROUNDING


def test_places_are_those_before_a_label_and_are_known_on_the_host() -> None:
    labels = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, -100], [1, 2, -100, -100]])
    assert target_positions(labels).tolist() == [1, 2, 8]  # 5 and 1 are first: nothing comes before them
    model, batch = language_model("llama"), collate(language_samples(7))
    packed = model.packed(batch)
    assert model.weigh(batch)["loss"] == len(packed["places"]) == int((batch["labels"][:, 1:] != -100).sum())
    module = model.build().double()
    (loss,), (again,) = model.losses(module, packed), model.losses(module, batch)
    assert torch.equal(loss.total, again.total)


OF_LOGITS = {
    "cohere": ({"logit_scale": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, LogitTransform(0.25)),
    "granite": ({"logits_scaling": 3.0}, LogitTransform(1 / 3)),
    "hyperclovax": ({"logits_scaling": 3.0}, LogitTransform(3.0)),
    "gemma3_text": ({"final_logit_softcapping": 2.0}, LogitTransform(1.0, 2.0)),
    "phi": ({}, LogitTransform()),  # its head has a bias
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_whatever_is_done_to_logits_is_found_in_the_code_that_does_it(name: str) -> None:
    config, expected = OF_LOGITS[name]
    config = FAMILIES["llama"][1] | config
    model, batch = CausalLM(name, config=config, tokenizer="none", dropout=0.0), collate(language_samples(5))
    torch.manual_seed(0)
    module = perturbed(model.build(), 0.2)
    found = detect_logit_transform(module)
    assert found is not None
    assert found.cap == expected.cap
    assert found.scale == pytest.approx(expected.scale)
    (ours,) = model.losses(module, batch)
    module.logit_transform = None
    (whole,) = model.losses(module, batch)
    torch.testing.assert_close(ours.total, whole.total, rtol=1e-5, atol=0)


def test_what_is_done_to_logits_and_is_not_known_is_refused_by_name() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "vocab_size": WORDS}
    opt = CausalLM("opt", config={**sizes, "word_embed_proj_dim": 16}, tokenizer="none")
    assert opt.build().logit_transform is None  # the logits of all tokens are held, as null says
    with pytest.raises(RecipeError, match=r"loss_chunk=8: OPTForCausalLM computes more than a linear head.*use 0"):
        dataclasses.replace(opt, loss_chunk=8).build()
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FAMILIES["llama"][1]))
    module.config.logit_power = 3.0
    module.__class__ = type("Powered", (type(module),), {"forward": powered})
    with pytest.raises(RecipeError, match=r"Powered computes more .* \(its configuration has logit_power=3.0\)"):
        patch_forward_to_return_loss(module, 8)
    for wrong in (-1, True, 2.5):
        with pytest.raises(RecipeError, match=f"model.loss_chunk={wrong} must be a number of tokens"):
            language_model("llama", loss_chunk=wrong)


def powered(self: Any, **inputs: Any) -> Any:
    output = super(type(self), self).forward(**inputs)
    output.logits = output.logits**self.config.logit_power
    return output


def test_an_adapted_head_is_one_of_the_targets() -> None:
    lora = LoRA(rank=2, targets=["q_proj", "lm_head"])
    model, batch = language_model("llama", lora=lora, loss_chunk=7), collate(language_samples(5))
    torch.manual_seed(0)
    module = perturbed(model.build().double(), 0.2)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = []
    for transform in (module.logit_transform, None):
        module.logit_transform = transform
        (loss,) = model.losses(module, batch)
        found.append([loss.total, *torch.autograd.grad(loss.total, trained)])
    assert len(trained) == 2 * 3
    for ours, whole in zip(*found, strict=True):
        assert (ours - whole).norm() <= ROUNDING * whole.norm()
    with pytest.raises(RecipeError, match=r"model.lora.targets: lm_head shares its weight with the embedding"):
        language_model("gemma", lora=lora).build()


def gatherings(chunk: int) -> int:
    """How often a rank gathers weights in a micro-step of two blocks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model, batch = language_model("llama", loss_chunk=chunk), collate(language_samples(5))
    module = model.build()
    for block in find_blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    with CommDebugMode() as counted:
        (loss,) = model.losses(module, batch)
        loss.total.backward()
    return sum(count for kind, count in counted.get_comm_counts().items() if "gather" in str(kind))


def test_the_head_is_gathered_once_however_many_chunks_there_are(ranks: Any) -> None:
    once = ranks(2).run(gatherings, 0)[0]
    assert once > 0
    assert ranks(2).run(gatherings, 2)[0] == once
