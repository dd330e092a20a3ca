"""Tells an observer when megatron.training begins and ends training, and each step of it."""

import functools
from typing import Any, Protocol


class TrainingObserver(Protocol):
    """Steps are counted as Megatron's log counts them, from 1."""

    def begin_training(
        self, model: list, optimizer: Any, first_step: int, last_step: int
    ) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def end_step(self, step: int) -> None: ...

    def end_training(self, error: BaseException | None) -> None: ...


def install(observer: TrainingObserver) -> None:
    """Wrap train and train_step of megatron.training, once, before training begins.

    Steps that Megatron skips (--iterations-to-skip) are not told. An exception in a step ends
    training without an end of the step.
    """
    from megatron.training import get_args, training

    original_train, original_step = training.train, training.train_step

    @functools.wraps(original_train)
    def train(forward_step_func, model, optimizer, *args, **kwargs):
        options = get_args()
        if options.profile:
            raise ValueError(
                "--profile: Megatron's own profiler and this one exclude each other; leave --profile out"
            )
        observer.begin_training(model, optimizer, options.iteration + 1, options.train_iters)
        try:
            result = original_train(forward_step_func, model, optimizer, *args, **kwargs)
        except BaseException as error:
            observer.end_training(error)
            raise
        observer.end_training(None)
        return result

    @functools.wraps(original_step)
    def train_step(*args, **kwargs):
        step = get_args().curr_iteration + 1
        observer.begin_step(step)
        result = original_step(*args, **kwargs)
        observer.end_step(step)
        return result

    training.train, training.train_step = train, train_step
