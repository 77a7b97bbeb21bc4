"""A metered jinja2 sandbox that bounds the time and memory of hostile chat templates.

A thread cannot be killed, so the limits are built into the template:

- the syntax tree is rewritten so that every loop iteration, macro call, comparison, concatenation
  and output passes through a `Meter`, which counts steps, CPU time and characters;
- every operation that can create a large value (`*`, `+`, `**`, `%`, joins, replaces, filters,
  methods) is checked against the size limit before it runs;
- only filters and methods whose cost is bounded by their operands are available.

The work between two checks of the clock is bounded by the size limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llaisys.tokenization.render_limits import NODE_COST, LimitExceeded, Meter, active_meter

MAX_NODES = 4_000
MAX_TAGS = 2_000  # {{ and {%: at least two nodes each
MAX_DEPTH = 80  # of nested nodes; real templates have less than half
_MAX_INT_BITS = 4096

# Filters whose cost does not depend on the contents of their operand.
_SHALLOW_FILTERS = ("count", "d", "default", "first", "last", "length", "list", "reverse", "safe")
_DEEP_FILTERS = (
    *("abs", "attr", "capitalize", "dictsort", "e", "escape", "float", "groupby", "int", "items"),
    *("join", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "round", "select"),
    *("selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper", "wordcount"),
    *("indent", "truncate", "sum"),
)
_STR_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper".split()
)
_CONTAINER_METHODS = frozenset("copy count get index items keys values".split())


def _step() -> Meter:
    """The meter of the render, which has counted a step."""
    meter = active_meter()
    meter.touch()
    return meter


def _check_replace(meter: Meter, text: str, old: object, new: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        meter.size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(meter: Meter, separator: object, items: object) -> object:
    """Check the joined size; return the items (an iterator becomes a list)."""
    if not isinstance(items, (str, list, tuple, Mapping)):
        items = _bounded_list(meter, items)
    count = len(items)
    meter.size(meter.measure(items) + count * meter.measure(separator))
    return items


def _bounded_list(meter: Meter, items: Any) -> list[Any]:
    result = []
    for item in items:
        meter.touch()
        result.append(item)
        meter.size(len(result) * NODE_COST)
    return result


def guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with size checks of its operands and its result."""
    first = 1 if getattr(function, "jinja_pass_arg", None) else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        meter = _step()
        values = list(args)
        if name not in _SHALLOW_FILTERS:
            meter.measure(*values[first:], *kwargs.values())
        if name == "join" and len(values) > first:
            separator = kwargs.get("d", values[first + 1] if len(values) > first + 1 else "")
            values[first] = _check_join(meter, separator, values[first])
        elif name == "replace" and len(values) > first + 2:
            _check_replace(meter, str(values[first]), values[first + 1], values[first + 2])
        elif name in _MAX_ARGUMENT:
            _check_arguments(name, [*values[first + 1 :], *kwargs.values()])
        elif name == "sum" and not isinstance(_sum_start(values[first:], kwargs), (int, float)):
            raise SecurityError("the filter 'sum' adds numbers only in chat templates")
        result = function(*values, **kwargs)
        if isinstance(result, (str, list, tuple, dict)):
            meter.size(len(result))
        return result

    return guarded


# Limit of integer values and string lengths in arguments (widths, precisions).
_MAX_ARGUMENT = {"indent": 64, "round": 64, "tojson": 8}


def _check_arguments(name: str, values: list[Any]) -> None:
    limit = _MAX_ARGUMENT[name]
    for value in values:
        size = value if isinstance(value, int) else len(value) if isinstance(value, str) else 0
        if abs(size) > limit:
            raise LimitExceeded(f"{name!r} with an argument of {size} (limit {limit})")


def _sum_start(values: list[Any], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("start", values[2] if len(values) > 2 else 0)


def guard_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        meter = _step()
        if len(args) > 1:
            meter.measure(*args)
        return function(*args, **kwargs)

    return guarded


class _Instrument(NodeTransformer):
    """Inserts calls of `MeterExtension` into a parsed template."""

    def __init__(self, extension: MeterExtension) -> None:
        self.extension = extension

    def _call(self, method: str, args: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
        target = nodes.ExtensionAttribute(self.extension.identifier, method)
        call = nodes.Call(target, args, [], None, None)
        for part in (call, target):
            part.set_lineno(node.lineno)
            part.set_environment(self.extension.environment)
        return call

    def _metered_body(self, node: Any) -> Any:
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = nodes.ExprStmt(self._call("tick", [nodes.Const(literal)], node))
        tick.set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node

    visit_For = _metered_body
    visit_Macro = _metered_body
    visit_CallBlock = _metered_body
    visit_Block = _metered_body

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else self._call("write", [child], child)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("concat", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._call("compared", [node.expr], node)
        for operand in node.ops:
            operand.expr = self._call("compared", [operand.expr], node)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("hashed", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("hashed", [node], node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("touched", [node], node)

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("chat templates cannot switch autoescape")


class MeterExtension(Extension):
    """The functions that the instrumented template calls, and the `generation` tag."""

    tags = {"generation"}  # noqa: RUF012 (declared by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """`{% generation %}` marks assistant text for training; replace it by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, literal_chars: int) -> None:
        meter = _step()
        meter.output(literal_chars)

    def write(self, value: Any) -> Any:
        meter = _step()
        if not isinstance(value, str):
            if isinstance(value, Undefined):
                return value
            meter.measure(value)
            value = str(value)
        meter.output(len(value))
        return value

    def concat(self, *values: Any) -> str:
        meter = _step()
        meter.measure(*values)
        return "".join(map(str, values))

    def compared(self, value: Any) -> Any:
        meter = _step()
        if isinstance(value, (list, tuple, Mapping)):
            meter.measure(value)
        return value

    def hashed(self, value: Any) -> Any:
        meter = _step()
        meter.measure(value)
        return value

    def touched(self, value: Any) -> Any:
        _step()
        return value


def _check_size(tree: nodes.Template) -> None:
    count = 0
    open_nodes: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while open_nodes:
        node, depth = open_nodes.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise SecurityError(f"a template nested more than {MAX_DEPTH} deep")
        open_nodes.extend((child, depth + 1) for child in node.iter_child_nodes())
    if count > MAX_NODES:
        raise SecurityError(f"a template of {count} syntax nodes (limit {MAX_NODES})")


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with Hugging Face's settings and the meter in every operation."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is evaluated at compile time
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", MeterExtension],
        )
        self.globals.pop("lipsum", None)
        names = (*_SHALLOW_FILTERS, *_DEEP_FILTERS)
        self.filters = {name: guard_filter(name, self.filters[name]) for name in names}
        self.tests = {name: guard_test(cast(Any, test)) for name, test in self.tests.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = guard_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tags = source.count("{{") + source.count("{%")
        if tags > MAX_TAGS:  # bounds the time to parse and compile
            raise SecurityError(f"a template of {tags} tags (limit {MAX_TAGS})")
        tree = super()._parse(source, name, filename)
        _check_size(tree)
        extension = self.extensions[MeterExtension.identifier]
        assert isinstance(extension, MeterExtension)
        result = _Instrument(extension).visit(tree)
        assert isinstance(result, nodes.Template)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _step()
        if operator == "*":
            _check_product(meter, left, right)
        elif operator == "+" and not isinstance(left, (int, float)):
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                cost = 1 if isinstance(left, str) else NODE_COST
                meter.size((len(left) + len(right)) * cost)
        elif operator == "**":
            both = isinstance(left, int) and isinstance(right, int)
            if both and left.bit_length() * abs(right) > _MAX_INT_BITS:
                raise LimitExceeded("a power of more than 4096 bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            meter.size(len(left) + left.count("%") * meter.measure(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict)):
            name = getattr(obj, "__name__", "")
            allowed = _STR_METHODS if isinstance(owner, str) else _CONTAINER_METHODS
            if name not in allowed:
                raise SecurityError(f"the method {name!r} is not available in chat templates")
            args = _check_method(meter, owner, name, args)
        return super().call(context, obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)
        inner = wrapped

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            meter = active_meter()
            _check_format(template)
            if re.search(r"\{[^{}]*\{", template.replace("{{", "")):
                raise LimitExceeded("a nested format field")
            meter.size(len(template) + template.count("{") * meter.measure(args, kwargs))
            return inner(*args, **kwargs)

        return bounded_format


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitExceeded("a product of more than 4096 bits")
        return
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            cost = 1 if isinstance(sequence, str) else NODE_COST
            meter.size(len(sequence) * max(count, 0) * cost)


def _check_format(text: str) -> None:
    """Reject widths and precisions of four or more digits, and widths from arguments."""
    if re.search(r"[0-9]{4}", text) or re.search(r"%[^a-zA-Z%]*\*", text):
        raise LimitExceeded("a format width of more than 3 digits")


def _check_method(meter: Meter, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(owner, str):
        if name == "replace" and len(args) >= 2:
            _check_replace(meter, owner, args[0], args[1])
        elif name == "join" and len(args) == 1:
            args = (_check_join(meter, owner, args[0]),)
        elif name in ("split", "rsplit", "splitlines"):
            separator = args[0] if args and isinstance(args[0], str) and args[0] else None
            pieces = len(owner) // 2 if separator is None else owner.count(separator)
            meter.size(pieces * NODE_COST // 8)
    elif name in ("count", "index"):
        meter.measure(owner, *args)
    return args
