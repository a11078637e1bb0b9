"""Models from their three sources, with inputs of other sizes, and the accuracy guard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving.capabilities import settle
from serving.engines import open_engines
from serving.errors import SettingsError, StartError
from serving.guard import check_accuracy, compare
from serving.models import identity, load
from serving.settings import Settings
from tests.serving.conftest import encoded, photo, run_server
from tests.serving.engine_contract import pictures

pytestmark = pytest.mark.slow

FACTORY = """
import io
import numpy as np
import torch
from PIL import Image

def small():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 7))
    net.input_spec = {"resize": 32, "crop": 32}
    net.preprocess = lambda data: np.asarray(
        Image.open(io.BytesIO(data)).convert("RGB").resize((32, 32)))
    return net

def broken():
    raise RuntimeError("no such table")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module `zoo7`, as a user's project is one."""
    (tmp_path / "zoo7.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SERVING_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    sys.modules.pop("zoo7", None)


def settled(**changes: object) -> Settings:
    return settle(Settings.model_validate({"device": "cpu", "threads": 1, **changes}))


def test_a_factory_serves_with_its_own_preprocessing(folder: Path, jpeg: bytes) -> None:
    """Seven classes of 32 x 32 pictures: the server takes its word for both."""
    settings = {"device": "cpu", "model": "zoo7:small", "preprocessing": "model"}
    with run_server(folder, settings) as server:
        status, answer = server.json("POST", "/predict", jpeg)
        assert status == 200
        assert max(answer["classes"]) < 7
        metadata = server.json("GET", "/v2/models/small")[1]
        assert metadata["inputs"][1]["shape"] == [-1, 32, 32, 3]
        assert server.json("POST", "/predict", b"no picture")[0] == 400


@pytest.mark.parametrize("engine", ["eager", "onnxruntime"])
def test_files_answer_as_the_model_they_were_made_of(folder: Path, engine: str) -> None:
    """torch.export and TorchScript; ONNX from the one of the two that can be traced again."""
    import warnings

    import torch
    from zoo7 import small  # type: ignore[import-not-found]

    net = small().eval()
    example = torch.zeros(2, 3, 32, 32)
    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.export.save(torch.export.export(net, (example,), dynamic_shapes=({0: batch},)), "m.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net, example).save("m.pt")  # type: ignore[no-untyped-call]
    names = ("m.pt2", "m.pt") if engine == "eager" else ("m.pt2",)
    spec = {"resize": 32, "crop": 32}
    want = settled(model="zoo7:small")
    expected = open_engines(want, lambda _: None)[0].run(pictures(3, 32), 1).logits
    for name in names:
        settings = settled(model=name, input=spec, engine=engine)
        logits = open_engines(settings, lambda _: None)[0].run(pictures(3, 32), 1).logits
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_another_size_of_a_torchvision_model(folder: Path, jpeg: bytes) -> None:
    """The settings' word over the model's."""
    settings = {"device": "cpu", "input": {"resize": 170, "crop": 160}}
    with run_server(folder, settings) as server:
        assert server.json("POST", "/predict", jpeg)[0] == 200
        config = server.json("GET", "/v2/models/mobilenet_v3_small")[1]
        assert config["inputs"][1]["shape"] == [-1, 160, 160, 3]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "absent.pt2"}, SettingsError, "absent.pt2 is not a file"),
        ({"model": "zoo7:nothing"}, SettingsError, "zoo7:nothing cannot be imported"),
        ({"model": "zoo8:small"}, SettingsError, "zoo8:small cannot be imported"),
        ({"model": "zoo7:broken"}, StartError, "zoo7:broken failed: RuntimeError: no such table"),
        ({"model": "zoo7:small", "weights": "w.pt"}, SettingsError, "brings its own"),
        ({"weights": "w.pt"}, StartError, "weights: w.pt is not a file"),
    ],
)
def test_what_does_not_load_says_why(
    folder: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    """One sentence with the name that was given."""
    with pytest.raises(error, match=message):
        load(settled(**changes))


def test_identities_tell_models_apart(folder: Path) -> None:
    """By name, by input, by the bytes of a file."""
    (folder / "a.pt2").write_bytes(b"one")
    (folder / "b.pt2").write_bytes(b"two")
    specs: dict[str, object] = {"input": {"resize": 64, "crop": 64}}
    several: list[dict[str, object]] = [
        {},
        specs,
        {"model": "resnet18"},
        {"model": "a.pt2", **specs},
        {"model": "b.pt2", **specs},
        {"model": "zoo7:small"},
    ]
    names = [identity(settled(**changes)) for changes in several]
    assert len(set(names)) == len(several)


class TestGuard:
    def test_compares_classes_and_outputs(self) -> None:
        """One of four differs; what is not a number never agrees."""
        reference = np.eye(4, dtype=np.float32)
        found = reference.copy()
        found[3] = [1, 0, 0, 0]
        assert compare(found, reference)["agreement"] == 0.75
        found[0] = np.nan
        assert compare(found, reference)["agreement"] == 0.5
        assert compare(reference, reference) == {
            "samples": 4, "agreement": 1.0, "relative_error": 0.0
        }  # fmt: skip

    def samples(self, folder: Path) -> str:
        (folder / "samples").mkdir(exist_ok=True)
        for seed in range(6):
            (folder / "samples" / f"{seed}.png").write_bytes(encoded(photo(seed=seed), "PNG"))
        (folder / "samples" / "notes.txt").write_text("not a picture")
        return str(folder / "samples")

    @pytest.mark.parametrize("engine", ["eager", "onnxruntime"])
    def test_a_faithful_engine_passes(self, folder: Path, engine: str) -> None:
        """Its agreement is reported with the statistics."""
        settings = {"device": "cpu", "engine": engine, "model": "mobilenet_v3_small",
                    "guard": {"samples": self.samples(folder)}}  # fmt: skip
        with run_server(folder, settings) as server:
            report = server.stats()["guard"]
        assert report["samples"] == 6
        assert report["agreement"] == 1.0
        assert report["relative_error"] < 0.1

    def test_one_that_answers_differently_does_not_start(self, folder: Path) -> None:
        """The message has the agreement and the bound; the reference is kept on disk."""
        settings = settled(
            model="zoo7:small", preprocessing="model", guard={"samples": self.samples(folder)}
        )

        class Wrong:
            def run(self, pixels: object, active: int) -> object:
                from serving.engines import Output

                return Output(np.full((len(pixels), 7), np.nan, np.float32), 0.0, 1)  # type: ignore[arg-type]

        spec = settings.input
        assert spec is not None
        with pytest.raises(StartError, match=r"agrees .* on 0.0% of 6 samples .* at least 99.0%"):
            check_accuracy(settings, spec, Wrong(), None)  # type: ignore[arg-type]
        assert len(list((folder / "cache").glob("reference-*.npy"))) == 1

    def test_samples_that_are_none_are_named(self, folder: Path) -> None:
        """A missing folder, and one without images."""
        settings = settled(model="zoo7:small", guard={"samples": "absent"})
        engine = open_engines(settings, lambda _: None)[0]
        assert settings.input is not None
        with pytest.raises(SettingsError, match="absent is not a folder"):
            check_accuracy(settings, settings.input, engine, None)
