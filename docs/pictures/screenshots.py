"""Draw docs/images/plan.png, report.png and runs.png: screenshots of real output, by a headless Chromium.

    python docs/pictures/screenshots.py [plan] [report] [runs]

The commands really run, in an empty folder; Chromium or Google Chrome must be installed. Ten minutes on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTH, MAX_HEIGHT = 1280, 4000
MODEL = "--model.name vit_b_16 --model.weights null"
PLAN = f"plan vit_cifar10 {MODEL} --gpu rtx-3060 --memory.budget 2GB --memory.micro_batch_size auto --out plan"
RUN = "fit vit_digits --run.dir runs/baseline --epochs 12 --data.val_fraction 0.1"
SECOND = "fit vit_digits --run.dir runs/two_ranks --epochs 3 --run.devices 2"
TABLES = ["runs --sort -test_accuracy", "runs --compare runs/baseline runs/two_ranks"]
TERMINAL = """<meta charset="utf-8"><style>
body { margin: 14px; background: #fff; color: #59636e; font: 15px/1.5 'DejaVu Sans', sans-serif; width: 1000px }
pre { margin: 2px 0 12px; padding: 10px; border-radius: 6px; background: #161b22; color: #e6edf3;
      font: 14px/1.15 'DejaVu Sans Mono', monospace }</style>"""


def trainer(command: str, folder: Path) -> str:
    """Run a command of ``trainer`` in ``folder``, and return what it has printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    words = [sys.executable, "-m", "trainer", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def photograph(page: Path, picture: Path, height: int, top: int = 0) -> None:
    """Write the part of ``page`` from pixel ``top`` to ``height``, without blank space at the end, as a PNG."""
    if BROWSER is None:
        raise SystemExit("neither chromium nor google-chrome is installed")
    shot = page.with_suffix(".png")
    size = [f"--window-size={WIDTH},{MAX_HEIGHT}", "--hide-scrollbars", f"--user-data-dir={page.parent / 'browser'}"]
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--blink-settings=preferredColorScheme=1"]
    subprocess.run([BROWSER, *quiet, *size, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True)
    image = Image.open(shot).convert("RGB")
    paper = Image.new("RGB", image.size, image.getpixel((0, 0)))
    used = ImageChops.difference(image, paper).getbbox() or (0, 0, WIDTH, height)
    part = image.crop((0, top, min(WIDTH, used[2] + 14), min(height, used[3] + 14)))
    part.quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture.relative_to(ROOT)}: {part.width} x {part.height}, {picture.stat().st_size / 1000:.0f} kB")


def hide(page: Path, folder: Path) -> Path:
    """Replace the name of ``folder`` in a page."""
    page.write_text(page.read_text(encoding="utf-8").replace(str(folder), "~"), encoding="utf-8")
    return page


def main(wanted: list[str]) -> None:
    """Draw the pictures in ``wanted``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "plan" in wanted:
            trainer(PLAN, folder)
            photograph(hide(folder / "plan" / "plan.html", folder), IMAGES / "plan.png", 1226)
        if "report" in wanted or "runs" in wanted:
            trainer(RUN, folder)
        if "report" in wanted:
            photograph(hide(folder / "runs" / "baseline" / "report.html", folder), IMAGES / "report.png", 890)
        if "runs" in wanted:
            trainer(SECOND, folder)
            tables = [f"trainer {escape(table)}<pre>{escape(trainer(table, folder))}</pre>" for table in TABLES]
            page = folder / "tables.html"
            page.write_text(TERMINAL + "".join(tables), encoding="utf-8")
            photograph(page, IMAGES / "runs.png", MAX_HEIGHT)


if __name__ == "__main__":
    main(sys.argv[1:] or ["plan", "report", "runs"])
