"""Lightning's checkpoint dict as plain JSON and back, exactly and without any pickle.

What a checkpoint holds beside the weights (loops, callbacks, schedulers, counters) is small and must not be able to
run code when it is read. Values outside JSON are tagged, `{"__tuple__": [...]}`; anything else is refused, by key.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whale_trainer.errors import CheckpointError

_REMEDIES = {
    "callbacks": "return plain values (numbers, strings, lists, dicts, tensors) from the callback's state_dict()",
    "hyper_parameters": "leave it out: save_hyperparameters(ignore=[...])",
    "lr_schedulers": "return plain values from the scheduler's state_dict()",
    "optimizer_states": "give the optimizer plain numbers and tuples as arguments",
}
_DEFAULT_REMEDY = "add plain values only (numbers, strings, lists, dicts, tensors) in on_save_checkpoint"


def encode(value: Any, path: str = "") -> Any:
    """JSON data for `value`; raises `CheckpointError` naming the key of anything that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"__float__": str(value)}
    if kind is list:
        return [encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if kind is tuple:
        return {"__tuple__": [encode(v, f"{path}[{i}]") for i, v in enumerate(value)]}
    if kind in (dict, Counter, OrderedDict):
        return _encode_dict(value, path)
    if isinstance(value, Tensor):
        return {"__tensor__": _encode_tensor(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {"__numpy__": _encode_numpy(value)}
    if kind.__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return encode(OmegaConf.to_container(value, resolve=True), path)
    raise CheckpointError(_refusal(value, path))


def decode(data: Any) -> Any:
    """The value that `encode` was given; raises `CheckpointError` for a tag that this release does not know."""
    if isinstance(data, list):
        return [decode(v) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        tag, content = next(iter(data.items()))
        if _is_tag(tag):
            if tag not in _DECODERS:
                raise CheckpointError(f"the checkpoint's state holds {tag!r}, which this release cannot read")
            return _DECODERS[tag](content)
    return {k: decode(v) for k, v in data.items()}


def _is_tag(key: str) -> bool:
    return key.startswith("__") and key.endswith("__")


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    kind = type(value)
    if kind is dict and all(type(k) is str and not _is_tag(k) for k in value):
        return {k: encode(v, f"{path}.{k}" if path else k) for k, v in value.items()}
    items = [[encode(k, f"{path} (a key)"), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
    tag = {dict: "__dict__", Counter: "__counter__", OrderedDict: "__ordered_dict__"}[kind]
    return {tag: items}


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode(),
    }


def _decode_tensor(content: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, content["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint's state holds a tensor of unknown dtype {content['dtype']!r}")
    data = bytearray(base64.b64decode(content["data"]))
    if not data:
        return torch.empty(content["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(content["shape"])


def _encode_numpy(value: np.ndarray[Any, Any] | np.generic) -> dict[str, Any]:
    return {
        "dtype": value.dtype.str,
        "shape": list(value.shape),
        "scalar": isinstance(value, np.generic),
        "data": base64.b64encode(value.tobytes()).decode(),
    }


def _decode_numpy(content: dict[str, Any]) -> Any:
    array = np.frombuffer(base64.b64decode(content["data"]), dtype=np.dtype(content["dtype"]))
    return array[0] if content["scalar"] else array.reshape(content["shape"]).copy()


def _decode_items(content: list[list[Any]]) -> dict[Any, Any]:
    return {decode(k): decode(v) for k, v in content}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "__float__": float,
    "__tuple__": lambda content: tuple(decode(v) for v in content),
    "__dict__": _decode_items,
    "__counter__": lambda content: Counter(_decode_items(content)),
    "__ordered_dict__": lambda content: OrderedDict(_decode_items(content)),
    "__tensor__": _decode_tensor,
    "__numpy__": _decode_numpy,
}


def _refusal(value: Any, path: str) -> str:
    section = path.split(".")[0].split("[")[0]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    remedy = _REMEDIES.get(section, _DEFAULT_REMEDY)
    return f"a checkpoint holds plain data only, and {path or 'its state'} is a {kind}: {remedy}"
