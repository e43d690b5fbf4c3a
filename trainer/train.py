"""The training, from top to bottom: each rank trains on its share of the images; gradients meet each step.

All ranks hold the same parameters at all times. They start from rank 0's; in each step every rank computes
the gradient of its own batch, a strategy (sync/) replaces it by the mean over all ranks, and every rank takes
the same step with that mean.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":
    # Run as `python -m trainer.train`: hand over to what checks the options before the slow import of torch
    # below.
    from trainer.__main__ import main

    sys.exit(main())

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer import agree, candidates, checkpoint, data, device, group, sync
from trainer.checkpoint import Checkpoints, Part
from trainer.config import DEFAULT_EPOCHS, Config
from trainer.data import Dataset, Images
from trainer.errors import InputError, TrainerError
from trainer.flat import Flat
from trainer.metrics import LAST_S, Metrics
from trainer.models import MODELS
from trainer.optim import SGD
from trainer.saver import Saver, saving
from trainer.state import State, mean_statistics

EVALUATION_BATCH = 250
CHECKPOINT_TIMES, CHECKPOINT_MORE_BYTES = 8, 64 << 20  # most of a file: times the parameters, and bytes more
DOWNLOAD_PATIENCE_S = 900.0  # how long the ranks wait for the slowest host to download


def train(config: Config) -> None:
    """Train as `config` says, as one of many ranks or alone; rank 0 prints how it goes."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with group.joined(config):
        dataset = data.load(config.data, os.environ)
        group.wait_for_all(DOWNLOAD_PATIENCE_S if config.data == "download" else config.timeout)
        train_on(dataset, config)


def train_on(dataset: Dataset, config: Config) -> nn.Module:
    """Train on these images and return the model; all ranks of the group do so at the same time."""
    agree.on_options(config, len(dataset.train))
    # The same seed gives every rank the same model, but only where torch is the same: rank 0's is the one
    # that counts.
    place = device.chosen(config)
    model = MODELS[config.model]().to(place)
    flat = Flat(model)
    group.copy_from_rank_0(flat.parameters)
    torch.manual_seed(config.seed * 1_000_003 + group.rank())  # each rank drops out others

    epochs, steps = planned(config, len(dataset.train))
    checkpoints = Checkpoints(
        config.checkpoint_dir,
        checkpoint.described(config, len(dataset.train), steps),
        made_by=config.run,
        attempt=config.attempt,
        most_bytes=CHECKPOINT_TIMES * flat.parameters.nbytes + CHECKPOINT_MORE_BYTES,
        hosts=group.gather_texts(config.host or socket.gethostname()),
        copies=config.checkpoint_copies,
    )
    if config.checkpoint_every:
        checkpoints.prepare()
    metrics = Metrics(os.environ.get("RINGCTL_METRICS", ""), epochs=epochs, steps=steps)
    say(introduction(config, dataset, epochs, steps))
    strategy = sync.create(model, flat, config)
    try:
        first_world = config.first_world or group.world()
        state = State(model, SGD(flat, config.momentum), strategy, metrics, first_world)
        if config.resume != "never" or (config.checkpoint_every and config.attempt > 1):
            go_on(state, checkpoints, dataset, config)
        elif state.lr_scale != 1:
            say(f"this run starts at its first step{rate_told(state)}")
        with saving(checkpoints, config) as saver:
            train_from(state, saver, dataset, config)
    finally:
        strategy.close()
    return model


def go_on(state: State, checkpoints: Checkpoints, dataset: Dataset, config: Config) -> None:
    """Put the training where its newest checkpoint was, if there is one."""
    part = None
    if config.attempt > 1 and config.resume != "auto":  # that was for the first attempt, if another has saved
        part = checkpoints.newest(checkpoint.OWN)
    if part is None and config.resume != "never":
        part = checkpoints.newest(config.resume)
    if part is None:
        where = f"no checkpoint in {checkpoints.folder} to go on from: this run starts at its first step"
        say(f"{where}{rate_told(state)}")
        return
    if state.strategy.settles:
        order = data.training_order(len(dataset.train), config.seed, 0, group.rank(), group.world())
        for batch in dataset.train.batches(order[: config.batch_size], config.batch_size):
            state.strategy.begin()
            backward(state.strategy.model, batch)
    put_back(state, part, dataset, config)
    say(where_it_goes_on(state, part))


def put_back(state: State, part: Part, dataset: Dataset, config: Config) -> None:
    """Be where the checkpoint was; InputError if that does not fit."""

    def shared() -> None:
        if part.shared is not None:
            state.put_back_shared(part.shared, part.world)

    def own() -> None:
        if part.own is not None:
            state.put_back_own(part.own)
        elif part.afresh:
            state.begin_afresh(*position(part, state.metrics, steps_per_epoch(config, len(dataset.train))))

    must_fit(part, shared)
    state.send_from(part.sender)
    must_fit(part, own)
    whole = [rank for rank in range(group.world()) if rank not in part.afresh]
    if whole and part.afresh:
        state.send_strategy(whole[0], part.afresh)


def must_fit(part: Part, work: Callable[[], None]) -> None:
    """Do this on all ranks; InputError if what they have read does not fit the training."""
    kinds = (TrainerError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
    failed = checkpoint.failures(work, *kinds)
    if failed:
        raise InputError(f"the checkpoint of step {part.step} does not fit: {failed}")


def position(part: Part, metrics: Metrics, per_epoch: int) -> tuple[int, int, int]:
    """Step, epoch, and steps of that epoch, at which a rank begins that has nothing of its own."""
    step, epoch = part.step, part.epoch
    if part.is_resized:
        step = candidates.ported(part.step, part.steps or metrics.steps, metrics.steps)
        epoch = candidates.epoch_of(step, per_epoch, metrics.epochs)
    steps_of_epoch = step - (epoch - 1) * per_epoch
    if not (0 <= steps_of_epoch <= per_epoch and step <= metrics.steps):
        raise ValueError(f"step {step} is not in epoch {epoch} of {per_epoch} steps")
    return step, epoch, steps_of_epoch


def where_it_goes_on(state: State, part: Part) -> str:
    """What the user should know of it, in a line."""
    metrics, world = state.metrics, group.world()
    rest = "nothing is left to train" if metrics.step == metrics.steps else "it goes on from there"
    if part.is_resized:
        ranks = "1 rank" if part.world == 1 else f"{part.world} ranks"
        return (
            f"{part.step:,} of {part.steps or metrics.steps:,} steps were done at the newest checkpoint by "
            f"{ranks}, now there are {world}: that is {metrics.step:,} of {metrics.steps:,} steps "
            f"for these, and {rest}, with {state.lr_scale:.4g} times --lr; what each rank alone knew "
            "(random numbers, error feedback) begins afresh"
        )
    done = f"{part.step:,} of {metrics.steps:,} steps were done at the newest checkpoint: {rest}"
    if not part.afresh:
        return done
    ranks = " and ".join(map(str, part.afresh))
    return (
        f"{done}; what rank {ranks} alone knew (random numbers, error feedback) is lost and begins afresh: "
        "bits may differ"
    )


def rate_told(state: State) -> str:
    """The end of the line that says where it begins, if its first attempt had another number of ranks."""
    return "" if state.lr_scale == 1 else f", with {state.lr_scale:.4g} times --lr"


def train_from(state: State, saver: Saver, dataset: Dataset, config: Config) -> None:
    """All epochs that are left, and their reports."""
    strategy, metrics, flat = state.strategy, state.metrics, state.optimizer.flat
    may_skip = config.on_nonfinite == "skip"
    accuracy = 0.0
    for epoch in range(metrics.epoch, metrics.epochs):
        strategy.model.train()
        metrics.epoch_begins()
        order = data.training_order(len(dataset.train), config.seed, epoch, group.rank(), group.world())
        # Some steps of this epoch may have been done before a checkpoint; the last epoch may be cut short.
        begin = metrics.this_epoch.steps * config.batch_size
        end = begin + (metrics.steps - metrics.step) * config.batch_size
        for batch in dataset.train.batches(order[begin:end], config.batch_size):
            statistics = [buffer.clone() for buffer in state.model.buffers()] if may_skip else []
            strategy.begin()
            loss = backward(strategy.model, batch)

            began = time.monotonic()
            good = strategy.finish()
            comm_seconds = time.monotonic() - began

            # The learning rate falls in a straight line, to be zero after the last step.
            if good:
                state.optimizer.step(lr=config.lr * state.lr_scale * (1 - metrics.step / metrics.steps))
            else:
                for buffer, before in zip(state.model.buffers(), statistics, strict=True):
                    buffer.copy_(before)  # the forward pass has put what is not finite into them
            metrics.step_done(loss.item() if good else None, len(batch[1]), comm_seconds, strategy)
            is_last = metrics.step == metrics.steps
            if is_last:
                strategy.last_step_done()
            while strategy.notes:
                say(strategy.notes.pop(0))
            # The end is compared in any case, and before it is saved: one that drifted is not to be kept.
            if is_last or (config.check_sync and metrics.step % config.check_sync == 0):
                agree.on_parameters(flat.sha256(), metrics.step)
            if config.checkpoint_every and (is_last or metrics.step % config.checkpoint_every == 0):
                saver.save(metrics.step, metrics.epoch, state.shared(), state.own())

        share_batch_norm_statistics(state.model)
        accuracy = evaluate(strategy.model, dataset.test)
        metrics.epoch_done(accuracy)
        report_epoch(metrics, accuracy)

    is_saved = saver.wait()
    # The others wait for this rank in the end: it must lose its patience with a full disk before they do.
    metrics.run_done(accuracy, flat.sha256(), patience=min(LAST_S, config.timeout / 2))
    say(f"test accuracy {100 * accuracy:.1f} %")
    if not is_saved:
        raise TrainerError(f"the training is done, but its end could not be saved in {saver.folder}")


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch, with its gradients on their way."""
    place = next(model.parameters()).device
    pixels, labels = batch
    loss = cross_entropy(model(pixels.to(place)), labels.to(place))
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
    return loss


def planned(config: Config, images: int) -> tuple[int, int]:
    """How many epochs the run will have (the last one may be cut short), and how many steps in all."""
    if images < config.world_size:
        raise TrainerError(
            f"{images} training images are too few for {config.world_size} ranks: use fewer ranks"
        )
    per_epoch = steps_per_epoch(config, images)
    if config.steps is None:
        epochs = config.epochs or DEFAULT_EPOCHS
        return epochs, epochs * per_epoch
    steps = config.steps if config.epochs is None else min(config.steps, config.epochs * per_epoch)
    return math.ceil(steps / per_epoch), steps


def steps_per_epoch(config: Config, images: int) -> int:
    return math.ceil(images // config.world_size / config.batch_size)


def share_batch_norm_statistics(model: nn.Module) -> None:
    """Replace the running means and variances of all batch-norm layers by their averages over all ranks.

    In training each rank normalises with its own batches and gathers statistics of those. This makes them the
    same everywhere before they are used, which is in evaluation.
    """
    means = mean_statistics(model)
    for name, buffer in model.named_buffers():
        if name in means:
            buffer.copy_(means[name])


@torch.no_grad()
def evaluate(model: nn.Module, images: Images) -> float:
    """The share of these images that the model gets right; each rank tries its part of them."""
    model.eval()
    place = next(model.parameters()).device
    correct = torch.zeros((), dtype=torch.int64)
    order = data.evaluation_order(len(images), group.rank(), group.world())
    for pixels, labels in images.batches(order, EVALUATION_BATCH):
        correct += (model(pixels.to(place)).argmax(dim=1).cpu() == labels).sum()
    group.add_over_ranks(correct)
    return correct.item() / len(images)


def report_epoch(metrics: Metrics, accuracy: float) -> None:
    """Print how the epoch went, over all ranks; end the training if it went nowhere."""
    epoch = metrics.this_epoch
    sums = torch.tensor([epoch.loss_sum, epoch.losses, epoch.samples_per_s], dtype=torch.float64)
    group.add_over_ranks(sums)
    loss_sum, losses, samples_per_s = sums.tolist()
    loss = loss_sum / losses if losses else None  # None: nothing was left to train
    shown = "-" if loss is None else f"{loss:.3f}"
    say(
        f"epoch {metrics.epoch}/{metrics.epochs}  loss {shown}  accuracy {100 * accuracy:.1f} %  "
        f"{samples_per_s:,.0f} samples/s  communication {100 * epoch.comm_share:.0f} %"
    )
    if loss is not None and not math.isfinite(loss):
        raise TrainerError(f"the loss became {loss} in epoch {metrics.epoch}: try a smaller --lr")


def introduction(config: Config, dataset: Dataset, epochs: int, steps: int) -> str:
    ranks = (
        f"{config.world_size} ranks"
        if config.world_size > 1
        else "one process alone, nothing to synchronise (as --sync serial)"
    )
    return (
        f"{config.model} on {ranks}: {len(dataset.train):,} images ({config.data}), "
        f"epochs {epochs}, steps {steps:,}, batch {config.batch_size} a rank, "
        f"sync {config.sync}, compress {config.compress}"
    )


def say(line: str) -> None:
    """Print a line on rank 0."""
    if group.rank() == 0:
        print(line, flush=True)
