"""The type checker of the tests: every call inside jddp is held against its annotations.

jaxtyping applies it to each module as it is imported (see addopts in pyproject.toml), and binds the
dims of shape annotations within a call.
"""

from beartype import BeartypeConf, beartype

# An int will do where a float is asked for, as the language has it.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
