"""Round weights to 8 bits (int8, fp8) for GPUs, to the nearest value; base of GPTQ.

Weights are 8 bits wide with one scale for each output of a layer, inputs are rounded to 8 bits with
one scale for each token when the model runs. The files are in compressed-tensors format, which
transformers, sentence-transformers and vLLM load.

F outputs and H inputs of a linear layer.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from rayembed.errors import ArtifactError, ConfigError, require_packages
from rayembed_extras.compression.contract import (
    CalibrationText,
    Compressed,
    Compression,
    CompressionSource,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix

Scheme = Literal["INT8", "FP8_DYNAMIC"]
"""Names of the 8-bit rounding schemes of weights and inputs in compressed-tensors."""


class Quantity(NamedTuple):
    """A quantised matrix and its scales."""

    values: "Tensor"
    """(F, H) int8 or float8_e4m3fn."""
    scale: "Tensor"
    """(F, 1) in the model's type: a weight is its value times this."""


Weights = dict[str, Quantity]
"""Quantised matrices by the parameters' names."""

_FORMATS: dict[Scheme, str] = {"INT8": "int-quantized", "FP8_DYNAMIC": "float-quantized"}
_STORED: dict[Scheme, str] = {"INT8": "I8", "FP8_DYNAMIC": "F8_E4M3"}
"""Names of the types in files of safetensors."""


class Quantised(Compression):
    """Base class of methods that round weights of linear layers to 8 bits when saving, and their
    inputs when running.
    """

    skip: tuple[str, ...] | None = None
    """Patterns of names of parameters that are left alone, such as `*.attention.*`; null: all
    outside of the transformers' layers, including heads and poolings. Routers of experts,
    embeddings, norms and biases are never quantised."""

    scheme: ClassVar[Scheme] = "INT8"
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors",)
    """Packages needed beyond rayembed's own requirements."""

    def check(self, folder: Path) -> None:
        """Check that packages are installed and that transformers can read all layers that will be
        quantised.
        """
        from rayembed.models.loading.load import empty_model
        from rayembed.models.loading.saved_folder import SETTINGS_FILE
        from rayembed_extras.compression.calibration import check_layers
        from rayembed_extras.compression.matrices import matrices_of

        require_packages(self.kind, "compress", *self.packages)
        model = empty_model(folder)
        chosen = matrices_of(model, self.skip)
        _check_form(self, model, chosen)
        if (folder / SETTINGS_FILE).is_file():  # else the names are those of who published it
            _check_names(self, model, chosen, folder)
        check_layers(self, model)

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the quantised model."""
        import torch

        from rayembed.assets.finite import check_finite_files
        from rayembed.models.loading.saved_folder import part_folder
        from rayembed.models.loading.saved_prompts import saved_instructions
        from rayembed.models.saving.export import check_target, new_folder
        from rayembed_extras.compression.calibration import check_texts, loaded_as_saved
        from rayembed_extras.compression.matrices import matrices_of, statistics_of

        require_packages(self.kind, "compress", *self.packages)
        check_target(output)
        check_texts(self, source.texts)
        model = loaded_as_saved(self, source.folder)
        chosen = matrices_of(model, self.skip)
        _check_form(self, model, chosen)
        made = statistics_of(model, chosen)
        with new_folder(output) as written:
            model.save(written, instructions=saved_instructions(source.folder, model.config))
            _check_names(self, model, chosen, written)
            with torch.no_grad():
                weights = self.weights(model, chosen, source.texts)
            for name, part in model.parts.items():
                _write_part(self.scheme, name, part, weights, part_folder(written, name))
            check_finite_files(written)
            _check_written(self, model, weights, written)
            made.write(self, source.folder, written)
        return made

    def weights(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> Weights:
        """Return the quantised weights by parameter name; here each weight is rounded to the
        nearest value.
        """
        return nearest_weights(self.scheme, matrices)


class Int8(Quantised):
    """8-bit integer weights and inputs, symmetric around zero; no calibration texts."""

    kind: Literal["int8"] = "int8"

    scheme: ClassVar[Scheme] = "INT8"


class Fp8(Quantised):
    """E4M3 weights and inputs, for GPUs from Ada and Hopper on; no calibration texts."""

    kind: Literal["fp8"] = "fp8"

    scheme: ClassVar[Scheme] = "FP8_DYNAMIC"


def arguments(scheme: Scheme) -> Any:
    """Return the weight settings of a rounding scheme, in compressed-tensors' terms."""
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme(scheme, ["Linear"]).weights


def scale_of(weight: "Tensor", scheme: Scheme) -> "Tensor":
    """(F, 1) scale of each row of a matrix, in the matrix's number type."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows = weight.float()
    scale: Tensor = calculate_qparams(
        rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True), arguments(scheme)
    )[0]
    return scale.to(weight.dtype)


def rounded(weight: "Tensor", scale: "Tensor", scheme: Scheme) -> "Tensor":
    """(F, H) nearest representable values of the weights divided by their scales."""
    import torch

    scaled = weight.float() / scale.float()
    if scheme == "INT8":
        return scaled.round().clamp(-128, 127).to(torch.int8)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)


def nearest_weights(scheme: Scheme, matrices: "Sequence[Matrix]") -> Weights:
    """Quantise the matrices by rounding each weight to the nearest value."""
    made: Weights = {}
    for matrix in matrices:
        (weight,) = matrix.slices
        scale = scale_of(weight, scheme)
        made[matrix.name] = Quantity(rounded(weight, scale, scheme).cpu(), scale.cpu())
    return made


def _check_form(way: Quantised, model: "TransformerModel", chosen: "Sequence[Matrix]") -> None:
    from torch import nn
    from transformers import PreTrainedModel

    for name, part in model.parts.items():
        if not isinstance(part, PreTrainedModel):
            raise ConfigError(
                f"{way.kind} cannot be written: the {name} of a {model.config.kind} model is "
                "rayembed's own encoder, and only models of transformers can be loaded from "
                "compressed-tensors; export the model for CPUs instead"
            )
    for matrix in chosen:
        if type(matrix.module) is not nn.Linear:
            raise ConfigError(
                f"{way.kind} cannot be written: {matrix.name} belongs to a "
                f"{type(matrix.module).__name__}, and only plain linear layers can be loaded from "
                "compressed-tensors; add it to the setting skip"
            )
    outside = [matrix.name for matrix in chosen if matrix.name.split(".", 1)[0] not in model.parts]
    if outside:
        raise ConfigError(
            f"{way.kind} cannot be written: its format stores matrices of transformers only, but "
            f"{outside[0]} is outside of one; add it to the setting skip"
        )


def _check_names(
    way: Quantised, model: "TransformerModel", chosen: "Sequence[Matrix]", folder: Path
) -> None:
    """Check that a saved model's files use the same parameter names as the model in memory."""
    from rayembed.models.loading.files import read_header, weight_paths
    from rayembed.models.loading.saved_folder import part_folder

    stored = {
        f"{name}.{key}"
        for name in model.parts
        for path in weight_paths(part_folder(folder, name))
        for key in read_header(path)
    }
    missing = [matrix.name for matrix in chosen if matrix.name not in stored]
    if missing:
        raise ConfigError(
            f"{way.kind} cannot be written: transformers saves models of this type under other "
            f"names than they have in memory, and {missing[0]} is not in the files; exclude such "
            "matrices by skip"
        )


def _write_part(
    scheme: Scheme, name: str, part: Any, weights: Mapping[str, Quantity], folder: Path
) -> None:
    """Replace the weights of a saved part by the quantised ones, and describe them in its
    config.json.
    """
    import safetensors.torch
    from torch import nn

    from rayembed.models.loading.files import load_weights, read_json, weight_paths, write_json

    own = {
        key.removeprefix(f"{name}."): value
        for key, value in weights.items()
        if key.startswith(f"{name}.")
    }
    if not own:
        return
    places: dict[str, str] = {}
    size = 0
    for path in weight_paths(folder):
        tensors = load_weights(path)
        for key in own.keys() & tensors.keys():
            tensors[key] = own[key].values.contiguous()
            tensors[f"{key}_scale"] = own[key].scale.contiguous()
        places |= dict.fromkeys(tensors, path.name)
        size += sum(value.nbytes for value in tensors.values())
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    assert own.keys() <= places.keys()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        write_json(index, {"metadata": {"total_size": size}, "weight_map": places})
    linear = [n for n, module in part.named_modules() if isinstance(module, nn.Linear)]
    ignored = [n for n in linear if f"{n}.weight" not in own]
    settings = read_json(folder / "config.json")
    write_json(
        folder / "config.json",
        settings | {"quantization_config": _quantization_config(scheme, ignored)},
    )


def _quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Build the config.json entry that describes the quantised weights to transformers and vLLM."""
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        preset_name_to_scheme,
    )

    group = preset_name_to_scheme(scheme, ["Linear"])
    group.format = _FORMATS[scheme]
    config = QuantizationConfig(
        config_groups={"group_0": group},
        format=_FORMATS[scheme],
        ignore=list(ignored),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    dumped: dict[str, Any] = json.loads(config.model_dump_json())
    # transformers else unpacks weights in a hook of the first pass, which sentence-transformers
    # goes past. vLLM reads no such key.
    return dumped | {"dequantize": True}


def _check_written(
    way: Quantised, model: "TransformerModel", weights: Mapping[str, Quantity], folder: Path
) -> None:
    """Check number types in the files, and that the reloaded model has the quantised weights and
    embeds texts.

    Raises:
        ArtifactError: it does not.
    """
    import torch

    from rayembed.models.loading.files import read_header, weight_paths
    from rayembed.models.loading.load import load_model, saved_dtype
    from rayembed.models.loading.saved_folder import part_folder

    stored = {
        f"{name}.{key}": str(value["dtype"])
        for name in model.parts
        for path in weight_paths(part_folder(folder, name))
        for key, value in read_header(path).items()
    }
    read = load_model(folder, dtype=saved_dtype(folder))
    back = read.state_dict()
    for name, (values, scale) in weights.items():
        expected = (values.float() * scale.float()).to(back[name].dtype)
        if stored.get(name) != _STORED[way.scheme] or not torch.equal(back[name], expected):
            raise ArtifactError(
                f"{way.label}: the saved file is wrong: {name} was saved as {stored.get(name)} or "
                "reloaded with other weights; the output was removed"
            )
    read.check_passes(way.label)
