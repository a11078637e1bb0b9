"""The routes: what a client sees."""

from __future__ import annotations

import hmac
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from serving import __version__, oip
from serving.errors import RequestError, SettingsError
from serving.inferring import Inferring, check_model, read_body
from serving.metrics import exposition
from serving.service import Service

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
ADMIN_BODY_BYTES = 1 << 16


class CalibrationRequest(BaseModel):
    """Body of POST /admin/calibrate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_sizes: list[Annotated[int, Field(ge=1, le=1024)]] = Field(min_length=1, max_length=64)
    repeats: int = Field(5, ge=1, le=1000)
    instances: int = Field(1, ge=1, le=256)


def create_app(service: Service, admin_token: str | None) -> Inferring:
    """The application.

    Args:
        admin_token: what `Authorization: Bearer` must carry for /admin; None closes it.
    """
    app = Starlette(
        routes=[
            Route("/predict", _post_only),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/stats", stats),
            Route("/metrics", metrics),
            Route("/config", config),
            Route("/admin/config", change_config, methods=["PATCH"]),
            Route("/admin/calibrate", calibrate, methods=["POST"]),
            Route("/v2", server_metadata),
            Mount("/v2", routes=OIP_ROUTES),
        ],
        exception_handlers={
            RequestError: _refuse,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
    )
    app.state.service, app.state.admin_token = service, admin_token
    return Inferring(service, app)


async def live(_: Request) -> Response:
    """The event loop answers."""
    return JSONResponse({"live": True})


async def ready(request: Request) -> Response:
    """Every executor is loaded and warm, and nothing drains."""
    service = _service(request)
    reason = service.failure or ("draining" if service.draining else None)
    if reason is None:
        return JSONResponse({"ready": True})
    return JSONResponse({"ready": False, "reason": reason}, 503)


async def stats(request: Request) -> Response:
    """All counters, cumulative."""
    return JSONResponse(_service(request).document())


async def metrics(request: Request) -> Response:
    """The same for Prometheus."""
    text = exposition(_service(request).document())
    return Response(text, media_type="text/plain; version=0.0.4")


async def config(request: Request) -> Response:
    """The settings in effect."""
    return JSONResponse(_service(request).settings.model_dump(mode="json"))


async def change_config(request: Request) -> Response:
    """Change what can change without a restart; the answer is the settings in effect."""
    _check_admin(request)
    changes = await _json_object(request)
    try:
        return JSONResponse(_service(request).change(changes).model_dump(mode="json"))
    except SettingsError as error:
        raise HTTPException(400, str(error)) from error


async def calibrate(request: Request) -> Response:
    """Time batches inside the executors."""
    _check_admin(request)
    try:
        asked = CalibrationRequest.model_validate(await _json_object(request))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HTTPException(400, f"{where}: {first['msg'].lower()}") from error
    service = _service(request)
    seconds = {
        str(size): await service.calibrate(size, asked.repeats, asked.instances)
        for size in asked.batch_sizes
    }
    return JSONResponse({"service_s": seconds})


async def server_metadata(_: Request) -> Response:
    """The protocol's own: name, version, extensions."""
    return JSONResponse(
        {"name": "serving", "version": __version__, "extensions": list(oip.EXTENSIONS)}
    )


async def oip_live(_: Request) -> Response:
    """Status only, as the protocol's clients read it."""
    return Response(status_code=200)


async def oip_ready(request: Request) -> Response:
    """200 or 400, as Triton answers."""
    service = _service(request)
    if "model" in request.path_params:
        _check_model(request)
    return Response(status_code=400 if service.failure or service.draining else 200)


async def model_metadata(request: Request) -> Response:
    """Inputs and outputs."""
    _check_model(request)
    return JSONResponse(_interface(_service(request)).metadata())


async def model_config(request: Request) -> Response:
    """The settings in effect, as parameters of a Triton model configuration."""
    _check_model(request)
    return JSONResponse(_interface(_service(request)).configuration())


async def model_stats(request: Request) -> Response:
    """Counts and nanoseconds by stage and batch size."""
    if "model" in request.path_params:
        _check_model(request)
    service = _service(request)
    return JSONResponse(oip.statistics_of(service.model_name, service.document()))


def _model_routes(path: str) -> list[Route]:
    return [
        Route(path, model_metadata),
        Route(f"{path}/ready", oip_ready),
        Route(f"{path}/config", model_config),
        Route(f"{path}/stats", model_stats),
        Route(f"{path}/infer", _post_only),
    ]


async def _post_only(_: Request) -> Response:
    """POSTs never come here: `Inferring` takes them."""
    raise HTTPException(405, "use POST", {"Allow": "POST"})


OIP_ROUTES = [
    Route("/", server_metadata),
    Route("/health/live", oip_live),
    Route("/health/ready", oip_ready),
    Route("/models/stats", model_stats),
    *_model_routes("/models/{model}"),
    *_model_routes("/models/{model}/versions/{version}"),
]


def _check_model(request: Request) -> None:
    parameters = request.path_params
    check_model(_service(request), parameters["model"], parameters.get("version"))


def _interface(service: Service) -> oip.ModelInterface:
    settings = service.settings.model_dump(mode="json", exclude={"input", "guard", "synthetic"})
    return oip.ModelInterface(
        service.model_name, f"serving_{service.settings.engine}", service.spec.crop,
        parameters=settings,
    )  # fmt: skip


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _json_object(request: Request) -> dict[str, Any]:
    body = await read_body(dict(request.headers.raw), request.receive, ADMIN_BODY_BYTES)
    try:
        document = json.loads(body)
    except ValueError as error:
        raise HTTPException(400, "the body is not JSON") from error
    if not isinstance(document, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return document


def _check_admin(request: Request) -> None:
    token: str | None = request.app.state.admin_token
    if token is None:
        raise HTTPException(403, "the admin endpoint is closed: SERVING_ADMIN_TOKEN is not set")
    if request.client is None or request.client.host not in LOOPBACK:
        raise HTTPException(403, "the admin endpoint answers on loopback only")
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(401, "wrong or missing bearer token", {"WWW-Authenticate": "Bearer"})


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"unexpected: {type(error).__name__}"}, 500)
