"""Run exported graphs of models on CPUs with onnxruntime or OpenVINO. Both are imported at first
use, and neither may send usage data over the network.
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from rayembed.errors import ArtifactError, require_packages
from rayembed_extras.compression.settings import GraphConfig, Runtime

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""Runs a graph with inputs by name, ignoring unknown ones, and returns its output."""

_TELEMETRY = "openvino_telemetry"

_GROUP = 32
"""Number of neighbouring activations that share a scale in OpenVINO's dynamic int8."""


def import_openvino() -> Any:
    """Import `openvino` with its telemetry off."""
    without_telemetry()
    require_packages("an OpenVINO graph", "compress", "openvino")
    import openvino

    return openvino


def import_onnxruntime() -> Any:
    """Import `onnxruntime` with its event reporting off."""
    require_packages("an ONNX graph", "compress", "onnxruntime")
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def without_telemetry() -> None:
    """Stop OpenVINO and NNCF from reporting their use, in this process.

    Both report each import and call to Google Analytics unless a file in the user's home says no
    (`opt_in_out --opt_out`), and take a stub where `openvino_telemetry` is not installed. It is
    made to look like that here, so that nothing is written into anyone's home.
    """
    loaded: Any = sys.modules.get(_TELEMETRY)
    if loaded is None:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment] # as import has it: not there
        return
    # Another part of the program has imported it before: its sender is stopped.
    loaded.Telemetry.send_event = loaded.Telemetry.start_session = _nothing
    loaded.Telemetry.end_session = loaded.Telemetry.send_error = _nothing
    loaded.Telemetry.send_stack_trace = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Graph:
    """A graph stored in a file; picklable, and opened at its first use in each process.

    It computes with as many threads as torch has then, and is reopened when that changes.
    """

    def __init__(self, path: Path, config: GraphConfig) -> None:
        self.path, self.config = Path(path), config
        self._opened: tuple[tuple[int, int], Run] | None = None
        self._lock = threading.Lock()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the graph; return its float32 output.

        Raises:
            ArtifactError: the file is missing or damaged.
            ConfigError: the runtime is not installed.
        """
        with self._lock:
            state = (os.getpid(), torch.get_num_threads())
            if self._opened is None or self._opened[0] != state:
                self._opened = state, _OPEN[self.config.runtime](self.path, state[1], self.config)
            return self._opened[1](inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _open_onnx(path: Path, threads: int, config: GraphConfig) -> Run:
    del config
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # warnings tell of nothing that a user could change
    # Threads that wait for the next batch would take the cores of other models beside this one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001 # each of its errors is a class of its own
        _damaged(path, error)
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        found: np.ndarray = session.run(None, {name: inputs[name] for name in names})[0]
        return found

    return run


def _open_openvino(path: Path, threads: int, config: GraphConfig) -> Run:
    openvino = import_openvino()
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",  # one batch at a time, by all threads
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[config.floats],
        # Activations of int8 weights have a scale for each group of that size; 0: they stay float.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP if config.precision == "int8-dynamic" else 0,
    }
    try:
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(path), "CPU", properties)
    except RuntimeError as error:
        _damaged(path, error)
    request = compiled.create_infer_request()
    names = [one.get_any_name() for one in compiled.inputs]
    output = compiled.output(0)

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        # Copied: the next call writes into the same memory.
        found: np.ndarray = request.infer({name: inputs[name] for name in names})[output].copy()
        return found

    return run


def _damaged(path: Path, error: Exception) -> NoReturn:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ArtifactError(
        f"the graph {str(path)!r} cannot be opened: {said}; copy the model's folder again, or "
        "export the graph again from the original model"
    ) from error


_OPEN: dict[Runtime, Callable[[Path, int, GraphConfig], Run]] = {
    "onnx": _open_onnx,
    "openvino": _open_openvino,
}
