"""Random JSON schemas of the families that structured output promises to keep, from a seed."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][0-9]{3}$", "^(red|green|blue)-[0-9]+$", "^a?b+c{1,3}$")
Schema = dict[str, Any]


class SchemaMaker:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self, depth: int = 3) -> Schema:
        """An object at the top, as clients have it; sometimes with definitions."""
        if self.rng.random() < 0.15:
            inner = self.object(depth - 1)
            link = {"$ref": "#/$defs/part"}
            return {
                "$defs": {"part": inner},
                "type": "object",
                "properties": {"one": link, "many": {**self.bounds(), "items": link}},
                "required": ["one"],
                "additionalProperties": False,
            }
        return self.object(depth)

    def any(self, depth: int) -> Schema:
        leaves = [self.string, self.integer, self.number, self.enum, self.const, self.simple]
        if depth <= 0 or self.rng.random() < 0.5:
            return self.rng.choice(leaves)()
        return self.rng.choice([self.object, self.array, self.tuple, self.any_of])(depth - 1)

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(["id", "name", "größe", "a b", 'q"uote', "x/y", "列", "n0"], 4)
        names = names[: self.rng.randint(1, 4)]
        schema: Schema = {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
            "required": [name for name in names if self.rng.random() < 0.7],
            "additionalProperties": False,
        }
        if self.rng.random() < 0.1:
            schema["additionalProperties"] = {"type": "boolean"}
            schema["maxProperties"] = len(names) + 1
            del schema["maxProperties"]
        return schema

    def bounds(self) -> Schema:
        low = self.rng.randint(0, 2)
        return {"type": "array", "minItems": low, "maxItems": low + self.rng.randint(0, 2)}

    def array(self, depth: int) -> Schema:
        return {**self.bounds(), "items": self.any(depth - 1)}

    def tuple(self, depth: int) -> Schema:
        items = [self.any(depth - 1) for _ in range(self.rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth - 1) for _ in range(self.rng.randint(2, 3))]}

    def string(self) -> Schema:
        kind = self.rng.random()
        if kind < 0.3:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": self.rng.choice(["date", "uuid", "ipv4"])}
        low = self.rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 12)}

    def integer(self) -> Schema:
        low = self.rng.randint(-1000, 1000)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + 5000}
        if self.rng.random() < 0.3:
            schema = {"type": "integer", "exclusiveMinimum": 0, "maximum": 100, "multipleOf": 5}
        return schema

    def number(self) -> Schema:
        return {"type": "number", "minimum": -10, "maximum": self.rng.choice([10, 99.5])}

    def enum(self) -> Schema:
        return {"enum": self.rng.sample(["a", "b c", 'd"', 1, 2.5, True, None, "é"], 3)}

    def const(self) -> Schema:
        return {"const": self.rng.choice(["fixed", 7, None, [1, "x"], {"k": False}])}

    def simple(self) -> Schema:
        return {"type": self.rng.choice([["boolean", "null"], "boolean", "null"])}
