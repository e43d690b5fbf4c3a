"""The ring trainer: one process a rank, gradients averaged over all ranks after every batch.

Start reading at train.py. Nothing here imports the launcher; the two meet in a rank's environment, its exit
code, its output and its metrics file.
"""
