"""Who may call and how much: API keys, their limits, certificates. Both edges use it alike."""
