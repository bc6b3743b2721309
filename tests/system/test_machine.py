"""What a process may use of its machine."""

from types import SimpleNamespace

import psutil

from trainer.system import machine


def test_what_is_available_within_a_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=32 * 1024))
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_bytes() == 32 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("9000\n")
    assert machine.available_bytes() == 32 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert machine.available_bytes() == 1000
    (tmp_path / "memory.stat").write_text("anon 2000\nactive_file 3000\ninactive_file 4000\n")
    assert machine.available_bytes() == 5000
