"""Benchmarks that users run: what training gains from more ranks and smaller gradients, and what links reach.

options.py       the command line -> Asked
program.py       what each process does with it
table.py         pure: finished trainings -> the rows of the comparison table
training.py      trains them, one after the other
collectives.py   pure: times of exchanges -> bandwidths
exchanging.py    takes those times, all ways in turn
reporter.py      what rank 0 says meanwhile
report.py        Markdown, JSON and, by plot.py, a picture
"""
