"""transformers: a callback for its Trainer. Importing this module imports transformers."""

from transformers import TrainerCallback

from flce.fusion.handle import fuse
from flce.fusion.head import DATA_PARALLEL, fusion_of


class FuseCallback(TrainerCallback):
    """Fuses the model of a Trainer when the Trainer is made, or when training begins, if that
    makes another (model_init): ``Trainer(model, ..., callbacks=[FuseCallback()])``.

    The model stays fused until `handle.remove()`; use a new callback for each Trainer. TRL's
    trainers do not call the head: flce.integrations.trl serves them.

    Args:
        head, strict, **options: as in `flce.fuse`. when="always" serves a compute_loss_func that
            calls F.cross_entropy.

    handle: what `flce.fuse` returned last; None before the Trainer is made. Raises as `flce.fuse`,
    and ValueError where the Trainer will use nn.DataParallel.
    """

    def __init__(self, head=None, *, strict=False, **options):
        self.arguments = {"head": head, "strict": strict, **options}
        self.handle = None

    def on_init_end(self, args, state, control, model=None, **others):
        """After adapters have been added and before the model is wrapped for several processes."""
        self._fuse(args, model)

    def on_train_begin(self, args, state, control, model=None, **others):
        """model_init makes a new model for each training; and a callback that was added to a
        Trainer has not seen it being made."""
        known = None if self.handle is None else self.handle.model
        if model is not None and model is not known and fusion_of(model) is None:
            self._fuse(args, model)

    def on_step_end(self, args, state, control, **others):
        """Also where an optimizer steps copies of the parameters, which a Fusion does not know."""
        if self.handle is not None:
            self.handle.tell_if_unused()

    def _fuse(self, args, model):
        if args.n_gpu > 1:
            raise ValueError(f"FuseCallback: {DATA_PARALLEL}; launch one process for each GPU")
        if self.handle is not None:
            self.handle.remove()
        self.handle = fuse(model, **self.arguments)
