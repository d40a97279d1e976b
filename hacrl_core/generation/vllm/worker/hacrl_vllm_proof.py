"""Are the weights in vLLM's memory those of a checkpoint?

They are compared in the engine's own dtype, without a copy of the model. vLLM fuses, shards, pads and renames what it
loads, so its parameters cannot be compared with the checkpoint by name. Its own weight loaders know which slice of
which parameter a tensor goes to: they are run once more over the files, and each copy that they want to make becomes a
comparison. Nothing is written.
"""

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

ROWS = 4096  # compared at a time: on a GPU the KV cache leaves little room
COLUMNS = 64  # read back of each packed weight: costs as much as a prompt of so many tokens


@torch.no_grad()
def differing(model: Any, folder: str) -> list[str]:
    """Names of the parameters that are not what the checkpoint says; empty: all weights are proved."""
    try:
        with _unpacked(model) as stale, _Comparison(model) as comparison:
            model.load_weights(_tensors(folder))
        return sorted(stale | comparison.unproved())
    except Exception as error:  # a model whose loaders do not run twice: nothing is proved, and nothing is broken
        traceback.print_exc()
        return [f"none can be compared: {type(error).__name__}: {error}"]


def _tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class _Comparison(TorchFunctionMode):
    """While active, a write to a parameter (``copy_``, or ``fill_`` where it is padded) compares instead of writing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.numel()}
        self._partly = {name for name, p in model.named_parameters() if hasattr(p, "hacrl_read_back")}
        self._equal: dict[str, dict[Any, int]] = {name: {} for name in self._sizes}  # number of elements, by slice
        self._wrong: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        action = getattr(func, "__name__", "")
        name = self._names.get(args[0].untyped_storage().data_ptr()) if action in ("copy_", "fill_") else None
        if name is None:
            return func(*args, **(kwargs or {}))
        here, wanted = args[0], torch.as_tensor(args[1]).expand_as(args[0])
        mine_pieces = torch.atleast_1d(here).split(ROWS)  # type: ignore[no-untyped-call]
        their_pieces = torch.atleast_1d(wanted).split(ROWS)  # type: ignore[no-untyped-call]
        pieces = zip(mine_pieces, their_pieces, strict=True)
        if all(self._same(mine, theirs.to(mine.device, mine.dtype), name in self._partly) for mine, theirs in pieces):
            self._equal[name][here.storage_offset(), here.shape] = here.numel()
        else:
            self._wrong.add(name)
        return here

    @staticmethod
    def _same(here: torch.Tensor, wanted: torch.Tensor, partly: bool) -> bool:
        same = here == wanted
        return bool((same | here.isnan() if partly else same).all())  # NaN: not read back

    def unproved(self) -> set[str]:
        """Slices found wrong, and parameters that the checkpoint does not reach, whole or in part."""
        return self._wrong | {name for name, size in self._sizes.items() if sum(self._equal[name].values()) != size}


@contextlib.contextmanager
def _unpacked(model: Any) -> Iterator[set[str]]:
    """On CPU vLLM multiplies by packed copies, and for most layers keeps nothing else.

    A product with rows of the unit matrix reads columns of such a copy back, exactly in any dtype: each sum has one
    term that is not zero. Layers without weights of their own get these for the time of the comparison, with NaN for
    what was not read; where both are kept and differ, the name is yielded.
    """
    kept: list[tuple[Any, Any]] = []
    stale: set[str] = set()
    try:
        for name, module in model.named_modules():
            if not hasattr(module, "cpu_linear"):
                continue
            from vllm.model_executor.model_loader.reload import layerwise, sanitize  # type: ignore[import-not-found]

            # Shape and loader; it has no values.
            loadable = layerwise.get_layerwise_info(module).restore_metadata[0]["weight"]
            weight = _read_back(module, loadable)
            if module.weight.numel():
                if not ((module.weight == weight) | weight.isnan()).all():
                    stale.add(f"{name}.weight (packed)")
                continue
            weight.__class__, weight.__dict__ = loadable.__class__, dict(loadable.__dict__)
            weight = sanitize.restore_layer_refs(weight, module)
            weight.hacrl_read_back = True
            original = inspect.unwrap(weight.weight_loader, stop=lambda f: f.__name__ != "online_process_loader")
            # A reload leaves a wrapper behind that puts weights off instead of loading them.
            weight.weight_loader = original
            kept.append((module, module.weight))
            module.weight = weight
        yield stale
    finally:
        for module, weight in kept:
            module.weight = weight


def _read_back(module: Any, loadable: torch.Tensor) -> Any:
    """Return up to 64 columns, evenly spread from the first to the last.

    A loader fills rows, so each of its slices is in all of the columns.
    """
    outputs, inputs = loadable.shape
    columns = torch.linspace(0, inputs - 1, min(inputs, COLUMNS)).round().long()
    weight = torch.full((outputs, inputs), float("nan"), dtype=loadable.dtype)
    unit = torch.zeros(len(columns), inputs, dtype=loadable.dtype).scatter_(1, columns[:, None], 1.0)
    weight[:, columns] = module.cpu_linear(unit, module.weight, None).t()
    return weight
