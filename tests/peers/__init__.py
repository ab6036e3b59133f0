"""Trainers of other people's kind, which jddp's numbers and times are held against."""
