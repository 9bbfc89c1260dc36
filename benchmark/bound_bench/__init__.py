"""An upper bound of the offline work beside online requests."""
