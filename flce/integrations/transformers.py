"""transformers: a callback for its Trainer. Importing this module imports transformers."""

from collections.abc import Sequence
from typing import Literal

from torch import nn
from typing_extensions import Unpack

from flce.fusion.handle import Fusion, fuse
from flce.fusion.head import DATA_PARALLEL, find_fusion_in
from flce.options import FuseOptions, show_options

from ._rebind import imports_of

with imports_of("transformers"):
    from transformers import TrainerCallback


class FuseCallback(TrainerCallback):
    """Fuses the model of a Trainer when the Trainer is made, or when training begins, if that
    makes another (model_init): ``Trainer(model, ..., callbacks=[FuseCallback()])``.

    The model stays fused until `handle.remove()`; use a new callback for each Trainer. TRL's
    trainers do not call the head: flce.integrations.trl serves them.

    Args:
        head, when, strict, **options: as in `flce.fuse`. when="always" serves a compute_loss_func
            that calls F.cross_entropy.

    handle: what `flce.fuse` returned last; None before the Trainer is made. Raises as `flce.fuse`,
    and ValueError where the Trainer will use nn.DataParallel.
    """

    handle: Fusion | None

    @show_options
    def __init__(
        self,
        head: str | nn.Module | Sequence[str | nn.Module] | None = None,
        *,
        when: Literal["labels", "always"] = "labels",
        strict: bool = False,
        **options: Unpack[FuseOptions],
    ) -> None:
        self.arguments = {"head": head, "when": when, "strict": strict, **options}
        self.handle = None

    def on_init_end(self, args, state, control, model=None, **others):
        """After adapters have been added and before the model is wrapped for several processes."""
        self._fuse(args, model)

    def on_train_begin(self, args, state, control, model=None, **others):
        """model_init makes a new model for each training; and a callback that was added to a
        Trainer has not seen it being made."""
        known = None if self.handle is None else self.handle.model
        if model is not None and model is not known and find_fusion_in(model) is None:
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
