"""The web page: formulas become MathML, other text stays text, tasks get checkboxes."""

from __future__ import annotations

from webui_page import PageDriver

TEX = 'xmlns="http://www.w3.org/1998/Math/MathML"'


def tags(html: str) -> str:
    """MathML without the wrapper that every formula has."""
    inside = html.split("<semantics>")[1].split("<annotation")[0]
    return inside.replace(f" {TEX}", "")


def test_common_formulas(tester: PageDriver) -> None:
    for source, expected in [
        ("$x^2$", "<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow>"),
        (r"\(a_{ij} - 1\)", "<msub><mi>a</mi><mrow><mi>i</mi><mi>j</mi></mrow></msub><mo>−</mo>"),
        (
            r"$\frac{1}{n+1}$",
            "<mfrac><mn>1</mn><mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow></mfrac>",
        ),
        (r"$\sqrt[3]{x}$", "<mroot><mi>x</mi><mn>3</mn></mroot>"),
        (r"$\sum_{i=1}^n i$", '<munderover><mo data-limits="" movablelimits="true">∑</mo>'),
        (r"$\int_0^1 f$", "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>"),
        (r"$\alpha \le \mathbb{R}$", '<mi>α</mi><mo>≤</mo><mi mathvariant="normal">ℝ</mi>'),
        (r"$\text{if } x$", "<mtext>if </mtext>"),
        (r"$f''$", "<msup><mi>f</mi><mo>′′</mo></msup>"),
        ("$f(x)$", '<mi>f</mi><mo stretchy="false">(</mo><mi>x</mi><mo stretchy="false">)</mo>'),
        (r"$\left( x \right]$", '<mo stretchy="true" fence="true">(</mo><mi>x</mi>'),
        (
            r"$\begin{pmatrix} a & b \\ c & d \end{pmatrix}$",
            "<mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mi>c</mi></mtd>",
        ),
    ]:
        assert expected in tags(tester.render(source)), source


def test_block_formulas(tester: PageDriver) -> None:
    for source in ("$$\nx\n$$", r"\[x\]", "$$x$$", "Then:\n$$\nx\n$$\nso."):
        html = tester.render(source)
        assert f'<math {TEX} display="block">'.replace(f" {TEX}", "") in html.replace(f" {TEX}", "")
        assert "<mi>x</mi>" in html, source


def test_unsupported_formulas_stay_text(tester: PageDriver) -> None:
    for source in [
        "It costs $5 and not $6.",
        "From $5 to $10 or 20 $ more",
        r"$\unknown{x}$",
        "$}{$",
        r"$\left( x$",
        r"$\constructor$",
        "$" + "{" * 50 + "}" * 50 + "$",
        "$$\nx",
    ]:
        html = tester.render(source)
        assert "<math" not in html, source
        text = source.strip("$").strip()
        assert text.replace("$", "") in html.replace("$", "")


def test_formulas_and_tasks_render_the_same_in_pieces(tester: PageDriver) -> None:
    source = (
        "Say $x^2$ or \\(y\\) and $5.\n\n$$\n\\frac{a}{b}\n$$\n\n\\[ c \\]\n\n"
        "- [ ] to do with $z$\n- [x] done\n- [link](https://example.org)\n- [\n"
        "\n$$d$$ begins a line.\n"
    )
    whole = tester.render(source)
    for size in (1, 2, 3, 5, 9, 30):
        assert tester.render(source, size) == whole, size


def test_tasks_have_checkboxes(tester: PageDriver) -> None:
    html = tester.render("- [ ] first\n- [x] **second**\n- [y] third\n")
    assert html.count('type="checkbox"') == 2
    assert 'aria-label="to do"><p>first</p>' in html
    assert 'aria-label="done"><p><strong>second</strong></p>' in html
    assert "<li><p>[y] third</p></li>" in html


def test_formula_parsing_time_is_bounded(tester: PageDriver) -> None:
    for part in ("$a ", "\\(", "$\\frac{", "$$x", "{", "x^", "\\left(", "\\begin{matrix} a & "):
        assert tester.render(part * 1500, 400)
        assert tester.render(f"${part * 300}$")
