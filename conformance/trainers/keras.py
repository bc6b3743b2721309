"""Keras 3 on torch: ``fit`` with the optimizer's ``gradient_accumulation_steps``."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

from conformance.cases import LEARNING_RATE, Sample
from conformance.job import Job, UnsupportedError
from conformance.verdict import DECAY_OF_AVERAGE

TITLE, VERSION_OF = "Keras 3", "keras"
DOCS = "https://keras.io/api/optimizers/"
FEATURES = {"clip", "ema", "evaluate"}


def train(job: Job) -> None:
    """Train with the arguments of the pages on optimizers and on ``fit``; Keras computes the loss."""
    if job.case.model not in ("bag", "classifier") or job.case.dtype != torch.float64:
        raise UnsupportedError("the loss of this case is not one of Keras for a wrapped torch module")
    keras.config.set_floatx("float64")

    class RecordedSGD(keras.optimizers.SGD):
        """Tells the recorder what an update is given: torch's hooks do not see optimizers of Keras."""

        def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
            names = {one.data_ptr(): name for name, one in job.module.named_parameters()}
            found = zip(trainable_variables, grads, strict=True)
            job.recorder.keep({names[one.value.data_ptr()]: gradient for one, gradient in found}, float(learning_rate))
            super()._backend_update_step(grads, trainable_variables, learning_rate)
            job.recorder.last = job.recorder.weights()  # fit ends with the average in the model

    class Logits(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = keras.layers.TorchModuleWrapper(job.module)

        def call(self, inputs: Any) -> Any:
            return self.wrapped(**inputs)["logits"]

    model = Logits()
    model.compile(
        optimizer := RecordedSGD(
            LEARNING_RATE,
            gradient_accumulation_steps=job.case.accumulation,
            global_clipnorm=job.clip_norm,
            use_ema=job.needs("ema"),
            ema_momentum=DECAY_OF_AVERAGE,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    size, epochs = job.case.micro_batch_size, job.case.epochs
    model.fit(*arrays(job, job.dataset), batch_size=size, epochs=epochs, shuffle=False, verbose=0)
    if job.needs("ema"):
        found = optimizer._model_variables_moving_average
        averages = zip(model.trainable_variables, found, strict=True)
        names = {one.data_ptr(): name for name, one in job.module.named_parameters()}
        job.average = {names[one.value.data_ptr()]: average.value.detach() for one, average in averages}
    if job.needs("evaluate"):
        job.evaluation_loss = model.evaluate(*arrays(job, job.evaluation_set), batch_size=size, verbose=0)


def arrays(job: Job, samples: list[Sample]) -> tuple[Any, Any]:
    """Return the inputs and the labels of samples."""
    batch = {key: value.numpy() for key, value in job.collate(samples).items()}
    labels = batch.pop("labels")
    return batch, labels
