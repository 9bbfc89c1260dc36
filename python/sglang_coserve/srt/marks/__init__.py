"""The class and targets of a request: read from HTTP, carried through SGLang."""
