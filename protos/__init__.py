"""The wire contract of firsttoken: `engine.proto` and the code generated from it."""
