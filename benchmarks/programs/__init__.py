"""What the contestants run. Each file is started by its path."""
