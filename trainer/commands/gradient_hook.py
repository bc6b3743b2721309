"""Records optimizer steps in the processes of ``trainer same-gradient``, which writes this file as sitecustomize.py."""

import os
import site
import sys
from typing import Any


class Recorder:
    """Finds no module, but sees when torch is imported, and then records the optimizer steps of this process."""

    def __init__(self, folder: str, steps: int) -> None:
        self.folder, self.steps, self.taken, self.waits, self.dtypes = folder, steps, 0, True, dict[Any, Any]()
        sys.path[:] = [path for path in sys.path if path != folder]
        ours = sys.modules.pop("sitecustomize")
        site.execsitecustomize()  # another one in the environment
        sys.modules.setdefault("sitecustomize", ours)

    def find_spec(self, *_: Any) -> None:
        """Install the hooks in the first import after that of torch's optimizers."""
        module: Any = sys.modules.get("torch.optim.optimizer")
        if self.waits and hasattr(module, "register_optimizer_step_pre_hook"):
            self.waits, autocast = False, sys.modules["torch"].autocast
            if sys.platform == "linux":  # end with the launcher, because torchrun starts a session for each rank
                sys.modules["ctypes"].CDLL(None).prctl(1, 9)
            module.register_optimizer_step_pre_hook(self.before_step)
            enter = autocast.__enter__
            autocast.__enter__ = lambda its: (its._enabled and self.dtypes.setdefault(its.fast_dtype), enter(its))[1]

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step; with a closure, after it, because the closure computes the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            return self.record(optimizer)
        return args[:1], {**kwargs, "closure": lambda: (closure(), self.record(optimizer))[0]}

    def record(self, optimizer: Any) -> Any:
        """Write a step. In run B, compare it with that of run A, and take over the gradients of A."""

        def whole(tensor: Any) -> Any:  # may be sharded or sparse
            return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().to_dense()

        self.taken += 1
        torch, group, name = sys.modules["torch"], sys.modules["torch"].distributed, f"step-{self.taken:06}"
        rank = group.get_rank() if group.is_initialized() else int(os.environ.get("RANK", "0"))
        path = f"{self.folder[:-1]}A/{name}" if self.folder.endswith("B") else ""
        theirs = torch.load(path, weights_only=True, mmap=True)["gradients"] if os.path.exists(path) else []
        parameters = [one for each in optimizer.param_groups for one in each["params"]]
        if theirs and [one.shape for one in theirs] != [one.shape for one in parameters]:
            raise RuntimeError("the optimizers of A and B have different parameters")
        ours: dict[str, Any] = {"rates": [float(each["lr"]) for each in optimizer.param_groups]}
        ours |= {"gradients": [], "products": torch.zeros(2, 2).double(), "weights": torch.zeros(len(parameters), 2)}
        ours["eps"] = max(torch.finfo(one).eps for one in {*self.dtypes, *(one.dtype for one in parameters)})
        scale = getattr(optimizer, "grad_scale", None) or 1.0  # fused optimizers unscale by themselves
        for at, parameter in enumerate(parameters):
            weight, grad = whole(parameter), parameter.grad
            gradient = (torch.zeros_like(weight) if grad is None else whole(grad) / scale).cpu().clone()
            pair = torch.stack([theirs[at].flatten() if theirs else gradient.flatten(), gradient.flatten()]).double()
            ours["products"] += pair @ pair.T  # a·a, a·b, b·b
            ours["weights"][at] = torch.stack([weight.double().sum(), weight.double().norm()])
            ours["gradients"] += [gradient] if rank == 0 and not path else []
            if theirs and grad is not None and not grad.is_sparse:
                full, is_sharded = theirs[at].to(weight) * scale, hasattr(grad, "full_tensor")
                where = (grad.device_mesh, grad.placements) if is_sharded else ()
                grad.copy_(group.tensor.distribute_tensor(full, *where, src_data_rank=None) if is_sharded else full)
        if rank == 0:
            with open(f"{self.folder}/{name}", "xb") as file:  # fails if another process of the command trains, too
                torch.save(ours, file)
        if self.taken == self.steps:
            os._exit(0)
