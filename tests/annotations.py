"""A type checker for tests: every call inside jddp is held against its annotations.

    scripts/test --jaxtyping-packages=jddp,annotations.check

jaxtyping applies it to each module as it is imported, and binds the dims of shape annotations
within a call. It adds a fourth to the time of a test, so that CI does this for the random sets of
options alone, which go through all of the step.
"""

from beartype import BeartypeConf, beartype

# An int will do where a float is asked for, as the language has it.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
