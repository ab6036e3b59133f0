"""A type checker for tests: every call inside jddp is held against its annotations."""

from beartype import BeartypeConf, beartype

# An int will do where a float is asked for, as the language has it.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
