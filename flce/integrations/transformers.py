"""transformers: a callback for its Trainer. Importing this module imports transformers."""

import warnings

from transformers import TrainerCallback

from flce.deferred.fusion import fuse
from flce.deferred.head import DATA_PARALLEL


class FuseCallback(TrainerCallback):
    """Fuses the model of a Trainer when the Trainer is made. TRL's trainers do not call the head:
    flce.integrations.trl serves them.

        Trainer(model, ..., callbacks=[flce.integrations.transformers.FuseCallback()])

    The model stays fused until `handle.remove()`; use a new callback for each Trainer.

    Args:
        head, strict, **options: as in `flce.fuse`; `when` is "labels".

    Attributes:
        handle: what `flce.fuse` returned; None before the Trainer is made.

    Raises: as `flce.fuse`, and ValueError where the Trainer will use nn.DataParallel.
    """

    def __init__(self, head=None, *, strict=False, **options):
        self.arguments = {"head": head, "strict": strict, **options}
        self.handle = None

    def on_init_end(self, args, state, control, model=None, **others):
        """After adapters have been added and before the model is wrapped for several processes."""
        if args.n_gpu > 1:
            raise ValueError(f"FuseCallback: {DATA_PARALLEL}; launch one process for each GPU")
        if args.label_smoothing_factor != 0:
            warnings.warn(
                "FuseCallback: label_smoothing_factor: the Trainer calls the model without "
                "labels and smooths its logits itself, so all logits are made",
                stacklevel=2,
            )
        self.handle = fuse(model, **self.arguments)
