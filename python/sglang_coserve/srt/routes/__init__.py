"""Our HTTP routes on SGLang's server."""
