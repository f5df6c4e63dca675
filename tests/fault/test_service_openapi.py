"""Every answer of a real deployment is in its OpenAPI document, whatever a client that read the document sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from deployment_harness import Deployment, Trainer
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from hotloop.service.openapi import OPERATIONS, build_document

KEY = "admin-key-31f0"
EXAMPLES = 40
"""Per operation and kind of data."""


DOCUMENT = build_document(OPERATIONS, "policy", has_keys=True)
FOUND = [found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()]
CASES = [(operation, GenerationMode.POSITIVE) for operation in FOUND]
CASES += [(operation, GenerationMode.NEGATIVE) for operation in FOUND if operation.body]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    root = tmp_path_factory.mktemp("openapi")
    trainer = Trainer(root, root / "bucket")
    identity = trainer.anchor()
    running = Deployment(
        root / "deployment",
        trainer.url,
        config={"keys": "hotloop_api_keys"},
        environ={"HOTLOOP_API_KEYS": json.dumps({"keys": [{"key": KEY, "roles": ["admin"]}]})},
        token=KEY,
    ).start()
    running.wait_ready(identity)
    yield running
    running.stop()


def assert_conforms(deployment: Deployment, case: schemathesis.Case) -> None:
    case.call_and_validate(
        base_url=deployment.url,
        headers={"authorization": f"Bearer {KEY}"},
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_headers_conformance,
            response_schema_conformance,
            unsupported_method,
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), CASES, ids=lambda part: getattr(part, "label", None) or part.value)
def test_every_answer_is_in_the_document_and_none_is_a_server_error(
    deployment: Deployment, operation: Any, mode: GenerationMode
) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def try_one(case: schemathesis.Case) -> None:
        assert_conforms(deployment, case)

    try_one()


def test_the_document_is_openapi_3_1_and_lists_every_address(deployment: Deployment) -> None:
    document = deployment.call("GET", "/openapi.json").body
    assert document["openapi"] == "3.1.0"
    assert document == DOCUMENT
    for path, methods in document["paths"].items():
        for method in methods:
            answer = deployment.call(method.upper(), path, {} if method == "post" else None)
            assert answer.status not in (404, 405), (method, path)
            assert str(answer.status) in methods[method]["responses"], (method, path, answer.body)
    deployment.wait_ready("step000001")


def test_after_everything_the_deployment_serves_and_logged_no_surprise(deployment: Deployment) -> None:
    assert deployment.complete().status == 200
    assert "Traceback" not in deployment.log_text()
