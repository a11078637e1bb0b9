"""The Open Inference Protocol: the codec inverts itself, and the real client understands us."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from serving import oip
from serving.errors import BadRequest
from tests.serving.conftest import RunningServer, run_server
from tests.serving.engine_contract import pictures

NUMERIC = sorted(set(oip.DTYPES) - {"BOOL"})


def numeric_tensor(datatype: str) -> st.SearchStrategy[oip.Tensor]:
    values = arrays.arrays(
        oip.DTYPES[datatype], arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    )
    return values.map(lambda a: oip.Tensor("x", datatype, a.shape, a))


tensors = st.one_of(
    st.sampled_from(sorted(oip.DTYPES)).flatmap(numeric_tensor),
    st.lists(st.binary(max_size=9), max_size=4).map(
        lambda items: oip.Tensor("x", "BYTES", (len(items),), items)
    ),
)


@given(tensors)
def test_binary_tensors_come_back(tensor: oip.Tensor) -> None:
    """Every datatype and shape."""
    raw = memoryview(oip.to_bytes(tensor))
    again = oip.from_bytes("x", tensor.datatype, tensor.shape, raw)
    assert again.shape == tensor.shape
    np.testing.assert_array_equal(np.asarray(again.data), np.asarray(tensor.data))


@given(tensors, st.booleans(), st.none() | st.text(max_size=5))
def test_answers_read_as_requests(tensor: oip.Tensor, binary: bool, id_: str | None) -> None:
    """What is encoded as an output is parsed as an input of the same name, shape and values."""
    asked = oip.InferRequest(id_, {}, [], None, binary)
    body, headers = oip.encode("m", asked, [tensor], {})
    cut = int(headers.get(oip.HEADER_LENGTH, len(body)))
    document = json.loads(body[:cut])
    assert document.get("id") == id_
    turned = {"inputs": document["outputs"], **({"id": id_} if id_ is not None else {})}
    finite = isinstance(tensor.data, list) or bool(np.isfinite(tensor.data).all())
    textual = isinstance(tensor.data, list) and not binary
    if not finite or textual:  # JSON has no NaN, and bytes in JSON are text
        return
    head = json.dumps(turned).encode()
    parsed = oip.parse(head + body[cut:], str(len(head)) if binary else None)
    np.testing.assert_array_equal(np.asarray(parsed.inputs[0].data), np.asarray(tensor.data))
    assert parsed.inputs[0].shape == tensor.shape


@given(st.binary(max_size=200), st.none() | st.text(max_size=4) | st.integers().map(str))
def test_no_body_is_more_than_a_bad_request(body: bytes, header_length: str | None) -> None:
    """Whatever arrives, the parser returns or says what is wrong."""
    with contextlib.suppress(BadRequest):
        assert oip.parse(body, header_length).inputs


INPUT = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the body"),
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [{**INPUT, "shape": [-1]}]}, "is not a shape"),
        ({"inputs": [{**INPUT, "shape": [1 << 50, 1 << 50]}]}, "is not a shape"),
        ({"inputs": [{**INPUT, "shape": [2]}]}, "has 2 elements, data has 1"),
        ({"inputs": [{**INPUT, "datatype": "FP8"}]}, "FP8"),
        ({"inputs": [{**INPUT, "data": [1]}]}, "BYTES in JSON are strings"),
        ({"inputs": [{**INPUT, "datatype": "UINT8", "data": [300]}]}, "does not fit UINT8"),
        ({"inputs": [{**INPUT, "datatype": "INT8", "data": [{}]}]}, "no number"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": 9}}]}, "the body ends"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": -1}}]}, "is not a size"),
    ],
)
def test_the_message_names_the_place(document: Any, message: str) -> None:
    """One sentence a mistake."""
    body = json.dumps(document).encode()
    with pytest.raises(BadRequest, match=message.replace("[", r"\[")):
        oip.parse(body, str(len(body)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = {"device": "cpu", "max_batch_size": 8, "batch_window_ms": 2.0}
    with run_server(tmp_path_factory.mktemp("oip"), settings) as it:
        yield it


@pytest.mark.slow
class TestTritonClient:
    """NVIDIA's own client against our server."""

    @pytest.fixture
    def client(self, server: RunningServer) -> Iterator[Any]:
        http = pytest.importorskip("tritonclient.http")
        client = http.InferenceServerClient(f"127.0.0.1:{server.port}")
        yield client
        client.close()

    @pytest.fixture
    def name(self) -> str:
        return "mobilenet_v3_small"

    def test_health_and_metadata(self, client: Any, name: str) -> None:
        """Live, ready, extensions, inputs and outputs."""
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        metadata = client.get_model_metadata(name)
        assert [i["name"] for i in metadata["inputs"]] == ["image", "pixels"]
        assert client.get_model_config(name)["backend"] == "serving"

    @pytest.mark.parametrize("binary_in", [True, False])
    @pytest.mark.parametrize("binary_out", [True, False])
    def test_pixels(self, client: Any, name: str, binary_in: bool, binary_out: bool) -> None:
        """Binary or JSON, in and out, with the id that was sent."""
        http = pytest.importorskip("tritonclient.http")
        given = http.InferInput("pixels", [2, 224, 224, 3], "UINT8")
        given.set_data_from_numpy(pictures(2), binary_data=binary_in)
        wanted = [http.InferRequestedOutput(n, binary_data=binary_out)
                  for n in ("classes", "probabilities")]  # fmt: skip
        answer = client.infer(name, [given], outputs=wanted, request_id="a1")
        assert answer.get_response()["id"] == "a1"
        assert answer.as_numpy("classes").shape == (2, 5)
        assert answer.as_numpy("classes").dtype == np.int64
        assert (np.diff(answer.as_numpy("probabilities"), axis=1) <= 0).all()

    def test_an_image_is_answered_as_by_predict(
        self, client: Any, name: str, server: RunningServer, jpeg: bytes
    ) -> None:
        """The same picture, the same classes, by either route."""
        http = pytest.importorskip("tritonclient.http")
        given = http.InferInput("image", [1], "BYTES")
        given.set_data_from_numpy(np.array([jpeg], dtype=np.object_))
        classes = client.infer(name, [given]).as_numpy("classes")[0].tolist()
        assert classes == server.json("POST", "/predict", jpeg)[1]["classes"]

    def test_statistics_move(self, client: Any, name: str) -> None:
        """Counts by request, by picture and by batch size."""
        http = pytest.importorskip("tritonclient.http")
        before = client.get_inference_statistics(name)["model_stats"][0]
        given = http.InferInput("pixels", [3, 224, 224, 3], "UINT8")
        given.set_data_from_numpy(pictures(3))
        client.infer(name, [given])
        after = client.get_inference_statistics(name)["model_stats"][0]
        assert after["inference_count"] - before["inference_count"] == 3
        success = [s["inference_stats"]["success"] for s in (before, after)]
        assert success[1]["count"] - success[0]["count"] == 1
        assert success[1]["ns"] > success[0]["ns"]
        assert (
            sum(b["compute_infer"]["count"] for b in after["batch_stats"])
            == (after["execution_count"])
        )

    def test_errors_are_read_by_the_client(self, client: Any, name: str) -> None:
        """Unknown names, versions, shapes: its own exception with our sentence."""
        http = pytest.importorskip("tritonclient.http")
        utils = pytest.importorskip("tritonclient.utils")
        given = http.InferInput("pixels", [1, 9, 9, 3], "UINT8")
        given.set_data_from_numpy(np.zeros((1, 9, 9, 3), np.uint8))
        with pytest.raises(utils.InferenceServerException, match="expected image, BYTES"):
            client.infer(name, [given])
        with pytest.raises(utils.InferenceServerException, match="no model 'other' is served"):
            client.infer("other", [given])
        assert not client.is_model_ready(name, "7")


@pytest.mark.slow
def test_triton_names_are_among_the_metrics(server: RunningServer, jpeg: bytes) -> None:
    """Dashboards made for Triton find its counters."""
    server.json("POST", "/predict", jpeg)
    text = server.request("GET", "/metrics")[2].decode()
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count",
                 "nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us",
                 "nv_inference_pending_request_count"):  # fmt: skip
        assert f'{name}{{model="mobilenet_v3_small",version="1"}}' in text
    assert "_created" not in text


@pytest.mark.slow
@given(
    path=st.sampled_from(["/predict", "/v2/models/mobilenet_v3_small/infer", "/v2/models/x/infer",
                          "/v2/", "/v2/models/mobilenet_v3_small/ready", "/admin/config"]),
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH"]),
    body=st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
        | st.sampled_from(["BYTES", "UINT8", "image", "pixels"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["inputs", "outputs", "name", "shape", "datatype", "data",
                             "parameters", "binary_data_size", "timeout", "id"]), inner,
            max_size=6),
        max_leaves=12,
    ).map(lambda document: json.dumps(document).encode()),
    headers=st.dictionaries(
        st.sampled_from(["Inference-Header-Content-Length", "X-Request-Timeout-Ms",
                         "Authorization"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6), max_size=2),
)  # fmt: skip
def test_nothing_is_answered_with_5xx(
    server: RunningServer, path: str, method: str, body: bytes, headers: dict[str, str]
) -> None:
    """Whatever a client sends is the client's fault; a deadline that has passed is a 503 that says
    so."""
    status, _, answer = server.request(method, path, body, headers)
    if status == 503:
        assert "X-Request-Timeout-Ms" in headers
    else:
        assert status < 500, answer
