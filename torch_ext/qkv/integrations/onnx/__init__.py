"""qkv's attention in ONNX models. See `translations`."""

from collections.abc import Callable
from importlib.util import find_spec

from torch._ops import OpOverload

__all__ = ["translations"]


def translations() -> dict[OpOverload, Callable]:
    """What `torch.onnx.export` has to be told to write qkv's attention as ONNX's `Attention`.

    The exported model holds none of qkv's operators: any runtime with the standard operators of
    opset 23 runs it. docs/cpp.md says what the table covers.

    Returns:
        A table for `custom_translation_table`, which may be merged with another one.

    Raises:
        ImportError: onnxscript is missing, which the exporter itself needs, too.
        NotImplementedError: not here but in `torch.onnx.export`, within its
            `torch.onnx.OnnxExporterError`: the call has an argument that ONNX has nothing for, or
            opset_version is less than 23.

    Example:
        >>> import qkv.integrations.onnx
        >>> table = qkv.integrations.onnx.translations()
        >>> program = torch.onnx.export(
        ...     model.eval(), (x,), dynamo=True, opset_version=23, custom_translation_table=table
        ... )
        >>> program.save("model.onnx")
    """
    if find_spec("onnxscript") is None:
        raise ImportError(
            "qkv.integrations.onnx needs onnxscript, but it is not installed: "
            "pip install 'qkv[onnx]'"
        )
    from qkv.integrations.onnx._operators import table

    return table()
