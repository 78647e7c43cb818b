"""The page at `/` in headless Chromium: what it shows and asks, dark, and as wide as a phone.

Run: pytest tests/serve/test_page.py
"""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request
from starlette.responses import HTMLResponse

from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve import app as app_module
from mlxstacks.serve.app import build_app
from mlxstacks.serve.engine import Engine
from mlxstacks.serve.text import Part
from tests.serve.serve_cases import nano_settings
from tests.serve.test_app import BEGUN, Scripted, listening_to, pieces

# Chromium makes no window narrower than 500 pixels, but frames.
PHONE = "<iframe src=/driven style='border: 0; width: 390px; height: 800px'></iframe>"
DRIVER = """
const until = async (holds) => { while (!holds()) await new Promise((r) => setTimeout(r, 20)); };
const texts = (name) => [...document.querySelectorAll(name)].map((one) => one.textContent);
addEventListener("DOMContentLoaded", async () => {
  await until(() => byId("model").value && byId("memory").textContent);
  byId("compare").checked = true;
  byId("text").value = "SAID";
  byId("ask").requestSubmit();
  await until(() => texts(".about").filter((one) => one.endsWith("tokens")).length === 3);
  const colours = (name) => {
    const {color, backgroundColor} = getComputedStyle(document.querySelector(name));
    return [color, backgroundColor];
  };
  const found = {
    width: innerWidth, over: document.documentElement.scrollWidth - innerWidth,
    bold: document.querySelectorAll("b").length, said: texts(".said"), about: texts(".about"),
    texts: texts(".text"), models: [...byId("model").options].map((one) => one.value),
    memory: byId("memory").textContent,
    page: colours("body"), panel: colours(".said"), quiet: colours(".about"),
  };
  fetch("/done", {method: "POST", body: JSON.stringify(found)});
});
"""


class Driven:
    """The app; its page once more, with a script of the test behind it and an image that does not
    come before the script has posted what it found: Chromium waits for it; and that in a frame.
    """

    def __init__(self, app: Any, said: str) -> None:
        self._app, self._done = app, asyncio.Event()
        page = Path(app_module.__file__).with_name("page.html").read_text()
        script = f"<img src=/held><script>{DRIVER.replace('SAID', said)}</script></body>"
        self._pages = {"/driven": page.replace("</body>", script), "/phone": PHONE}
        self.found: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in ("/held", "/done", *self._pages):
            await self._app(scope, receive, send)
            return
        if path == "/done":
            self.found = await Request(scope, receive).json()
            self._done.set()
        if path == "/held":
            await asyncio.wait_for(self._done.wait(), 60)
        await HTMLResponse(self._pages.get(path, ""))(scope, receive, send)


def dom_of(url: str, directory: Path, *options: str) -> str:
    """What Chromium makes of a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={directory / 'profile'}", "--window-size=1000,900", *options,
        "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def luminance(colour: str) -> float:
    """WCAG's relative luminance of `rgb(...)`: 0 black, 1 white."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(x * y for x, y in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(text: str, behind: str) -> float:
    dark, light = sorted(map(luminance, (text, behind)))
    return (light + 0.05) / (dark + 0.05)


def check_colours(found: dict[str, Any], *, is_dark: bool) -> None:
    """Dark or light, and legible by WCAG's level AA. An answer has the page behind it."""
    page = found["page"][1]
    assert (luminance(page) < 0.05) is is_dark
    for text, behind in (found["page"], found["panel"], (found["quiet"][0], page)):
        assert contrast(text, behind) >= 4.5, (text, behind)


def test_page_chats_on_a_dark_phone(tmp_path: Path) -> None:
    engine: Any = Scripted()
    engine.models = ("base-model", "math", "ungated", "routed")
    said = [Part("reasoning", "hm"), Part("text", "<i>Hel"), Part("text", "lo</i>")]
    engine.script = lambda ask: [BEGUN, *pieces(said)]
    app = Driven(build_app(engine, ServeSettings(), None), "<b>hi</b>")
    with listening_to(app) as url:
        plain = dom_of(url, tmp_path, "--virtual-time-budget=4000")
        assert "<option>math</option>" in plain  # under its own policy the script runs
        dom_of(f"{url}/phone", tmp_path, "--force-dark-mode")
    found = app.found
    assert sorted(ask.model for ask in engine.asks) == ["base", "routed", "ungated"]
    assert (found["width"], found["over"] <= 0) == (390, True)
    assert (found["said"], found["bold"]) == (["<b>hi</b>"], 0)  # what is said is no markup
    assert found["texts"] == ["<i>Hello</i>"] * 3
    assert found["about"] == ["routed: math 0.50 | loaded math | 3 tokens"] * 3
    assert found["memory"] == "2 under way, stacks 0.0 MB (math), prompts 0.0 MB"
    check_colours(found, is_dark=True)


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    engine = Engine(nano_settings())
    engine.start()
    yield engine
    engine.stop()


def test_page_compares_what_the_model_answers(nano: Engine, tmp_path: Path) -> None:
    king = "Who is king of Corva?"
    app = Driven(build_app(nano, nano_settings(), None), king)
    with listening_to(app) as url:
        dom_of(f"{url}/driven", tmp_path)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = [
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": king}]
                )
                for model in ("base", "ungated", "routed")
            ]
    assert app.found["texts"] == [answer.choices[0].message.content for answer in alone]
    assert app.found["texts"][2] == "King Gus."
    base, ungated, routed = app.found["about"]
    assert base.startswith("base | ")
    assert ungated.startswith("ungated: ")
    assert re.match(r"routed: islands \d", routed), routed
    assert app.found["models"] == list(nano.models)
    assert re.search(r"stacks \d+\.\d MB \(adapter[\w, ]*\), prompts \d", app.found["memory"])
    check_colours(app.found, is_dark=False)
