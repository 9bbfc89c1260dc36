"""The class, targets and tenant of a request: read from HTTP, carried through SGLang."""
