"""Close the objects of a JSON schema: small models invent properties until the token limit where
`additionalProperties` is left out, which means `true` in JSON Schema."""

from typing import Any

# Keywords whose values are closed too: lists of schemas, and objects of schemas. Closing a part of
# an allOf, an if or a not would change what the whole means.
_LISTS = ("prefixItems", "anyOf", "oneOf")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
# Beside these, another schema may name properties of the same object.
_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_SET = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Any, every: bool = False) -> Any:
    """A copy with additionalProperties: false in objects with `properties` that do not set it;
    `every`: in all objects that do not set it. What an allOf refers to stays open."""
    return _closed(schema, every, _parts_of_others(schema), "#")


def _closed(schema: Any, every: bool, open_paths: frozenset[str], path: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)

    def close(name: str, part: Any) -> Any:
        return _closed(part, every, open_paths, f"{path}/{name}")

    for name in ("items", "additionalProperties"):
        if name in schema:
            result[name] = close(name, schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [close(f"{name}/{n}", part) for n, part in enumerate(schema[name])]
    for name in _OBJECTS:
        if isinstance(schema.get(name), dict):
            parts = schema[name].items()
            result[name] = {key: close(f"{name}/{key}", part) for key, part in parts}
    names_some = isinstance(schema.get("properties"), dict) and bool(schema["properties"])
    is_object = schema.get("type") == "object" or names_some
    is_fixed = any(name in schema for name in (*_COMPOSED, *_SET)) or path in open_paths
    if is_object and not is_fixed and (every or names_some):
        result["additionalProperties"] = False
    return result


def _parts_of_others(schema: Any) -> frozenset[str]:
    """Targets of references in an allOf, or beside `properties`: parts of a larger object."""
    found: set[str] = set()
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, dict):
            continue
        stack += part.values()
        pieces = part.get("allOf")
        pieces = pieces if isinstance(pieces, list) else []
        refs = [piece.get("$ref") for piece in pieces if isinstance(piece, dict)]
        if "properties" in part:
            refs.append(part.get("$ref"))
        found.update(ref for ref in refs if isinstance(ref, str))
    return frozenset(found)
