"""`firsttoken bench`: a load generator for OpenAI-compatible servers and for our gRPC."""
