"""The web page: tools of MCP servers, with a small MCP server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mcp_server import McpServer
from webui_fake_server import WEBUI, FakeServer, Reply
from webui_page import PageDriver

from llaisys.common.errors import InvalidInputError
from llaisys.server.config import ServerConfig
from llaisys.server.http.webui import CSP, WebUi

CHAT = "/v1/chat/completions"


def call(name: str, arguments: str, index: int = 0) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    one = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
    return {"tool_calls": [one]}


@pytest.fixture
def mcp(tester: PageDriver, fake: FakeServer) -> Iterator[McpServer]:
    server = McpServer(fake.url.rstrip("/"))
    fake.mcp_origins = [server.origin]
    tester.other_origins = (server.origin,)
    tester.page.reload()
    yield server
    server.shutdown()


def choose(tester: PageDriver, mcp: McpServer, *names: str) -> None:
    """Enter the URL of the server and allow tools."""
    page = tester.page
    page.click("#settings-open")
    page.fill("#mcp-urls", f"{mcp.origin}/mcp")
    page.locator("#mcp-urls").blur()
    for name in names:
        page.locator(".mcp-tool", has_text=name).get_by_role("checkbox").check()
        tester.see(f".mcp-tool:has-text('{name}') input:checked")
    page.keyboard.press("Escape")


def test_allowed_tool_is_called_after_consent(
    tester: PageDriver, fake: FakeServer, mcp: McpServer
) -> None:
    page = tester.page
    choose(tester, mcp, "add")
    assert [method for method, _ in mcp.requests[:3]] == [
        "initialize",
        "notifications/initialized",
        "tools/list",
    ]
    fake.replies["2 + 3?"] = [
        Reply([call("add", '{"a": 2, "b": 3}')], finish="tool_calls"),
        Reply(["It is five."]),
    ]
    tester.ask("2 + 3?")
    (tool,) = fake.bodies(CHAT)[0]["tools"]
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["properties"] == {"a": {"type": "number"}}
    tester.see(".cut", f"Run add ({mcp.origin.removeprefix('http://')}) with these arguments?")
    assert '"b": 3' in page.locator(".calls").inner_text()  # arguments are shown before
    assert "tools/call" not in [method for method, _ in mcp.requests]  # no call without consent
    page.reload()
    page.get_by_role("button", name="Run").click()
    tester.until_answer("It is five.")
    tester.idle()
    assert mcp.requests[-1] == ("tools/call", {"name": "add", "arguments": {"a": 2, "b": 3}})
    assert fake.bodies(CHAT)[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "<b>5</b>"},
    ]
    page.click(".calls summary")
    assert page.locator(".calls .result").inner_text() == "<b>5</b>"  # text, not HTML
    assert all("Authorization" not in h and "Cookie" not in h for h in mcp.headers)


def test_errors_of_tools_and_unknown_tools(
    tester: PageDriver, fake: FakeServer, mcp: McpServer
) -> None:
    choose(tester, mcp, "fail")
    pieces = [call("fail", "{}"), call("add", "{}", 1)]  # "add" is not allowed
    fake.replies["q"] = [Reply(list(pieces), finish="tool_calls"), Reply(["Sorry."])]
    tester.expected_errors = 1  # the forgotten session
    mcp.session = "session-2"
    tester.ask("q")
    tester.page.get_by_role("button", name="Run").click()
    tester.until_answer("Sorry.")
    tester.idle()
    results = [m["content"] for m in fake.bodies(CHAT)[1]["messages"] if m["role"] == "tool"]
    assert results == ["Error: no luck", "Error: this tool is not allowed."]
    called = [params["name"] for method, params in mcp.requests if method == "tools/call"]
    assert set(called) == {"fail"}


def test_failed_answer_after_a_tool_can_be_tried_again(
    tester: PageDriver, fake: FakeServer, mcp: McpServer
) -> None:
    choose(tester, mcp, "add")
    fake.replies["q"] = [
        Reply([call("add", '{"a": 1, "b": 1}')], finish="tool_calls"),
        Reply([], status=500, error="broken"),
        Reply(["Two."]),
    ]
    tester.expected_errors = 1
    tester.ask("q")
    tester.page.get_by_role("button", name="Run").click()
    tester.see(".failure", "broken")
    tester.page.get_by_role("button", name="Try again").click()
    tester.until_answer("Two.")
    tester.idle()
    assert [method for method, _ in mcp.requests].count("tools/call") == 1


def test_without_the_option_there_are_no_tools(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    page.click("#settings-open")
    assert not page.locator("#mcp-urls").is_visible()
    page.keyboard.press("Escape")
    fake.replies["q"] = Reply([call("add", "{}")], finish="tool_calls")
    tester.ask("q")
    assert "tools" not in fake.bodies(CHAT)[0]
    assert page.get_by_role("button", name="Run").count() == 0


def test_policy_permits_the_given_origins_only() -> None:
    assert "connect-src 'self';" in CSP and WebUi(WEBUI).headers["Content-Security-Policy"] == CSP
    page = WebUi(WEBUI).assets["/"].content.decode()
    assert page == (WEBUI / "index.html").read_text()
    given = ("https://mcp.example", "http://127.0.0.1:9000")
    webui = WebUi(WEBUI, ServerConfig(mcp_origins=given).mcp_origins)
    expected = "connect-src 'self' https://mcp.example http://127.0.0.1:9000;"
    page = webui.assets["/"].content.decode()
    assert expected in webui.headers["Content-Security-Policy"] and expected in page
    assert '<meta name="mcp-origins" content="https://mcp.example http://127.0.0.1:9000">' in page


@pytest.mark.parametrize(
    "origin", ["*", "mcp.example", "https://a.example/mcp", "https://a;script-src *", "http://a b"]
)
def test_invalid_origins_are_rejected(origin: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ServerConfig(mcp_origins=(origin,))
    assert caught.value.field == "mcp_origins"
