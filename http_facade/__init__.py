"""OpenAI-compatible HTTP over the engine gRPC API: stateless, any number of processes."""
