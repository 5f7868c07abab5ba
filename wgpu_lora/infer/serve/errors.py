"""Errors of requests, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping

from wgpu_lora.errors import UserError
from wgpu_lora.infer.serve.schema import Json

KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip
RETRY_SECONDS = 2


class RequestError(UserError):
    """A request that cannot be answered. status: of HTTP. param: the field that is wrong. code: a word for programs."""

    def __init__(self, sentence: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}

    def body(self) -> Json:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unknown_model(name: str) -> RequestError:
    return RequestError(f"There is no model '{name:.100}': /v1/models lists them.", 404, "model", "model_not_found")


def as_request_error(error: Exception | None, status: int = 500) -> RequestError:
    """An error as one of a request: of what it asked for, or, with another status, of the engine that computed it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return RequestError(str(error)) if status == 500 else RequestError(f"{error.problem}.", status)
    return RequestError("The server failed: it is a fault of its own, which its log shows.", status)
