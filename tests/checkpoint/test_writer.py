"""How the ranks meet over a checkpoint in the file system."""

from __future__ import annotations

import os

import torch

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.parts import whole
from trainer.checkpoint.writer import Snapshot, Writer, sign_of


def test_the_folder_may_get_its_name_as_soon_as_the_last_sign_is_there(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    writer = Writer(folder, 1, 2, "attempt", patience=1.0, keep_last=2, keep_best=0, score=lambda figures: 0.0)
    snapshot = Snapshot(
        step=3, parts={"weights/w": whole(torch.ones(2))}, own={}, common={}, history=b"", manifest=lambda files: None
    )
    named = tmp_path / "step-00000003"
    replace = os.replace

    def replace_and_name(part, path):
        replace(part, path)
        if os.path.basename(path) == sign_of(1):  # the first rank was waiting for it
            os.rename(os.path.dirname(path), named)

    monkeypatch.setattr("trainer.system.files.os.replace", replace_and_name)
    writer.write(snapshot)
    assert sorted(path.name for path in named.iterdir()) == ["rank-00001.json", "rank-00001.safetensors"]
