"""OpenTelemetry set-up, span and attribute names, and the local trace store."""
