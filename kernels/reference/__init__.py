"""Every op in plain torch: the meaning that the fast backends are tested against."""
