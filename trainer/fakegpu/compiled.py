"""``torch.compile`` on the simulated GPU.

Dynamo, AOTAutograd and Inductor really compile, up to the source code of Inductor's wrapper: it allocates, reuses and
frees buffers and calls kernels. Here it runs with fake tensors, so its allocations and frees are those of a real run.
Triton's kernels are not compiled: a launch records what the kernel reads and writes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.types import ConvertFrameReturn
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainer.fakegpu.mode import GPU_DEVICE, FakeGPUMode, on_a_device
from trainer.fakegpu.torch_patches import _nothing, _undo_stack, patch

COMPILED = "parts compiled by torch.compile are predicted from the code that Inductor generates, without autotuning"
NOTHING = "torch.compile was called and has compiled nothing, so the loop is predicted as if it were eager"
HERE = str(Path(__file__).parent)
TORCH_COMPILE, MODULE_COMPILE, MODULE_CALL = torch.compile, nn.Module.compile, nn.Module.__call__
SIGNATURE = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)


class RealOnCPU(TorchDispatchMode, ContextDecorator):
    """Creates on the CPU the few real tensors that Inductor wants on the GPU to fold constants."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **({**kwargs, "device": "cpu"} if kwargs and kwargs.get("device") else kwargs or {}))


class CompilerOnFakeTensors:
    """Lets ``torch.compile`` compile for the simulated GPU of ``tracer``; parts that fail run eagerly, with a note."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.installed = False
        wrapper: Any = convert_frame.CatchErrorsWrapper  # also called for what was compiled before the block
        convert = wrapper.__call__
        patch(wrapper, __call__=lambda catcher, *args: self._frame(partial(convert, catcher), *args))

    def __call__(self, function: Any = None, **options: Any) -> Any:
        """Stand in for ``torch.compile``."""
        if function is None:  # as a decorator with options
            return partial(self.__call__, **options)
        if options.get("disable") or options.get("backend", "inductor") == "eager":
            return function
        missing = "without Triton" if find_spec("triton") is None else f"(backend={options.get('backend')!r})"
        if missing == "without Triton" or options.get("backend", "inductor") != "inductor":
            self.tracer.trace.add_note(f"torch.compile {missing} is not simulated, so the loop is predicted as eager")
            return function
        self._install()
        if options.get("mode", "default") not in ("default", None) or options.get("options"):
            self.tracer.trace.add_note("mode and options of torch.compile are not simulated")
        return TORCH_COMPILE(function, dynamic=options.get("dynamic"), fullgraph=options.get("fullgraph", False))

    def _install(self) -> None:
        if self.installed:
            return
        self.installed = True
        self.tracer.trace.add_note(NOTHING)
        with _disable_current_modes():
            import torch._inductor.async_compile
            import torch._inductor.compile_fx
            import torch._inductor.scheduler
            from torch._dynamo import device_interface
            from torch._functorch import config as functorch_config
            from torch._inductor.fx_passes import joint_graph, pad_mm
            from torch._inductor.graph import GraphLowering
            from torch._inductor.runtime.hints import DeviceProperties
        inductor: Any = torch._inductor
        self._patch_device(device_interface.CudaInterface, pad_mm, inductor.utils)
        since_2_6 = self.tracer.target.version >= (2, 6)
        settings = {"force_disable_caches": True, "compile_threads": 1, "reorder_for_peak_memory": since_2_6}
        _undo_stack.enter_context(inductor.config.patch(**settings))
        _undo_stack.enter_context(functorch_config.patch(donated_buffer=since_2_6))
        initialise = joint_graph.lazy_init  # patterns are the same for all devices, and need tensors of one
        patch(joint_graph, lazy_init=lambda device=None: initialise(torch.device("cpu")))
        folder: Any = joint_graph.UniformValueConstantFolder
        patch(folder, run_node=RealOnCPU()(folder.run_node))
        patch(inductor.scheduler, has_triton=lambda *_, **__: True)  # it may have asked before the block
        patch(GraphLowering, compile_to_module=lambda graph: self._module(graph))
        compiler = inductor.async_compile.AsyncCompile
        patch(compiler, triton=lambda _, name, source, *args, **options: self._kernel(name, source))
        patch(compiler, cpp_pybinding=_refuse_cpu, wait=_nothing, wakeup=_nothing)
        patch(inductor.compile_fx, _compile_fx_inner=partial(self._graph, inductor.compile_fx._compile_fx_inner))
        _patch_functional_tensors()
        patch(torch.utils._triton, triton_hash_with_backend=lambda: "simulated")
        _undo_stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor|dynamo_pgo")
        _undo_stack.callback(DeviceProperties.create.cache_clear)
        _undo_stack.callback(torch._dynamo.reset)

    def _patch_device(self, interface: Any, pad_mm: Any, utils: Any) -> None:
        """Let Inductor see the card, also where it would measure."""
        gpu = self.tracer.target.gpu
        for kind in (interface, interface.Worker):
            for name in ("get_device_properties", "current_device", "device_count", "synchronize", "set_device"):
                patch(kind, **{name: staticmethod(vars(torch.cuda)[name])})
        patch(utils, get_device_tflops=lambda dtype, *_: gpu.flops.get(str(dtype)[6:], gpu.flops["float32"]) / 1e12)
        patch(utils, get_gpu_dram_gbps=lambda: gpu.bandwidth / 1e9)
        bound = pad_mm.is_mm_compute_bound  # half precision: tensor cores want sizes that are multiples of 8
        patch(pad_mm, _should_pad=lambda _, a, b, *rest: a.itemsize < 4 and bound(*a.shape[-2:], b.shape[-1], a.dtype))

    def _frame(self, convert: Callable[..., Any], frame: Any, *args: Any) -> Any:
        """Compile a frame of Python; leave it eager if that fails."""
        code = frame.f_code
        if code.co_filename.startswith(HERE):
            return ConvertFrameReturn()
        self._install()
        try:
            with _compiling():
                return convert(frame, *args)
        except Exception as error:  # raised by Dynamo and the compiler: many different classes
            self._note_failure(f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})", error)
            return ConvertFrameReturn()

    def _graph(self, compile_graph: Any, graph: Any, *args: Any, **options: Any) -> Any:
        """Compile a graph; if that fails for a backward, whose forward is compiled, run its operations one by one."""
        try:
            with _compiling():
                return compile_graph(graph, *args, **options)
        except Exception as error:
            if not options.get("is_backward"):
                raise
            self._note_failure("a backward", error)
            return make_boxed_func(graph.forward)

    def _note_failure(self, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split())[:120]
        note = f"torch.compile of {what} failed, so that part is predicted eagerly: {type(error).__name__}: {reason}"
        self.tracer.trace.add_note(note)

    def _module(self, graph: Any) -> Any:
        """Return the module of Inductor's wrapper, with fake buffers and simulated kernels."""
        code = graph.codegen()[0]
        notes = self.tracer.trace.notes
        notes[:] = [COMPILED, *(note for note in notes if note not in (COMPILED, NOTHING))]
        names: dict[str, Any] = {"__name__": "compiled", **graph.constants, **graph.torchbind_constants}
        exec(compile(code if isinstance(code, str) else code.value, "<Inductor>", "exec"), names)
        names |= dict.fromkeys(("assert_size_stride", "assert_alignment", "get_raw_stream"), _nothing)
        names["reinterpret_tensor"] = lambda one, *how: one.as_strided(*how[:2], one.storage_offset() + sum(how[2:]))
        names["empty_strided_cuda"] = self._empty
        return SimpleNamespace(call=names["call"], __file__="")

    def _kernel(self, name: str, source: str) -> Any:
        """Return what stands in for a compiled Triton kernel: a launch computes nothing and is recorded."""
        found = SIGNATURE.search(source)
        names = [part.split(":")[0].strip() for part in found[1].split(",")] if found else []
        return SimpleNamespace(run=lambda *args, **options: self.tracer.launch_compiled(name, args, names))

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        work, done = self.tracer.trace.work, len(self.tracer.trace.work)
        made = torch.empty_strided(size, stride, dtype=dtype, device=GPU_DEVICE)
        del work[done:]  # no kernel runs
        return made


def _refuse_cpu(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("it computes on the CPU, where its values are real")


@contextmanager
def _compiling() -> Iterator[None]:
    """Restore ``nn.Module.__call__``, which Dynamo looks into. Nothing is traced."""
    before = nn.Module.__call__
    nn.Module.__call__ = MODULE_CALL  # type: ignore[method-assign]
    try:
        with _disable_current_modes():
            yield
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def _patch_functional_tensors() -> None:
    """Let AOTAutograd's tensors have the dispatch keys of the GPU, too, while C++ sees them on meta."""
    make, wrap = FunctionalTensor.__new__, torch.Tensor._make_wrapper_subclass
    devices = [torch.device("meta")]

    def new(cls: Any, elem: Any, mode: Any) -> Any:
        devices.append(torch._from_functional_tensor(elem).device)
        try:
            return make(cls, elem, mode)
        finally:
            devices.pop()

    def make_wrapper(cls: Any, size: Any, strides: Any = None, offset: Any = None, *rest: Any, **options: Any) -> Any:
        if cls is not FunctionalTensor or devices[-1].type != "cuda":
            return wrap(cls, size, strides, offset, *rest, **options)
        with no_dispatch():
            data = torch.empty_strided(size, strides, dtype=rest[1], device="meta")
        return torch.Tensor._make_subclass(cls, data, rest[5], device_for_backend_keys=devices[-1])

    def dispatch(call: Any, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = kwargs if isinstance(mode, FakeGPUMode) else on_a_device(func, args, kwargs)
        return call(mode, func, types, args, own)

    def device(tensor: Any) -> torch.device:
        return torch._from_functional_tensor(tensor.elem).device

    patch(FunctionalTensor, __new__=new, device=property(device))
    patch(FunctionalTensor, is_cuda=property(lambda tensor: device(tensor).type == "cuda"))
    patch(torch.Tensor, _make_wrapper_subclass=staticmethod(make_wrapper))
    for kind in (FunctionalTensorMode, FakeTensorMode, ProxyTorchDispatchMode):
        inner = partial(dispatch, kind.__torch_dispatch__)
        patch(kind, __torch_dispatch__=torch._disable_dynamo(lambda mode, *args, inner=inner: inner(mode, *args)))
