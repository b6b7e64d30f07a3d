"""transformers: a callback for its Trainer. Importing this module imports transformers."""

import warnings

from transformers import TrainerCallback

from flce.deferred.fusion import fuse
from flce.deferred.head import DATA_PARALLEL, fusion_of


class FuseCallback(TrainerCallback):
    """Fuses the model of a Trainer when the Trainer is made, or when training begins, if that
    makes another (model_init). TRL's trainers do not call the head: flce.integrations.trl serves
    them.

        Trainer(model, ..., callbacks=[flce.integrations.transformers.FuseCallback()])

    The model stays fused until `handle.remove()`; use a new callback for each Trainer.

    Args:
        head, strict, **options: as in `flce.fuse`; `when` is "labels".

    Attributes:
        handle: what `flce.fuse` returned last; None before the Trainer is made.

    Raises: as `flce.fuse`, and ValueError where the Trainer will use nn.DataParallel.
    """

    def __init__(self, head=None, *, strict=False, **options):
        self.arguments = {"head": head, "strict": strict, **options}
        self.handle = None
        self._is_told = False  # whether the first step is over, or needs no warning

    def on_init_end(self, args, state, control, model=None, **others):
        """After adapters have been added and before the model is wrapped for several processes."""
        self._fuse(args, model)
        if args.label_smoothing_factor != 0:
            warnings.warn(
                "FuseCallback: label_smoothing_factor: the Trainer calls the model without "
                "labels and smooths its logits itself, so all logits are made",
                stacklevel=2,
            )
            self._is_told = True

    def on_train_begin(self, args, state, control, model=None, **others):
        """model_init makes a new model for each training; and a callback that was added to a
        Trainer has not seen it being made."""
        known = None if self.handle is None else self.handle.model
        if model is not None and model is not known and fusion_of(model) is None:
            self._fuse(args, model)

    def on_step_end(self, args, state, control, **others):
        # A head that is left alone has been warned of.
        if self._is_told or self.handle is None or not self.handle.is_attached():
            return
        self._is_told = True
        if not self.handle.losses and not self.handle.fallbacks:
            warnings.warn(
                "FuseCallback: expected the model to compute its loss from labels, got none in "
                "the first step (compute_loss_func and some compute_loss methods take them away), "
                "so all logits are made",
                stacklevel=2,
            )

    def _fuse(self, args, model):
        if args.n_gpu > 1:
            raise ValueError(f"FuseCallback: {DATA_PARALLEL}; launch one process for each GPU")
        if self.handle is not None:
            self.handle.remove()
        self.handle = fuse(model, **self.arguments)
