"""From a JSON Schema to a grammar that allows only what the schema does (see `schema_check`)."""
