"""From runs to the session that trains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.errors import UserError
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel, declare_decoder
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.models.quant_constants import QuantConstants
from wgpu_lora.names.spelling import flag
from wgpu_lora.ops.activation_storage import Saving
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.run_checkpoint import Trainable
from wgpu_lora.train.run.trained_weights import TrainableAdapter, TrainableQuantScales
from wgpu_lora.train.session.data_stream import group_lengths, quarters
from wgpu_lora.train.session.rollout_stream import RolloutStream
from wgpu_lora.train.session.session import Sampling, Session


def with_base_dtype(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """The same model with another base dtype, for planning. A model that is stored in a base format keeps it."""
    decoder = model.decoder
    if decoder.base_dtype == base_dtype or model.config.packed:
        return model
    new_decoder = declare_decoder(model.config, model.checkpoint, base_dtype, model.device)
    return replace(model, decoder=new_decoder, weights_loaded=False)


def trainable_parameters(model: LoadedModel, trainables: Sequence[Trainable]) -> ParameterSet:
    """The parameters of these slots."""
    first, *_ = trainables
    if isinstance(first, TrainableQuantScales):
        return QuantConstants.declare(first.weights, model.device.max_binding)
    adapters = [trainable for trainable in trainables if isinstance(trainable, TrainableAdapter)]
    return AdapterSet.declare(model.config, [adapter.spec for adapter in adapters], model.device.max_binding)


def prepare_session(
    model: LoadedModel,
    runs: Sequence[AdapterRun],
    *,
    batch_tokens: int | None = None,
    evaluation_only: bool = False,
) -> Session:
    """The session of the runs, a slot each; other settings are taken from the first run's options.

    Args:
        batch_tokens: maximum tokens of a batch that slots share, or that is computed in parts.
        evaluation_only: for the held-out loss of the model itself, by the objective of the run.
    """
    buckets = runs[0].stream.buckets() if batch_tokens is None else quarters(batch_tokens)
    trained: ParameterSet
    if evaluation_only:
        empty_slot = SlotSpec(1, {next(iter(model.config.lora_modules)): 1.0})  # B is zero
        trained = AdapterSet.declare(model.config, [empty_slot], model.device.max_binding)
    else:
        trained = trainable_parameters(model, [run.trainable for run in runs])
    args = runs[0].args
    heldout = [n for run in runs if run.heldout and not run.rollouts for n in group_lengths(run.heldout)]
    streams = [s for run in runs for s in (run.stream, run.heldout_stream if run.heldout else None) if s]
    return Session(
        model,
        trained,
        [] if evaluation_only else buckets,
        positions=max(stream.longest for stream in streams),
        dropout=any(run.args.lora_dropout > 0 and run.args.train != "quant-scales" for run in runs),
        recompute=args.gradient_checkpointing,
        compute_dtype=args.compute_dtype,
        saving=Saving(args.activation_dtype, args.offload_activations),
        objectives=[run.stream.objective for run in runs],
        optim=optimizer_of(args),
        eval_tokens=max([buckets[-1], *heldout]) if heldout else 0,
        references={run.slot: run.reference.spec for run in runs if run.reference},
        teachers={run.slot: run.teacher for run in runs if run.teacher},
        mismatched=max(stream.longest_mismatched for stream in streams),
        sampling=sampling_of([stream for stream in streams if isinstance(stream, RolloutStream)]),
    )


def sampling_of(streams: Sequence[RolloutStream]) -> Sampling | None:
    """The sizes of the engine that samples for all of these streams. Raises UserError if their temperatures differ."""
    if not streams:
        return None
    sizes = [stream.sampling for stream in streams]
    if len({size.temperature for size in sizes}) > 1:
        raise UserError(
            f"Adapters that are trained together must sample at one {flag('temperature')}: give all the same."
        )
    return Sampling(max(size.sequences for size in sizes), max(size.tokens for size in sizes), sizes[0].temperature)
