"""In place of the repository's progress bar, which asks the terminal for its width; a run here has none."""


def progress_bar(current: int, total: int, said: str) -> None:
    print(f"{current + 1}/{total} {said}")
