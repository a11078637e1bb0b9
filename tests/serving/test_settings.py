"""Settings: defaults that serve, one clear message for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.errors import SettingsError
from serving.settings import Settings, load, resolved


def written(folder: Path, text: str) -> Path:
    path = folder / "server.yaml"
    path.write_text(text)
    return path


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """Nothing has to be set."""
    assert load(written(tmp_path, "")) == Settings()


def test_an_export_is_read_by_its_server_section(tmp_path: Path) -> None:
    """Evidence and provenance are for people and tools."""
    text = "schema_version: 1\nserver: {workers: 3}\nevidence: {any: thing}\nprovenance: {}\n"
    assert load(written(tmp_path, text)).workers == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_sze: 8", "max_batch_sze is not a setting. Did you mean max_batch_size?"),
        ("workers: 0", "workers: .*greater than or equal to 1.*given 0"),
        ("batch_window_ms: soon", "batch_window_ms: .*number.*given 'soon'"),
        ("precision: fp8", "precision: .*'fp32', 'tf32', 'fp16' or 'bf16'.*given 'fp8'"),
        ("device: gpu", "device: .*given 'gpu'"),
        ("synthetic: {base: 1}", "synthetic.base is not a setting"),
        ("- 1\n- 2", "holds no mapping"),
        ("workers: [", "is not YAML"),
        ("workers: 1\nworkers: 2", "is not YAML.*duplicate"),
        ("schema_version: 9\nserver: {}", "schema_version 9; this server reads version 1"),
        ("schema_version: 1\nserver: {}\nextra: 1", "extra is not a key"),
    ],
)
def test_mistakes_have_one_message(tmp_path: Path, text: str, message: str) -> None:
    """What was given, and what is allowed."""
    with pytest.raises(SettingsError, match=message):
        load(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(SettingsError, match=r"absent\.yaml cannot be read"):
        load(tmp_path / "absent.yaml")


def test_defaults_follow_the_device() -> None:
    """A CPU gets a small model and shares its cores; a GPU gets ResNet-50."""
    on_cpu = resolved(Settings(), has_cuda=False)
    assert (on_cpu.device, on_cpu.model) == ("cpu", "mobilenet_v3_small")
    assert on_cpu.threads is not None
    assert on_cpu.threads >= 1
    on_gpu = resolved(Settings(), has_cuda=True)
    assert (on_gpu.device, on_gpu.model) == ("cuda:0", "resnet50")
