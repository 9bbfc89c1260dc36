"""A package, so that its tests share engines: a fixture of package scope needs one."""
