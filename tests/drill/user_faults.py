"""What users get wrong: refused before anything is started, and nothing else suffers."""

from scene import NAME, Scene, UnexpectedError, write_rows


def row_poisoned(scene: Scene) -> tuple[str, str]:
    """A row without a positive among the others: it is left out and counted."""
    inputs = scene.run_file.parent
    write_rows(inputs, poisoned=1)
    try:
        job = scene.submit()
        job.ends_with(0)
    finally:
        write_rows(inputs)
    return job.line("1 rejected"), "nothing"


def rows_poisoned(scene: Scene) -> tuple[str, str]:
    """More of them than a source may have; the user takes them out."""
    inputs = scene.run_file.parent
    write_rows(inputs, poisoned=3)
    try:
        job = scene.submit()
        job.ends_with(2)
        if "poisoned 0" not in job.text():
            raise UnexpectedError(f"no such row is told:\n{job.text()[-3000:]}")
        if scene.run_folder.exists():
            raise UnexpectedError("a refused run has taken its name")
    finally:
        write_rows(inputs)
    scene.submit().ends_with(0)
    return f"{job.line('^error: ')} {job.line('poisoned 0')}", "takes the rows out, submits again"


def submitted_twice(scene: Scene) -> tuple[str, str]:
    """The same job once more while the first one runs."""
    first = scene.submit()
    lock = scene.storage / "runs" / f"{NAME}.lock"
    scene.wait_for(lock.exists, first, "a lock")
    second = scene.submit()
    second.ends_with(1)
    if first.process.poll() is not None:
        raise UnexpectedError("the first job had ended before the second one was refused")
    first.ends_with(0)
    return second.line("^error: "), "nothing; the first job is not touched"
