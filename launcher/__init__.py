"""ringctl's controller: reads the inventory, plans, starts, follows and stops runs. Never imports torch."""

__version__ = "0.1.0"
