"""Train a language model in NVFP4: `python train.py model=llama-tiny precision=nvfp4`.

`--help` lists the keys. One run lies in one folder, `output_dir`: config.yaml, metrics.jsonl,
tensorboard/, tokenizer/ and checkpoints/; the same command with the same folder goes on where it
stopped.

Several processes train one run when Slurm, MPI, Kubernetes or the keys of `cluster` say so, see
docs/cluster.md; process 0 speaks and writes for all.

Exit status: 0 when the run is complete, or was stopped by SIGTERM or SIGINT and saved; 1 when it
failed; 2 for a mistake in the command, before anything was trained; 130 when SIGINT aborted it:
the first one before the training began, the second one afterwards.
"""

from __future__ import annotations

import sys

from fp4zoo.training.signals import StopRequest, abort_at_once

if __name__ == "__main__":
    abort_at_once()  # the imports below take seconds

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fp4zoo import __version__, data, models
from fp4zoo.configs import cli
from fp4zoo.configs.fields import values
from fp4zoo.configs.schema import TrainConfig
from fp4zoo.errors import RunStopped, UserError
from fp4zoo.training import memory
from fp4zoo.training.checkpoints import FOLDER, Checkpoints, find_checkpoint, load_parameters
from fp4zoo.training.cluster import Cluster, StopAgreement, start
from fp4zoo.training.display import Display, duration
from fp4zoo.training.errors import TrainingFailure
from fp4zoo.training.evaluate import Evaluation, Validation
from fp4zoo.training.flops import flops_per_token, peak_flops
from fp4zoo.training.metrics import METRICS_FILE, MetricsWriter
from fp4zoo.training.program import Program
from fp4zoo.training.recorder import Recorder, RecorderConfig
from fp4zoo.training.run_directory import (
    choose_run_directory,
    prepared_run_directory,
    write_config,
)
from fp4zoo.training.sample import sample_tokens
from fp4zoo.training.sharding import describe_mesh
from fp4zoo.training.state import TrainState
from fp4zoo.training.step import gradient_names

_STARTED = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    if argv is None:
        abort_at_once()
    return cli.run(train, argv, "train")


def train(config: TrainConfig) -> int:
    """Runs one configuration and returns the exit status.

    Raises:
      UserError: for a mistake of the user, in every process.
      RunStopped: when a signal ended the run early and all is saved.
    """
    cluster = start(config.cluster)
    try:
        stopped_by = _train(config, cluster)
    except UserError:
        cluster.leave()
        raise
    except (TrainingFailure, OSError) as failure:
        if cluster.is_first:
            reason = "" if isinstance(failure, TrainingFailure) else "the run failed: "
            print(f"error: {reason}{failure}", file=sys.stderr)
        cluster.leave()
        return 1
    except KeyboardInterrupt:
        print("aborted", file=sys.stderr)
        return 130
    cluster.leave()
    if stopped_by is not None:
        raise RunStopped(stopped_by)
    return 0


@dataclass
class Run:
    """The parts of one run, made by `_train` and used by the functions below it."""

    config: TrainConfig
    cluster: Cluster
    program: Program
    available: int  # bytes per device
    batches: data.TrainIterator
    validation: Validation
    unigram: float  # nats per token
    checkpoints: Checkpoints
    writer: MetricsWriter
    display: Display
    recorder: Recorder
    stop: StopAgreement
    last_evaluation: Evaluation | None = None


def _train(config: TrainConfig, cluster: Cluster) -> int | None:
    """The signal that stopped the run early, if any."""
    cluster.check_same(_shared_settings(config), "the configuration")
    directory = Path(cluster.from_first(lambda: str(choose_run_directory(config))))
    # What is going to run, and whether it fits, before anything is allocated.
    here = memory.available_bytes(jax.local_devices(), processes=cluster.count_here)
    available = min(cluster.gather(here))
    with cluster.together():
        program = Program(config, available=available)
        devices = list(program.mesh.devices.flat)
        estimate = program.estimate_memory()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    if cluster.count > 1:
        kind += f" in {cluster.count} processes"
    cluster.say(f"{kind}, {describe_mesh(program.mesh)}, JAX {jax.__version__}")
    if program.mesh_reason is not None:
        cluster.say(program.mesh_reason)
    cluster.say(program.plan.summary())
    cluster.say(models.describe_backends(program.backends))
    with cluster.together():
        memory.check_fits(estimate, available, program.mesh, config.remat)
    cluster.say(f"{program.num_parameters:,} parameters\n{estimate.table(available)}")

    # Where it starts from, and the text.
    with cluster.together():
        source = find_checkpoint(config.checkpoint) if config.checkpoint else None
    text = cluster.in_turn(lambda: _text(config, program))
    cluster.check_same(text.settings(), "the data")
    tokenizer, batches, corpus = text.tokenizer, text.batches, text.batches.corpus
    cluster.say(
        f"{corpus.description}: {len(corpus.train.tokens):,} training tokens, "
        f"{len(corpus.validation.tokens):,} held out; tokenizer: {tokenizer.name}"
    )

    with contextlib.ExitStack() as stack:
        with cluster.together():
            if cluster.is_first:
                stack.enter_context(prepared_run_directory(directory, resume=config.resume))
        with cluster.together():
            checkpoints = stack.enter_context(Checkpoints(directory, keep=config.keep_checkpoints))
            first_step = checkpoints.latest_step() or 0
            if first_step:
                checkpoints.check_model(program.state)
        if first_step >= config.max_steps:
            cluster.say(
                f"{directory} holds a run of {first_step} steps and max_steps={config.max_steps}: "
                "nothing is left to do; raise max_steps to go on"
            )
            return None

        # The compiled step, checked by what XLA says it needs; only then the state is allocated.
        train_step = _compile(program, cluster, first_step, available)
        with cluster.together():
            if first_step:
                state, position = checkpoints.restore(program.state)
                batches.set_state(position)
                cluster.say(f"going on after step {first_step}")
            elif source is not None:
                parameters = load_parameters(source, program.state.parameters, program.mesh)
                state = program.state_from(parameters)
                cluster.say(f"starting from the parameters of {source}")
            else:
                state = program.initial_state()

        # From here on the folder is this run's: a refused one has left it as it was.
        config = dataclasses.replace(config, output_dir=str(directory))
        with cluster.together():
            if cluster.is_first:
                write_config(directory, config)
                _save_tokenizer(tokenizer, directory)
            folder = directory if cluster.is_first else None
            writer = stack.enter_context(MetricsWriter(folder, resume_step=first_step))
        display = Display(config.max_steps, first_step=first_step, shown=cluster.is_first)
        run = Run(
            config,
            cluster,
            program,
            available,
            batches,
            text.validation,
            text.unigram,
            checkpoints,
            writer,
            display,
            Recorder(_recorder_config(config, program), writer, display),
            StopAgreement(stack.enter_context(StopRequest()), program.mesh),
        )
        try:
            with display:
                state = _loop(run, state, train_step)
        except (TrainingFailure, OSError) as failure:
            cluster.end_if_alone(failure)
            raise
    _finish(run, state, tokenizer, directory)
    return run.stop.signal if int(state.step) < config.max_steps else None


def _loop(run: Run, state: TrainState, train_step: Any) -> TrainState:
    """Trains until max_steps or a signal; leaves a checkpoint of the state that it returns.

    Raises:
      TrainingFailure: too many steps in a row were not finite, or a checkpoint cannot be written.
    """
    config, program, recorder = run.config, run.program, run.recorder
    first_step = step = saved_step = int(state.step)
    pending = None  # the step that has not been recorded yet
    save_is_due = False

    def save() -> None:
        position = run.batches.get_state()
        run.checkpoints.save(state, data=position, config=dataclasses.asdict(config))

    while step < config.max_steps and not run.stop.is_due():
        if step == program.finish_step and step > first_step:
            with recorder.pause():
                train_step = _compile(program, run.cluster, step, run.available)
        begin = time.perf_counter()
        batch = program.place(next(run.batches))
        data_seconds = time.perf_counter() - begin
        state, metrics = train_step(state, batch)
        step += 1

        # While this step runs, the one before it is recorded, so that the device never waits for
        # us; unless something needs this step's state now.
        if pending is not None:
            recorder.record(*pending)
        pending = (step, metrics, data_seconds)
        run.checkpoints.check()
        is_first, is_last = step == first_step + 1, step == config.max_steps
        evaluation_is_due = is_last or _is_due(step, config.evaluate_every)
        save_is_due |= is_last or _is_due(step, config.save_every)
        if not (is_first or evaluation_is_due or save_is_due):
            continue
        skips = recorder.record(*pending)
        pending = None
        if is_first:
            run.display.note(f"first step after {duration(time.monotonic() - _STARTED)}")
        with recorder.pause():
            if evaluation_is_due and run.validation.num_tokens:
                run.last_evaluation = result = _evaluate(run, state, step)
                row = {"validation_loss": result.loss, "bits_per_byte": result.bits_per_byte}
                run.writer.write({"step": step, **row})
                if not is_last:
                    run.display.note(_evaluation_line(step, result, run.unigram))
            # Not amid skipped steps: saves of an unchanged state would push out older checkpoints.
            if save_is_due and (skips == 0 or is_last):
                save()
                save_is_due, saved_step = False, step
    if pending is not None:
        recorder.record(*pending)
    if step != saved_step:  # stopped by a signal
        save()
    run.checkpoints.wait()
    return state


def _finish(run: Run, state: TrainState, tokenizer: data.Tokenizer, directory: Path) -> None:
    """Says how it went, shows some text, and where everything lies."""
    config, step = run.config, int(state.step)
    if step < config.max_steps:
        assert run.stop.signal is not None
        run.cluster.say(
            f"stopped by {run.stop.signal.name} after step {step} of {config.max_steps}; to go on, "
            f"give the same command with output_dir={directory}"
        )
    else:
        if run.validation.num_tokens:
            result = run.last_evaluation or _evaluate(run, state, step)
            run.cluster.say(_evaluation_line(step, result, run.unigram))
        if config.sample_tokens:
            generated = sample_tokens(
                run.program.graphdef(finish=run.program.is_finish(step - 1)),
                state.parameters,
                [tokenizer.start_id],
                num_tokens=config.sample_tokens,
                seed=config.seed,
                vocab_size=tokenizer.vocab_size,
                max_positions=config.model.max_positions,
                stop_token=tokenizer.eos_id,
            )
            run.cluster.say(f"sample:\n{tokenizer.decode(generated)}")
    run.cluster.say(f"checkpoints: {directory / FOLDER}\nmetrics: {directory / METRICS_FILE}")


def _compile(program: Program, cluster: Cluster, step: int, available: int) -> Any:
    """The train step for the step after `step` finished ones, which fits into the memory."""
    cluster.say("compiling the step")
    begin = time.monotonic()
    with cluster.together():
        compiled = program.compile_train_step(finish=program.is_finish(step))
        needed = memory.check_compiled(compiled, available, program.mesh, program.config.remat)
    what = "the step with the BF16 forward pass" if program.is_finish(step) else "the step"
    cluster.say(
        f"compiled {what} in {duration(time.monotonic() - begin)}; it needs "
        f"{needed / memory.GIB:.2f} GiB per device"
    )
    return compiled


@dataclass
class Text:
    """What a run reads."""

    tokenizer: data.Tokenizer
    batches: data.TrainIterator  # this process's rows of each batch
    validation: Validation
    unigram: float  # nats per token, of token frequencies on the validation batches

    def settings(self) -> dict[str, str]:
        """What has to be the same in every process."""
        corpus = self.batches.corpus
        return {"tokenizer": self.tokenizer.fingerprint, "corpus": corpus.digest}


def _text(config: TrainConfig, program: Program) -> Text:
    """Tokenises what has not been tokenised yet."""
    tokenizer = data.load_tokenizer(config.data, config.model.vocab_size)
    batches = data.make_train_iterator(
        config.data,
        tokenizer,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        rows=program.batch_rows,
    )
    sizes = {
        "batch_size": program.evaluation_rows,
        "sequence_length": config.sequence_length,
        "max_batches": config.evaluation_batches,
    }
    validation = Validation(
        data.make_validation_batches(config.data, tokenizer, **sizes),
        tokenizer.token_byte_lengths(),
        program.place_for_evaluation,
        loss_chunks=program.loss_chunks,
    )
    return Text(tokenizer, batches, validation, data.unigram_loss(config.data, tokenizer, **sizes))


def _shared_settings(config: TrainConfig) -> dict[str, Any]:
    """What has to be the same in every process, by key."""
    own = ("cluster.process_id", "data.cache_dir")
    settings = {key: value for key, value in values(config).items() if key not in own}
    return settings | {"version of JAX": jax.__version__, "version of fp4zoo": __version__}


def _evaluate(run: Run, state: TrainState, step: int) -> Evaluation:
    """Evaluates the state after `step` steps as it was last trained."""
    graphdef = run.program.graphdef(finish=run.program.is_finish(step - 1))
    with jax.set_mesh(run.program.mesh):
        return run.validation.evaluate(graphdef, state.parameters)


def _evaluation_line(step: int, result: Evaluation, unigram: float) -> str:
    difference = result.loss / unigram - 1
    return (
        f"step {step}: validation loss {result.loss:.4f} nats/token, "
        f"{result.bits_per_byte:.4f} bits/byte (unigram model: {unigram:.4f} nats/token; this is "
        f"{abs(difference):.1%} {'above' if difference > 0 else 'below'} it)"
    )


def _recorder_config(config: TrainConfig, program: Program) -> RecorderConfig:
    devices = list(program.mesh.devices.flat)
    peak = peak_flops(devices[0])
    tokens = config.batch_size * config.sequence_length
    return RecorderConfig(
        log_every=config.log_every,
        max_steps=config.max_steps,
        max_consecutive_skips=config.precision.loss_scale.max_consecutive_skips,
        gradient_names=gradient_names(program.state.parameters),
        tokens_per_step=tokens,
        flops_per_step=tokens * flops_per_token(config.model, config.sequence_length),
        peak_flops=peak * len(devices) if peak else None,
    )


def _save_tokenizer(tokenizer: data.Tokenizer, directory: Path) -> None:
    """Beside the checkpoints, so that the run's folder is all that generating text needs."""
    folder = directory / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    sys.exit(main())
