"""Stretches and sizes as text."""


def in_ms(seconds: float) -> str:
    """A time in milliseconds, with their unit."""
    return f"{1e3 * seconds:,.2f} ms"


def in_mb(num_bytes: float) -> str:
    """A number of megabytes, of 10^6 bytes."""
    return f"{num_bytes / 1e6:,.2f}"


def in_gb(num_bytes: float) -> str:
    """A number of gigabytes, of 10^9 bytes."""
    return f"{num_bytes / 1e9:,.1f}"
