"""What traces import is imported here, once for all that are forked: of a small one it is more than the half."""

from __future__ import annotations

import accelerate  # noqa: F401
import torch._subclasses.schema_check_mode  # noqa: F401
import transformers.modeling_utils  # noqa: F401
