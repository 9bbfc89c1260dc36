"""The page in a real browser, under load, with its buttons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from batch.route_calls import create, until
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, lines
from waiting import eventually

pytestmark = pytest.mark.heavy

WAIT_MS = 120_000
MARKUP = "<img src=x onerror=document.title='hacked'>"

Page = Any


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def page(browser: Any, deployment: Deployment, faults: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on(
        "console", lambda message: faults.append(message.text) if message.type == "error" else None
    )
    opened.goto(f"{deployment.base_url}/coserve")
    yield opened
    context.close()


def use_key(page: Page, key: str) -> None:
    page.get_by_label("--api-key").fill(key)
    page.get_by_role("button", name="Continue").click()


def is_paused(client: openai.OpenAI, batch_id: str) -> bool:
    return bool(client.batches.retrieve(batch_id).to_dict()["coserve"]["paused"])  # type: ignore[index]


@pytest.mark.usefixtures("online_load")
def test_an_operator_pauses_resumes_and_cancels_a_batch(
    page: Page, client: openai.OpenAI, faults: list[str]
) -> None:
    batch_id = create(client, lines(3000, 64), metadata={"name": MARKUP}).id
    # Without a key: figures, and no batches.
    page.locator("#verdict").filter(has_text="nline").wait_for()
    assert "server’s key" in page.locator("#batches-note").inner_text()
    assert page.locator("#batches tbody tr").count() == 0
    page.get_by_role("button", name="Use a key").click()
    page.get_by_role("button", name="Close").click()
    page.get_by_label("--api-key").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.id") == "key-button"
    page.keyboard.press("Enter")
    use_key(page, "wrong")
    page.get_by_role("alert").filter(has_text="does not take this key").wait_for()
    faults.clear()  # The browser tells of the 401.
    use_key(page, API_KEY)
    row = page.locator(f"[data-batch={batch_id}]")
    row.get_by_text(MARKUP).wait_for()
    assert page.locator("#batches img").count() == 0
    assert API_KEY not in page.url

    row.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    eventually(lambda: is_paused(client, batch_id))
    row.get_by_role("button", name="Resume").wait_for()
    assert page.evaluate("document.activeElement.dataset.action") == "resume"
    assert "paused" in page.get_by_role("status").inner_text()
    row.get_by_role("button", name="Resume").click()
    eventually(lambda: not is_paused(client, batch_id))

    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Keep it running").click()
    assert client.batches.retrieve(batch_id).status in ("validating", "in_progress")
    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the batch").click()
    until(client, batch_id, "cancelling", "cancelled")
    row.get_by_role("button").first.wait_for(state="hidden")
    assert page.title() == "coserve"
    assert not faults


@pytest.mark.usefixtures("online_load")
def test_charts_and_decisions_are_there_in_words_too(page: Page, faults: list[str]) -> None:
    page.get_by_role("img", name="Engine time, last minute").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.get_by_role("img").count() >= 4
    page.locator("#headroom dd").first.wait_for()
    for figures in ("#verdict", "#headroom"):  # What an operator asks first, without scrolling.
        box = page.locator(figures).bounding_box()
        assert 0 <= box["y"] < box["y"] + box["height"] <= 900
    page.get_by_text("The same as a table").click()
    page.locator("#history tbody tr").first.wait_for()
    for heading in (
        "Are online users hurt?",
        "What the engine does",
        "Why was a request late?",
        "Batches",
        "Why: the last decisions",
        "What could be",
    ):
        assert page.get_by_role("heading", name=heading).count() == 1
    assert not faults


PERFETTO = """<script>
addEventListener("message", ({data, source, origin}) => {
  if (data === "PING") source.postMessage("PONG", origin);
  else {
    const events = JSON.parse(new TextDecoder().decode(data.perfetto.buffer));
    document.title = events.filter((event) => event.ph === "X").length + " steps";
  }
});
</script>"""


@pytest.mark.usefixtures("online_load")
def test_an_operator_opens_the_last_minute_in_perfetto(page: Page, faults: list[str]) -> None:
    """What Perfetto's page does with a message is written above: tests have no internet."""
    page.context.route(
        "https://ui.perfetto.dev/**", lambda r: r.fulfill(body=PERFETTO, content_type="text/html")
    )
    button = page.get_by_role("button", name="Open this minute in Perfetto")
    page.locator("#trace-note").filter(has_text="admin").wait_for()
    assert button.is_disabled()
    page.get_by_role("button", name="Use a key").click()
    use_key(page, ADMIN_KEY)
    with page.expect_popup() as popup:
        button.click()
    has_steps = "/^[1-9][0-9]* steps$/.test(document.title)"
    popup.value.wait_for_function(has_steps, timeout=WAIT_MS)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save this minute").click()
    assert json.loads(download.value.path().read_text())
    assert not faults


def test_an_operator_asks_why_a_request_was_late(
    page: Page, client: openai.OpenAI, faults: list[str]
) -> None:
    answer = client.completions.create(model="small", prompt="Who rows?", max_tokens=4)
    button = page.get_by_role("button", name="Explain")
    page.locator("#late-note").filter(has_text="admin").wait_for()
    assert button.is_disabled()
    page.get_by_role("button", name="Use a key").click()
    use_key(page, ADMIN_KEY)
    page.locator("#late-note").filter(has_text="kept").wait_for()
    page.get_by_label("The id of its answer").fill(MARKUP)
    button.click()
    page.get_by_role("alert").filter(has_text="no kept step").wait_for()
    faults.clear()  # The browser tells of the 404.
    page.get_by_label("The id of its answer").fill(answer.id)
    page.keyboard.press("Enter")
    page.locator("#late").filter(has_text="First token").wait_for()
    shown = page.locator("#late").inner_text()
    assert answer.id in shown
    assert "TTFT " in shown
    assert page.title() == "coserve"
    assert not faults


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_a_telephone_and_both_themes(
    page: Page, client: openai.OpenAI, width: int, theme: str
) -> None:
    batch_id = create(client, lines(1)).id
    page.evaluate(f"sessionStorage.setItem('coserve-key', '{API_KEY}')")
    page.reload()
    page.locator(f"[data-batch={batch_id}]").wait_for()
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=theme)
    page.get_by_role("img", name="Engine time, last minute").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (brightness > 384) == (theme == "light")


def test_a_server_that_is_gone_is_told(browser: Any, deployment: Deployment) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{deployment.base_url}/coserve")
    page.locator("#link").filter(has_text="Live").wait_for()
    page.route("**/coserve/view*", lambda route: route.abort())
    page.locator("#link").filter(has_text="no answer").wait_for()
    page.unroute("**/coserve/view*")
    page.locator("#link").filter(has_text="Live").wait_for()
    context.close()
