"""Where the time to a first token went, told from the spans of its trace."""
