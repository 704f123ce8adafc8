"""One function per op, several backends; `reference` is torch, and what the others must equal."""
