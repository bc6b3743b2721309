"""Run the JavaScript of the page "Will it fit?": with mini-racer (V8), of the extra ``test``, or with Node."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from trainer.commands import fit_page

HAS_ENGINE = importlib.util.find_spec("py_mini_racer") is not None or shutil.which("node") is not None


def page_answers(script: str, given: Any, folder: Path) -> Any:
    """What the function body ``script`` returns for ``given``, after the scripts of the page that need no browser."""
    sources = [(fit_page.FOLDER / name).read_text() for name in ("allocator.js", "template.js")]
    source = "\n".join([*sources, f"const answer = given => {{ {script} }};"])
    if importlib.util.find_spec("py_mini_racer") is not None:
        from py_mini_racer import MiniRacer

        engine = MiniRacer()
        engine.eval(source)
        return json.loads(engine.eval(f"JSON.stringify(answer({json.dumps(given)}))"))
    run, content = folder / "run.js", folder / "given.json"
    content.write_text(json.dumps(given))
    read = f"JSON.parse(require('fs').readFileSync({json.dumps(str(content))}, 'utf8'))"
    run.write_text(f"{source}\nprocess.stdout.write(JSON.stringify(answer({read})));")
    done = subprocess.run(["node", str(run)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
