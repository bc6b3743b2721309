"""``python -m trainer``; also the entry of child processes, see :func:`trainer.system.processes.trainer_command`."""

import os
import sys

if __name__ == "__main__" and __spec__ is None:  # started by path: import nothing from its folder
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:1] = [os.path.dirname(here), *(path for path in sys.path[:1] if path != here)]
    import trainer  # noqa: F401  this package, even if another version is installed

    del sys.path[0]

from trainer.cli import entry

if __name__ == "__main__":
    entry()
