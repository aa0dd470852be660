"""What a builder says when the data does not fit the model."""

from manyhands.errors import UsageError


def image(model: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Channels, height and width of one sample, or a refusal that says what would work."""
    if len(shape) != 3:
        raise UsageError(
            f"{model} takes images (channels×height×width) but one sample here is {written(shape)}; "
            "use lstm or transformer for token sequences, mlp for other numbers"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        others = "cnn, lenet and resnet20 take 8×8, mlp any size" if smallest > 8 else "mlp takes any size"
        raise UsageError(
            f"{model} takes images from {smallest}×{smallest} upwards, not {height}×{width}; "
            f"scale the images up or use another model ({others})"
        )
    return channels, height, width


def tokens(model: str, shape: tuple[int, ...]) -> int:
    """Length of one token sequence, or a refusal that says what would work."""
    if len(shape) != 1:
        raise UsageError(
            f"{model} takes sequences of tokens (length) but one sample here is {written(shape)}; "
            "use text data, or an image model such as cnn"
        )
    return shape[0]


def positive(model: str, **settings: int) -> None:
    """Refuse sizes below one."""
    for key, value in settings.items():
        if value < 1:
            raise UsageError(f"{model}:{key}={value}: expected a whole number from 1 upwards")


def written(shape: tuple[int, ...]) -> str:
    """A shape as people write it: 3×32×32."""
    return "×".join(map(str, shape)) or "a single number"
