"""A package, so that its tests share a server: a fixture of package scope needs one."""
