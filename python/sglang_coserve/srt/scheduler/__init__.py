"""The subclass of SGLang's scheduler, and how its parts are made and connected."""
