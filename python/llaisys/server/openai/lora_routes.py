"""vLLM's routes that load and unload adapters, and llama.cpp's list of adapters."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, RootModel

from llaisys.common.errors import InvalidInputError
from llaisys.common.lora import check_lora_name
from llaisys.common.validation import check_text, invalid_value
from llaisys.server.errors import ApiError
from llaisys.server.generation.service import owner_of, service_for, service_of
from llaisys.server.http.request_bodies import ProtocolRouter
from llaisys.server.http.response_bodies import json_response
from llaisys.server.schemas.base import ModelName, Schema, Text
from llaisys.server.schemas.sampling import LoraScale

router = ProtocolRouter(tags=["LoRA"])

LOAD_SECONDS = 600.0  # longest wait for an adapter to be read


class LoadLoraRequest(Schema):
    """Body of /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool | None = None  # replace the adapter of that name
    base_model_name: ModelName = None  # with several models


class UnloadLoraRequest(Schema):
    """Body of /v1/unload_lora_adapter."""

    lora_name: Text
    lora_int_id: int | None = None  # of vLLM; unused
    base_model_name: ModelName = None


class LoraScales(RootModel[Annotated[list[LoraScale], Field(max_length=1024)]]):
    """Body of POST /lora-adapters."""


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request, body: LoadLoraRequest) -> Response:
    """Load an adapter from a directory of `--allowed-lora-path`. It is then a model name."""
    require_admin(request)
    service = await service_for(request, body.base_model_name)
    name = check_lora_name(body.lora_name)
    models = request.app.state.models
    if models.has_model(name) and name not in service.loras:
        raise InvalidInputError(
            f"lora_name is {name!r}; a model has that name", field="lora_name", code="name_taken"
        )
    roots = service.config.allowed_lora_paths
    path = await asyncio.to_thread(allowed_path, body.lora_path, roots)
    service.loras.begin_load(name, bool(body.load_inplace))
    loaded = None
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await service.engine.load_lora(name, str(path), bool(body.load_inplace))
        loaded = str(path)
    except InvalidInputError as error:
        text = str(error).replace(str(path), body.lora_path)
        raise ApiError(400, text, param=error.field, code=error.code) from None
    except TimeoutError:
        raise ApiError(504, "the LoRA adapter was not read in time", code="timeout") from None
    finally:
        service.loras.end_load(name, loaded)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, body: UnloadLoraRequest) -> Response:
    """Unload an adapter. Its running requests finish, new ones get 404."""
    require_admin(request)
    service = await service_for(request, body.base_model_name)
    name = body.lora_name
    service.loras.remove(name)
    await service.engine.unload_lora(name)
    return Response(
        f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain"
    )


@router.get("/lora-adapters")
async def lora_adapters(request: Request) -> Response:
    """llama.cpp's list of adapters; `scale` is 1 for the default of llama.cpp's routes."""
    table = (await service_for(request, None)).loras
    found: list[dict[str, Any]] = [
        {
            "id": number,
            "path": entry.name,  # the name: paths are not shown
            "scale": float(entry.name == table.default),
            "task_name": "",
            "prompt_prefix": "",
        }
        for number, entry in enumerate(table)
    ]
    return json_response(found)


@router.post("/lora-adapters")
async def set_lora_adapters(request: Request, body: LoraScales) -> Response:
    """Set the adapter of llama.cpp's routes for requests without `lora`: the one with scale 1."""
    require_admin(request)
    table = (await service_for(request, None)).loras
    table.default = table.select([(item.id, item.scale) for item in body.root])
    return json_response({"success": True})


def require_admin(request: Request) -> None:
    """Raise ApiError 403 unless adapters may be changed at run time with the key of this request.
    Without API keys every client may."""
    service = service_of(request)
    if not service.config.allowed_lora_paths:
        raise ApiError(
            403,
            "LoRA adapters are not changed at run time; --allowed-lora-path DIR allows it",
            code="lora_updates_off",
        )
    if len(service.keys) and not service.keys.is_admin(owner_of(request)):
        raise ApiError(
            403, 'this needs an API key with "admin": true in --api-key-file', code="not_admin"
        )


def allowed_path(given: str, roots: Sequence[Path]) -> Path:
    """The real path of an adapter below one of `roots`; relative paths start there. Links are
    followed first, so they do not lead outside. Raises InvalidInputError."""
    text = check_text("lora_path", given)
    limit = "a PEFT directory or a GGUF file below one of the directories of --allowed-lora-path"
    if "://" in text or "\0" in text:
        raise invalid_value("lora_path", text, limit)
    for root in roots:
        base = root.expanduser().resolve()
        try:
            path = (base / text).resolve()
            if path != base and path.is_relative_to(base) and path.exists():
                return path
        except OSError:  # such as a name that is too long
            continue
    raise invalid_value("lora_path", text, limit)
