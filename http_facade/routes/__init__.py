"""The HTTP routes: thin, one file per kind."""
