"""What kernels over rows have in common, whatever they run on."""


def options_refusal(*, axis: int, row_axes: tuple[int, ...], scale_rule: str = "amax") -> str | None:
    """Why kernels over rows do not serve these options, None if they do."""
    if axis != -1 or row_axes != (-1,):
        return f"it takes rows along the last axis, not axis {axis} with row axes {row_axes}"
    if scale_rule != "amax":
        return f"it has no scale rule {scale_rule!r}"
    return None
