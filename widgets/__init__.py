"""Explorers of the course, one a file: compute() gives numbers, figure() draws them, explorer() adds controls."""
