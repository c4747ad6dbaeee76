"""Counts as a person reads them."""


def many(n: float, noun: str, plural: str = "s") -> str:
    """1 document, 1,024 documents, 2.5 epochs: of what is no whole number, four digits.

    Args:
      plural: what the noun ends with unless there is one.
    """
    number = f"{n:,}" if isinstance(n, int) else f"{n:.4g}"
    return f"{number} {noun}{'' if n == 1 else plural}"
