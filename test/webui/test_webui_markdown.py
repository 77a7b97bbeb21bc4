"""The web page: incremental Markdown rendering and its cost."""

from __future__ import annotations

import re

from markdown_sample import DOCUMENT
from webui_fake_server import FakeServer, Gate, Reply
from webui_page import PageDriver


def test_markdown(tester: PageDriver) -> None:
    html = tester.render(DOCUMENT)
    for part in (
        "<h1>Title with <code>code</code></h1>",
        "<strong>bold</strong>, <em>italic</em>, <em><strong>both</strong></em>, <del>gone</del>, "
        "snake_case_names and 2 * 3 * 4.<br>Next line.",
        'href="https://example.org/a_b?c=1&amp;d=(2)"',
        'href="https://example.net/x"',
        "<li><p>two</p><ul><li><p>deeper <strong>x</strong></p><ol><li><p>deepest</p></li></ol>",
        "<li><p>three</p><p>with a second paragraph</p></li>",
        '<ol start="3"><li><p>counted from three</p></li><li><p>on</p></li></ol>',
        "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote><ul><li><p>and a list</p>",
        '<th scope="col">Left</th><th class="right" scope="col">Right</th>',
        '<td>a</td><td class="right">1</td><td class="center"><code>x | y</code></td>',
        "<td>b | c</td>",
        '<span class="tok-k">def</span> <span class="tok-f">f</span>',
        '<span class="tok-c"># comment</span>',
        "<hr>",
        "Trailing *unfinished **text with a [link](https://",
    ):
        assert part in html, part
    assert re.search(
        r"item with code:</p><div class=\"code\">.*echo.*</div></li><li><p>after", html, re.S
    )


def test_markdown_renders_the_same_in_pieces(tester: PageDriver) -> None:
    long = " ".join(f"word{i} **bold {i}** `code_{i}`" for i in range(300))
    awkward = "a `b ** c` *d* _e_ [f](g h) ![i](https://j.k/l) \\*m\\* <br>n * o\n" * 3
    edges = (
        "- \n- a\n\n\n1) b\n#\n##x\n| a\n|-\n",
        "x\n---\ny\r\nz\r\n",
        "+a\n-\n--\n*\n**\n_x\n12\n",
    )
    for source in (DOCUMENT, long, awkward, *edges):
        whole = tester.render(source)
        for size in (1, 2, 3, 7, 40):
            assert tester.render(source, size) == whole, (size, source[:40])


def test_markdown_parsing_time_is_bounded(tester: PageDriver) -> None:
    """Each input would time out if the cost of a paragraph were exponential."""
    for part in (
        "*a `b` ",
        "**a \\* `",
        "[a [b] `c` ",
        "_a *b ",
        "`a ``b ",
        "![x](",
        "| `a \\| ",
        "~~a ",
    ):
        assert tester.render(part * 1000)
        assert tester.render("- > " * 200 + part * 200, 100)


def test_thinking_tags_are_collapsed(tester: PageDriver, fake: FakeServer) -> None:
    gate = Gate()
    fake.replies["q"] = Reply.of("<think>\nHm, **well**.\n</think>\n\nForty-two.", 3, gate=gate)
    tester.ask("q", wait=False)
    gate.release(8)
    tester.see(".thoughts summary", "Thinking")
    assert not tester.page.locator(".thoughts-text").is_visible()
    gate.open()
    tester.idle()
    tester.see(".thoughts summary", "Thoughts")
    assert tester.page.locator(".answer > .prose").inner_text() == "Forty-two."
    tester.page.click(".thoughts summary")
    assert tester.page.locator(".thoughts-text").inner_text() == "Hm, well."
    fake.replies["half"] = Reply.of("Let me see.\n</think>\nYes. A `</think>` here stays.", 3)
    tester.ask("half")
    assert tester.page.locator(".answer").last.locator("> .prose").inner_text() == (
        "Yes. A </think> here stays."
    )


def test_cost_per_token_does_not_grow_with_the_answer(tester: PageDriver, fake: FakeServer) -> None:
    """The cost is the number of DOM changes, for each kind of block that can grow."""
    kinds = {
        "paragraphs": "".join(f"Some words **{i}** of a paragraph.\n\n" for i in range(400)),
        "one paragraph": " ".join(f"word {i} and `code` or *more*," for i in range(500)),
        "code": "```python\n" + "".join(f"x{i} = f({i}, 'a')  # {i}\n" for i in range(500)),
        "list": "".join(f"- item **{i}** of many\n" for i in range(500)),
        "table": "| a | b |\n|--|--|\n" + "".join(f"| {i} | *{i}* |\n" for i in range(500)),
    }
    for kind, source in kinds.items():
        costs = tester.page.evaluate(
            """async (source) => {
              const { Answer } = await import('./answer.js');
              const root = document.createElement('div');
              document.body.append(root);
              const answer = new Answer(root);
              const observer = new MutationObserver(() => {});
              const options = { childList: true, characterData: true, subtree: true };
              observer.observe(root, options);
              const costs = [];
              for (let i = 0; i < source.length; i += 4) {
                answer.push(source.slice(i, i + 4));
                costs.push(observer.takeRecords().reduce((sum, { addedNodes, removedNodes }) =>
                  sum + 1 + addedNodes.length + removedNodes.length, 0));
              }
              root.remove();
              return costs;
            }""",
            source,
        )
        tenth = len(costs) // 10
        early, late = costs[tenth : 2 * tenth], costs[-tenth:]
        assert max(late) <= max(early) + 10, kind
        assert sum(late) <= 1.2 * sum(early) + 10, kind
        assert max(costs) < 250, (kind, max(costs))
