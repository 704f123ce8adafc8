"""Schemas that a grammar must enforce to the letter: each keyword alone, in company, and at work.

Strings that nothing else bounds have a maxLength, so that a model at a high temperature gets to
an end.
"""

from __future__ import annotations

from typing import Final

Schema = dict[str, object] | bool

TEXT: Final[Schema] = {"type": "string", "maxLength": 20}
INTEGER: Final[Schema] = {"type": "integer"}
NULL: Final[Schema] = {"type": "null"}
COLOUR: Final[Schema] = {"enum": ["red", "green", "blue"]}


def closed(properties: dict[str, object], *required: str, **more: object) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
        **more,
    }


TYPES: Final[dict[str, Schema]] = {
    "null": NULL,
    "boolean": {"type": "boolean"},
    "integer": INTEGER,
    "number": {"type": "number"},
    "list of types": {"type": ["integer", "null", "boolean"]},
    "integer or number": {"type": ["integer", "number"]},
    "empty array": {"type": "array", "maxItems": 0},
    "no properties": {"type": "object", "properties": {}},
    "one value": {"const": {"a": [1, None, "x"]}},
    "const string": {"const": 'quote " and \\ and / and \n and é'},
    "const number": {"const": 1.5},
    "const of its type": {"type": "integer", "const": 7},
    "enum": {"enum": ["a", "b", 3, None, True, [1], {"k": "v"}]},
    "enum of numbers": {"type": "number", "enum": [1, 1.5, -2e30]},
    "enum by type": {"type": "string", "enum": ["a", 1, None, "b"]},
    "enum by bound": {"enum": [1, 5, 9, 13], "minimum": 4, "maximum": 10},
    "enum by pattern": {"enum": ["apple", "banana", "cherry"], "pattern": "an"},
    "enum by length": {"enum": ["a", "bb", "ccc"], "minLength": 2},
    "enum and const": {"enum": [1, 2, 3], "const": 2},
    "enum with escapes": {"enum": ["tab\t", "nul\x00", "\x7f", "\u2028", "</tag>", "\\u0041"]},
    "large enum": {"enum": [f"value number {i * 7919 % 1000}" for i in range(1000)]},
}

NUMBERS: Final[dict[str, Schema]] = {
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -3},
    "between": {"type": "integer", "minimum": -5, "maximum": 1234},
    "digit": {"type": "integer", "minimum": 0, "maximum": 9},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "integer within fractions": {"type": "integer", "minimum": 1.5, "maximum": 3.5},
    "large integers": {"type": "integer", "minimum": 10**17, "maximum": 10**17 + 50},
    "number minimum": {"type": "number", "minimum": 0},
    "number maximum": {"type": "number", "maximum": 99.5},
    "number between": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 10},
    "probability": {"type": "number", "minimum": 0, "maximum": 1},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "narrow interval": {"type": "number", "minimum": 0.1, "maximum": 0.10001},
    "tiny interval": {"type": "number", "exclusiveMinimum": 1e-9, "maximum": 2e-9},
    "one number": {"type": "number", "minimum": 2.5, "maximum": 2.5},
    "latitude": {"type": "number", "minimum": -90, "maximum": 90},
    "beyond floats' integers": {"type": "number", "minimum": -1e300, "maximum": 1e300},
    "multiple": {"type": "integer", "multipleOf": 7},
    "multiple between": {"type": "integer", "multipleOf": 5, "minimum": 12, "maximum": 99},
    "large multiple": {"type": "integer", "multipleOf": 1000},
    "number of whole multiples": {"type": "number", "multipleOf": 3, "minimum": 0},
    "halves": {"type": "number", "multipleOf": 0.5, "minimum": -10, "maximum": 10},
    "multiple of two and a half": {"type": "integer", "multipleOf": 2.5},
    "bound without a type": {"minimum": 5, "type": ["number", "null"]},
    "two bounds": {"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 9},
}

STRINGS: Final[dict[str, Schema]] = {
    "maxLength": {"type": "string", "maxLength": 5},
    "exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "no characters": {"type": "string", "maxLength": 0},
    "between lengths": {"type": "string", "minLength": 4, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,8}$"},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 12},
    "pattern at the start": {"type": "string", "pattern": "^Mr ", "maxLength": 12},
    "pattern at the end": {"type": "string", "pattern": "[.!]$", "maxLength": 12},
    "pattern of choices": {"type": "string", "pattern": "^(?:cat|dog|b(?:ir|oar)d)s?$"},
    "anchor in a choice": {"type": "string", "pattern": "^a$|^b{2}$"},
    "pattern with quotes": {"type": "string", "pattern": '^"[^"\\\\]{1,4}"$'},
    "pattern with backslashes": {"type": "string", "pattern": r"^[A-Z]:\\[a-z]{1,5}\\?$"},
    "pattern of controls": {"type": "string", "pattern": r"^a\tb\n\x01$"},
    "dots": {"type": "string", "pattern": "^.{2,4}$"},
    "negated class": {"type": "string", "pattern": "^[^a-z]{1,6}$"},
    "word class": {"type": "string", "pattern": r"^\w{1,6}\W\s\S\d\D$"},
    "phone": {"type": "string", "pattern": r"^\+?[0-9]{1,3}[- ][0-9]{3}-[0-9]{4}$"},
    "lazy repeats": {"type": "string", "pattern": "^a+?b*?c??$", "maxLength": 9},
    "unicode pattern": {"type": "string", "pattern": "^[а-я]{1,5}[αβγ]\\u00e9$"},
    "pattern and length": {
        "type": "string",
        "pattern": "^(?:ab)+$",
        "minLength": 3,
        "maxLength": 7,
    },
    "pattern and minLength": {"type": "string", "pattern": "^[a-f]{1,9}$", "minLength": 6},
    "two patterns": {"allOf": [{"pattern": "^[ab]{1,6}$"}, {"pattern": "aa"}], "type": "string"},
    "slow pattern": {"type": "string", "pattern": "^([a-c]*)*d$", "maxLength": 15},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email", "maxLength": 25},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 30},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri", "maxLength": 20},
    "uri-reference": {"type": "string", "format": "uri-reference", "maxLength": 14},
    "json-pointer": {"type": "string", "format": "json-pointer", "maxLength": 20},
    "relative-json-pointer": {"type": "string", "format": "relative-json-pointer", "maxLength": 20},
    "format and pattern": {"type": "string", "format": "date", "pattern": "^20[0-9]{2}-0"},
    "format and length": {"type": "string", "format": "ipv4", "maxLength": 8},
}

ARRAYS: Final[dict[str, Schema]] = {
    "items": {"type": "array", "items": {"type": "boolean"}},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
    "maxItems": {"type": "array", "items": NULL, "maxItems": 2},
    "counted": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "exactly one": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1},
    "many": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 20, "maxItems": 60},
    "prefixItems": {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}]},
    "prefix and items": {"prefixItems": [NULL], "items": COLOUR, "type": "array", "maxItems": 4},
    "prefix and minItems": {"type": "array", "prefixItems": [NULL, COLOUR], "minItems": 2},
    "prefix and nothing else": {"type": "array", "prefixItems": [COLOUR], "items": False},
    "no items": {"type": "array", "items": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [NULL], "unevaluatedItems": COLOUR},
    "unique": {"type": "array", "items": COLOUR, "uniqueItems": True},
    "unique and counted": {
        "type": "array",
        "items": {"enum": ["a", "b", "c", "d"]},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 3,
    },
    "unique booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "contains": {"type": "array", "items": {"enum": [1, 2, 3]}, "contains": {"const": 2}},
    "contains twice": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 20},
        "contains": {"minimum": 15},
        "minContains": 2,
        "maxItems": 5,
    },
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2},
        "maxItems": 3,
    },
    "array or null": {"type": ["array", "null"], "items": COLOUR, "maxItems": 3},
    "items without a type": {
        "type": "array",
        "items": {"minimum": 3, "maxLength": 3, "maxItems": 1, "maxProperties": 0},
        "maxItems": 3,
    },
}

OBJECTS: Final[dict[str, Schema]] = {
    "optional properties": {"type": "object", "properties": {"a": NULL, "b": INTEGER, "c": COLOUR}},
    "required": {"type": "object", "properties": {"a": NULL, "b": NULL}, "required": ["b"]},
    "required but unnamed": {
        "type": "object",
        "required": ["zip"],
        "properties": {"a": NULL},
        "additionalProperties": COLOUR,
    },
    "required alone": {"type": "object", "required": ["a", "b"], "additionalProperties": INTEGER},
    "additional": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "properties and additional": {
        "type": "object",
        "properties": {"a": NULL, "ab": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": INTEGER,
    },
    "additional of any kind": {
        "type": "object",
        "properties": {"id": INTEGER},
        "additionalProperties": True,
        "maxProperties": 2,
    },
    "forbidden": {"type": "object", "properties": {"a": False, "b": NULL}},
    "minProperties": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL, "c": NULL},
        "minProperties": 2,
    },
    "maxProperties": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL, "c": NULL},
        "maxProperties": 1,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,4}$": INTEGER},
        "maxProperties": 3,
    },
    "pattern beside properties": {
        "type": "object",
        "properties": {"x-a": {"type": "integer"}, "b": NULL},
        "patternProperties": {"^x-[a-z]{1,4}$": {"minimum": 100}},
        "additionalProperties": False,
    },
    "two patterns of names": {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}, "z$": {"minimum": 5}},
        "additionalProperties": NULL,
        "propertyNames": {"maxLength": 4},
        "maxProperties": 4,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Z]{2}$"},
        "additionalProperties": INTEGER,
        "maxProperties": 3,
    },
    "names of an enum": {
        "type": "object",
        "propertyNames": {"enum": ["en", "de", "fr"]},
        "additionalProperties": TEXT,
    },
    "names and properties": {
        "type": "object",
        "properties": {"a": NULL, "bb": NULL},
        "propertyNames": {"maxLength": 1},
    },
    "unevaluatedProperties": {
        "type": "object",
        "properties": {"a": NULL},
        "unevaluatedProperties": False,
    },
    "dependentRequired": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL, "c": NULL},
        "dependentRequired": {"a": ["b", "c"]},
    },
    "dependentSchemas": {
        "type": "object",
        "properties": {"a": NULL, "n": INTEGER},
        "dependentSchemas": {"a": {"required": ["n"], "properties": {"n": {"minimum": 50}}}},
    },
    "object or null": {"type": ["object", "null"], "properties": {"a": COLOUR}, "required": ["a"]},
    "names with escapes": closed(
        {'a"b': NULL, "c\\d": NULL, "e\nf": NULL, "é😀": NULL, "$ref": NULL, "": NULL}
    ),
    "names like keywords": closed(
        {"type": COLOUR, "properties": NULL, "enum": NULL, "items": NULL}
    ),
    "fifty optional": {
        "type": "object",
        "properties": {f"field_{i}": {"type": "boolean"} for i in range(50)},
    },
}

COMPOUND: Final[dict[str, Schema]] = {
    "anyOf": {"anyOf": [INTEGER, COLOUR, NULL]},
    "anyOf beside type": {
        "type": "integer",
        "anyOf": [{"maximum": 3}, {"minimum": 100}],
        "minimum": 0,
    },
    "anyOf of objects": {"anyOf": [closed({"a": NULL}), closed({"b": COLOUR})]},
    "anyOf of required": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "oneOf of types": {"oneOf": [INTEGER, {"type": "array", "items": NULL}, NULL]},
    "oneOf of values": {"oneOf": [{"const": "x", "title": "X"}, {"const": "y"}]},
    "oneOf by a property": {
        "oneOf": [
            closed(
                {"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0, "maximum": 9}}
            ),
            closed(
                {
                    "kind": {"const": "square"},
                    "side": {"type": "integer", "minimum": 1, "maximum": 9},
                }
            ),
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "oneOf of ranges": {
        "type": "integer",
        "oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 10}],
    },
    "oneOf of patterns": {
        "oneOf": [
            {"type": "string", "pattern": "^a[0-9]{2}$"},
            {"type": "string", "pattern": "^b[0-9]{3}$"},
        ]
    },
    "allOf of one": {"allOf": [{"type": "integer", "minimum": 3}]},
    "allOf of bounds": {"allOf": [{"type": "integer"}, {"minimum": 1}, {"maximum": 6}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": COLOUR, "a": {"maximum": 9}}, "required": ["b"]},
        ]
    },
    "allOf closes": {
        "allOf": [{"properties": {"a": NULL, "b": NULL}}, closed({"a": NULL})],
        "type": "object",
    },
    "allOf of enums": {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    "allOf of types": {
        "allOf": [{"type": ["string", "integer"]}, {"type": ["number", "null"]}],
        "minimum": 0,
        "maximum": 9,
    },
    "allOf of anyOf": {
        "allOf": [
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            {"anyOf": [{"maximum": 5}, {"const": 8}]},
        ],
        "type": "integer",
    },
    "allOf of arrays": {
        "allOf": [
            {"type": "array", "items": {"type": "integer"}},
            {"items": {"minimum": 3, "maximum": 8}, "minItems": 2},
            {"maxItems": 4},
        ]
    },
    "allOf of prefixes": {
        "type": "array",
        "allOf": [
            {"prefixItems": [{"type": "integer"}]},
            {"prefixItems": [{"minimum": 900}, COLOUR]},
        ],
        "minItems": 2,
    },
    "not const": {"type": "string", "not": {"const": "no"}, "pattern": "^(?:no|yes|noo)$"},
    "not enum": {"enum": ["a", "b", "c"], "not": {"enum": ["b", "c"]}},
    "not a type": {"type": ["boolean", "null", "integer"], "not": {"type": "null"}},
    "not a pattern": {"type": "string", "maxLength": 6, "not": {"pattern": "[a-z]"}},
    "not required": {
        "type": "object",
        "properties": {"a": NULL, "b": NULL},
        "not": {"required": ["a", "b"]},
    },
    "not a bound": {"type": "integer", "not": {"minimum": 10}, "minimum": 3},
    "not any of": {"type": "integer", "not": {"anyOf": [{"minimum": 10}, {"maximum": 3}]}},
    "if then else": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": INTEGER},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["n"], "properties": {"n": {"minimum": 100}}},
        "else": {"properties": {"n": {"maximum": 0}}},
    },
    "if then": {
        "type": "integer",
        "minimum": 0,
        "maximum": 99,
        "if": {"minimum": 50},
        "then": {"multipleOf": 10},
    },
    "reference": {"$ref": "#/$defs/colour", "$defs": {"colour": COLOUR}},
    "reference with siblings": {
        "$ref": "#/$defs/n",
        "minimum": 5,
        "description": "d",
        "$defs": {"n": {"type": "integer", "maximum": 9}},
    },
    "old definitions": {"$ref": "#/definitions/a~1b", "definitions": {"a/b": COLOUR}},
    "reference to a property": closed({"a": COLOUR, "b": {"$ref": "#/properties/a"}}),
    "linked list": {
        "type": "object",
        "properties": {"v": COLOUR, "next": {"anyOf": [{"$ref": "#"}, NULL]}},
        "required": ["v", "next"],
    },
    "tree": {
        "$defs": {
            "node": closed(
                {
                    "v": {"type": "integer", "minimum": 0, "maximum": 99},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                }
            )
        },
        "$ref": "#/$defs/node",
    },
    "mutual recursion": {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
        },
        "$ref": "#/$defs/a",
    },
    "recursion with more": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["n"],
            }
        },
        "allOf": [{"$ref": "#/$defs/node"}, {"properties": {"n": {"minimum": 1, "maximum": 3}}}],
    },
    "recursive expression": {
        "$defs": {
            "expr": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    closed(
                        {
                            "op": {"enum": ["+", "-"]},
                            "l": {"$ref": "#/$defs/expr"},
                            "r": {"$ref": "#/$defs/expr"},
                        }
                    ),
                ]
            }
        },
        "$ref": "#/$defs/expr",
    },
    "nested deeply": closed(
        {
            "a": closed(
                {
                    "b": closed(
                        {
                            "c": closed(
                                {
                                    "d": {
                                        "type": "array",
                                        "items": closed({"e": COLOUR}),
                                        "maxItems": 2,
                                    }
                                }
                            )
                        }
                    )
                }
            )
        }
    ),
}

UNICODE: Final[dict[str, Schema]] = {
    "greek names": closed(
        {"όνομα": TEXT, "ηλικία": {"type": "integer", "minimum": 0, "maximum": 120}}
    ),
    "chinese": closed(
        {
            "城市": {"enum": ["北京", "上海", "深圳"]},
            "温度": {"type": "number", "minimum": -50, "maximum": 50},
        }
    ),
    "arabic": {"enum": ["مرحبا", "سلام"]},
    "emoji": closed({"😀": {"enum": ["👍🏽", "👩‍👩‍👧", "🇩🇪"]}}),
    "combining": {"enum": ["e\u0301", "é", "\u200b", "\ufeff"]},
    "beyond the plane": {"type": "string", "pattern": "^[😀-😏]{1,3}$"},
    "length of emoji": {"type": "string", "pattern": "^[😀-😏é]*$", "minLength": 2, "maxLength": 2},
    "additional beside unicode": {
        "type": "object",
        "properties": {"ключ": NULL},
        "required": ["ключ"],
        "additionalProperties": COLOUR,
        "maxProperties": 2,
    },
}

TOOLS: Final[dict[str, Schema]] = {
    "weather": closed(
        {
            "city": {"type": "string", "description": "A city", "minLength": 1, "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
        },
        "city",
    ),
    "search": closed(
        {
            "query": TEXT,
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "tags": {
                "type": "array",
                "items": {"enum": ["news", "web", "code"]},
                "uniqueItems": True,
            },
        },
        "query",
    ),
    "calendar event": closed(
        {
            "title": TEXT,
            "start": {"type": "string", "format": "date-time"},
            "minutes": {"type": "integer", "multipleOf": 15, "minimum": 15, "maximum": 480},
            "attendees": {
                "type": "array",
                "items": {"type": "string", "format": "email", "maxLength": 25},
                "maxItems": 2,
            },
            "repeat": {"anyOf": [{"enum": ["daily", "weekly"]}, NULL]},
        },
        "title",
        "start",
        "minutes",
    ),
    "order": closed(
        {
            "id": {"type": "string", "pattern": "^ORD-[0-9]{6}$"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": closed(
                    {
                        "sku": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"},
                        "count": {"type": "integer", "minimum": 1, "maximum": 99},
                        "price": {"type": "number", "minimum": 0, "maximum": 9999.99},
                    }
                ),
            },
            "paid": {"type": "boolean"},
        }
    ),
    "tool call": closed(
        {"name": {"const": "get_time"}, "arguments": closed({"zone": {"enum": ["UTC", "CET"]}})}
    ),
    "tool calls": {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {
            "anyOf": [
                closed(
                    {
                        "name": {"const": "add"},
                        "arguments": closed(
                            {
                                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                                "b": {"type": "integer", "minimum": 0, "maximum": 99},
                            }
                        ),
                    }
                ),
                closed(
                    {"name": {"const": "stop"}, "arguments": {"type": "object", "properties": {}}}
                ),
            ]
        },
    },
    "no arguments": {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    },
    "any arguments of a kind": {
        "type": "object",
        "additionalProperties": {"type": ["integer", "boolean"]},
        "maxProperties": 3,
    },
    "address": closed(
        {
            "street": TEXT,
            "zip": {"type": "string", "pattern": "^[0-9]{5}(?:-[0-9]{4})?$"},
            "country": {"type": "string", "minLength": 2, "maxLength": 2},
            "location": {
                "type": "array",
                "prefixItems": [
                    {"type": "number", "minimum": -90, "maximum": 90},
                    {"type": "number", "minimum": -180, "maximum": 180},
                ],
                "minItems": 2,
            },
        }
    ),
    "classified": closed(
        {
            "label": {"enum": ["spam", "ham"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "reasons": {"type": "array", "items": TEXT, "maxItems": 2},
        }
    ),
    "extracted people": closed(
        {
            "people": {
                "type": "array",
                "maxItems": 2,
                "items": closed(
                    {
                        "name": TEXT,
                        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 130},
                        "email": {
                            "anyOf": [{"type": "string", "format": "email", "maxLength": 25}, NULL]
                        },
                    }
                ),
            }
        }
    ),
    "pydantic style": {
        "$defs": {
            "Pet": {
                "title": "Pet",
                "type": "object",
                "properties": {
                    "kind": {"$ref": "#/$defs/Kind"},
                    "age": {"anyOf": [INTEGER, NULL], "default": None},
                },
                "required": ["kind"],
            },
            "Kind": {"title": "Kind", "type": "string", "enum": ["cat", "dog"]},
        },
        "title": "Owner",
        "type": "object",
        "properties": {
            "pet": {"$ref": "#/$defs/Pet"},
            "others": {
                "type": "array",
                "items": {"$ref": "#/$defs/Pet"},
                "maxItems": 1,
                "default": [],
            },
        },
        "required": ["pet"],
    },
    "discriminated union": {
        "$defs": {
            "Click": closed(
                {
                    "type": {"const": "click"},
                    "x": {"type": "integer", "minimum": 0, "maximum": 1920},
                    "y": {"type": "integer", "minimum": 0, "maximum": 1080},
                }
            ),
            "Key": closed(
                {
                    "type": {"const": "key"},
                    "keys": {
                        "type": "array",
                        "items": {"enum": ["ctrl", "c", "v"]},
                        "minItems": 1,
                        "maxItems": 3,
                    },
                }
            ),
            "Wait": closed(
                {
                    "type": {"const": "wait"},
                    "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
                }
            ),
        },
        "type": "object",
        "properties": {
            "action": {
                "oneOf": [
                    {"$ref": "#/$defs/Click"},
                    {"$ref": "#/$defs/Key"},
                    {"$ref": "#/$defs/Wait"},
                ]
            }
        },
        "required": ["action"],
        "additionalProperties": False,
    },
    "sql filter": {
        "$defs": {
            "filter": {
                "anyOf": [
                    closed(
                        {
                            "field": {"enum": ["age", "name"]},
                            "op": {"enum": ["=", "<", ">"]},
                            "value": {
                                "anyOf": [TEXT, {"type": "integer", "minimum": 0, "maximum": 999}]
                            },
                        }
                    ),
                    closed(
                        {
                            "and": {
                                "type": "array",
                                "items": {"$ref": "#/$defs/filter"},
                                "minItems": 1,
                                "maxItems": 2,
                            }
                        }
                    ),
                ]
            }
        },
        "$ref": "#/$defs/filter",
    },
    "shell": closed(
        {
            "command": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600},
            "env": {
                "type": "object",
                "additionalProperties": TEXT,
                "propertyNames": {"pattern": "^[A-Z_]{1,8}$"},
                "maxProperties": 2,
            },
        },
        "command",
    ),
    "http request": closed(
        {
            "method": {"enum": ["GET", "POST"]},
            "url": {"type": "string", "format": "uri", "maxLength": 20},
            "retries": {"type": "integer", "minimum": 0, "maximum": 5},
            "id": {"type": "string", "format": "uuid"},
        },
        "method",
        "url",
    ),
    "chess move": {
        "type": "string",
        "pattern": "^(?:[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=[QRBN])?|O-O(?:-O)?)[+#]?$",
    },
    "colour code": closed(
        {
            "hex": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
            "alpha": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        }
    ),
    "rating": {
        "type": "object",
        "properties": {
            "stars": {"type": "integer", "enum": [1, 2, 3, 4, 5]},
            "text": {"type": ["string", "null"], "maxLength": 20},
        },
        "required": ["stars"],
    },
    "thirty fields": closed(
        {f"field_{i}": [INTEGER, TEXT, COLOUR, {"type": "boolean"}, NULL][i % 5] for i in range(30)}
    ),
}

CORPUS: Final[dict[str, Schema]] = {
    f"{group}: {name}": schema
    for group, schemas in {
        "types": TYPES,
        "numbers": NUMBERS,
        "strings": STRINGS,
        "arrays": ARRAYS,
        "objects": OBJECTS,
        "compound": COMPOUND,
        "unicode": UNICODE,
        "tools": TOOLS,
    }.items()
    for name, schema in schemas.items()
}
