"""The web page: text is never parsed as HTML, and the content security policy is strict."""

from __future__ import annotations

import re

from webui_fake_server import WEBUI, FakeServer, Reply
from webui_page import PageDriver

CORPUS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg/onload=window.hacked=1><animate onbegin=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<style>*{background:url(//evil.example)}</style><link rel=stylesheet href=//evil.example>",
    "<a href='javascript:window.hacked=1'>x</a><form action=javascript:hacked=1><button>",
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt&colon;window.hacked=1) [x](\x01javascript:hacked=1) [x](java\tscript:hacked=1)",
    "[x](data:text/html;base64,PHNjcmlwdD5oYWNrZWQ9MTwvc2NyaXB0Pg==) [x](vbscript:x) [x](file:///etc)",
    "[x](//evil.example) [x](/v1/models) [x](blob:https://x/1)",
    '[x](https://a.example/"onmouseover="window.hacked=1)',
    '[x](https://a.example/ "t" onclick=hacked=1)',
    "![x](javascript:window.hacked=1) ![x](https://evil.example/pixel.png)",
    "[<img src=x onerror=hacked=1>](https://a.example) **<b onclick=hacked=1>x</b>**",
    "<https://a.example/\"onclick=hacked=1> <javascript:hacked=1>",
    "`<img src=x onerror=hacked=1>`",
    "```<img src=x onerror=hacked=1>\n<script>hacked=1</script>\n```",
    '```js" onclick="hacked=1\n</code></pre><script>hacked=1</script>\n```',
    "| <img src=x onerror=hacked=1>|b|\n|--|--|\n| <script>hacked=1</script> | [y](javascript:1)|",
    "# <script>hacked=1</script>\n> <img src=x onerror=hacked=1>\n- <svg onload=hacked=1>",
    "<think><img src=x onerror=hacked=1></think><script>hacked=1</script>",
    "</think><script>hacked=1</script>",
    "&lt;script&gt;hacked=1&lt;/script&gt; &#x3c;img src=x onerror=hacked=1&#x3e;",
    "__proto__ constructor {{constructor.constructor('hacked=1')()}} ${hacked=1}",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img onerror=hacked=1>'>",
    "\u202e<script>hacked=1</script>\u2066 \x00<script\x00>hacked=1</script>",
]  # fmt: skip
ALLOWED = {
    "p": [], "br": [], "em": [], "strong": [], "del": [], "code": [], "span": ["class"], "hr": [],
    "h1": [], "h2": [], "h3": [], "ul": [], "ol": ["start"], "li": [], "blockquote": [],
    "a": ["href", "rel", "target", "title"], "pre": ["aria-label", "tabindex"], "summary": [],
    "div": ["class", "tabindex", "role", "aria-label"], "details": ["class", "open"], "table": [],
    "thead": [], "tbody": [], "tr": [], "th": ["class", "scope"], "td": ["class"],
    "button": ["aria-label", "class", "title", "type"], "svg": ["aria-hidden", "class", "viewBox"],
    "path": ["class", "d"],
}  # fmt: skip


def test_model_and_user_text_is_never_parsed_as_html(tester: PageDriver, fake: FakeServer) -> None:
    page = tester.page
    for payload in CORPUS:
        for size in (1, 1000):
            question = payload.replace("\x00", "").strip()
            fake.replies[question] = Reply.of(payload, size)
            tester.ask(question)
            assert tester.stored()[0]["messages"][-1]["content"] == payload
            page.locator(".thoughts").evaluate_all(
                "all => all.forEach((one) => { one.open = true })"
            )
    tester.see("#send")
    found = page.evaluate(
        """() => [...document.querySelectorAll('.answer *, .bubble *, #chats *')].map((e) =>
             [e.localName, [...e.attributes].map((a) => a.name), e.getAttribute('href')])"""
    )
    assert len(found) > 200
    chats = {"section": [], "h2": [], "ul": [], "li": ["class", "data-id"], "span": ["class"],
             "button": ["aria-label", "class", "title", "type", "aria-current"]}  # fmt: skip
    for name, attributes, href in found:
        allowed = {*ALLOWED.get(name, ["-"]), *chats.get(name, [])}
        assert name in ALLOWED or name in chats, name
        assert set(attributes) <= allowed, (name, attributes)
        assert href is None or href.startswith(("https://", "http://")), href
    page.mouse.move(600, 400)
    page.locator(".answer a").first.hover()
    assert page.evaluate("typeof window.hacked") == "undefined"
    tester.page.reload()
    tester.see(".message")
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_policy_forbids_inline_code_and_html_strings(tester: PageDriver, fake: FakeServer) -> None:
    response = tester.page.request.get(fake.url)
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    broken = tester.page.evaluate(
        """() => new Promise((resolve) => {
          const seen = [];
          const note = (e) => seen.push(e.effectiveDirective);
          document.addEventListener('securitypolicyviolation', note);
          const element = document.createElement('p');
          element.setAttribute('style', 'color: red');
          const attempts = [() => { element.innerHTML = '<b onclick="hacked=1">x</b>'; },
            () => element.setAttribute('onclick', 'window.hacked = 1'),
            () => { document.createElement('script').text = 'window.hacked = 1'; }];
          for (const attempt of attempts) try { attempt(); } catch { seen.push('thrown'); }
          document.body.append(element);
          element.click();
          setTimeout(() => resolve([seen, typeof window.hacked]), 50);
        })"""
    )
    tester.problems.clear()  # the browser logs each violation
    assert broken[1] == "undefined"
    assert broken[0].count("thrown") == 3 and "style-src-attr" in broken[0]
    source = "".join(path.read_text() for path in WEBUI.glob("*.*"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bstyle=\"", source
    )
