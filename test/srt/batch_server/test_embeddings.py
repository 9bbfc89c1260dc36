"""Batches of an embedding model on the real server."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from srt.batch_server.deployment import (
    COMPLETIONS,
    EMBEDDINGS,
    Deployment,
    completed,
    create,
    lines,
)


def embedding_line(custom_id: str, **body: object) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS}
    return json.dumps(fields | {"body": {"model": "small"} | body}) + "\n"


@pytest.mark.heavy  # test_other_engines has the engine's part, and the routes know no models.
def test_embeddings_are_those_of_the_route(small_model: Path, tmp_path: Path) -> None:
    texts = ["the old mill", "oil for the lamp"]
    content = embedding_line("one", input=texts[0]) + embedding_line("both", input=texts)
    content += embedding_line("bad", input="")
    deployment = Deployment(small_model, tmp_path, "--is-embedding")
    try:
        deployment.start()
        with deployment.client() as client:
            found = completed(client, create(client, content.encode(), endpoint=EMBEDDINGS).id)
            alone = client.embeddings.create(model="small", input=texts[0], encoding_format="float")
            marked = client.embeddings.with_raw_response.create(
                model="small", input=texts[0], extra_body={"service_tier": "flex"}
            )
            with pytest.raises(openai.BadRequestError, match=EMBEDDINGS):
                create(client, lines(1), endpoint=COMPLETIONS)
    finally:
        deployment.stop()
    assert marked.headers["x-coserve-class"] == "offline"
    (one,) = found["one"]["response"]["body"]["data"]
    assert one["embedding"] == pytest.approx(alone.data[0].embedding, abs=1e-5)
    both = found["both"]["response"]["body"]["data"]
    # Sums are rounded otherwise in a batch of another size.
    assert both[0]["embedding"] == pytest.approx(one["embedding"], abs=1e-5)
    assert both[1]["embedding"] != pytest.approx(one["embedding"], abs=1e-3)
    assert found["bad"]["response"]["status_code"] == 400
