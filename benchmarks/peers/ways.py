"""How each library computes attention. A way is a function of the number of threads that returns
(what it is, with its version; make). make(tensors, dtype, is_causal) takes query, key and value
[B, H, L, D] as numpy has them in float32, of values that the dtype holds, and returns (call, read):
call() is what is timed, and read(what it returned) is the output, in float32 again. What a model
would prepare once is prepared in make. Libraries are imported where they are needed: a process has
one of them, and the environment that pyright sees has few."""

# pyright: reportMissingImports=false

from functools import partial


def of_torch(threads, attend, about=None):
    """attend(query, key, value, is_causal, enable_gqa), of torch's tensors. about: what the way is,
    where it is not torch itself."""
    import torch

    torch.set_num_threads(threads)

    def make(tensors, dtype, is_causal):
        dtype = getattr(torch, dtype)
        inputs = [torch.from_numpy(x).to(dtype) for x in tensors]
        is_grouped = inputs[0].size(1) != inputs[1].size(1)
        call = partial(attend, *inputs, is_causal=is_causal, enable_gqa=is_grouped)
        return torch.no_grad()(call), lambda output: output.float().numpy()

    return about or f"torch {torch.__version__}", make


def qkv(threads):
    import qkv

    return of_torch(threads, qkv.attention, f"qkv {qkv.__version__}")


def sdpa(threads):
    from torch.nn.functional import scaled_dot_product_attention

    return of_torch(threads, scaled_dot_product_attention)


def flex_attention(threads):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch, head, query, key):
        return query >= key

    def make(tensors, dtype, is_causal):
        torch.compiler.reset()  # of too many shapes torch would run the last ones uncompiled
        length = tensors[0].shape[2]
        mask = create_block_mask(visible, None, None, length, length, "cpu") if is_causal else None

        @torch.compile(dynamic=False, fullgraph=True)
        def attend(query, key, value, is_causal, enable_gqa):
            return flex_attention(query, key, value, block_mask=mask, enable_gqa=enable_gqa)

        return of_torch(threads, attend)[1](tensors, dtype, is_causal)

    return f"torch {torch.__version__}", make


def zentorch(threads):
    """The operator that its compiled models call in place of SDPA."""
    import torch
    import zentorch

    def attend(query, key, value, is_causal, enable_gqa):
        return torch.ops.zentorch.zentorch_sdpa(query, key, value, 0.0, is_causal)[0]

    return of_torch(threads, attend, f"zentorch {zentorch.__version__}")


def of_onnxruntime(threads, lay_out, read, operator, **attributes):
    """operator: one of the standard's, or "domain/name", which takes lay_out(query, key or value)
    and whose output is read(output, query's shape). attributes: those of its node, each a function
    of (tensors, is_causal)."""
    import ml_dtypes
    import numpy as np
    import onnxruntime
    from onnx import helper

    def make(tensors, dtype, is_causal):
        inputs = [lay_out(x).astype(getattr(ml_dtypes, dtype, dtype)) for x in tensors]
        kind = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
        infos = [
            helper.make_tensor_value_info(name, kind, x.shape)
            for name, x in zip("qkvo", [*inputs, inputs[0]], strict=True)
        ]
        given = {name: of(tensors, is_causal) for name, of in attributes.items()}
        domain, _, name = operator.rpartition("/")
        node = helper.make_node(name, [*"qkv"], ["o"], domain=domain, **given)
        graph = helper.make_graph([node], "attention", infos[:3], infos[3:])
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # What goes wrong is raised, too.
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        binding = session.io_binding()
        for name, x in zip("qkv", inputs, strict=True):
            binding.bind_cpu_input(name, x)
        binding.bind_output("o")

        def call():
            session.run_with_iobinding(binding)
            return binding

        def output(bound):
            return read(bound.copy_outputs_to_cpu()[0].astype(np.float32), tensors[0].shape)

        return call, output

    return f"ONNX Runtime {onnxruntime.__version__}", make


def onnxruntime(threads):
    """The standard's Attention, as exported models have it."""
    return of_onnxruntime(
        threads,
        lambda x: x,
        lambda output, shape: output,
        "Attention",
        is_causal=lambda tensors, is_causal: int(is_causal),
    )


def onnxruntime_own(threads):
    """The operator of its own that its optimizer puts in place of a model's attention. It has
    [B, L, H D], and as many key heads as query heads."""

    def lay_out(x):
        B, _, L, _ = x.shape
        return x.swapaxes(1, 2).reshape(B, L, -1)

    def read(output, shape):
        B, H, L, D = shape
        return output.reshape(B, L, H, D).swapaxes(1, 2)

    return of_onnxruntime(
        threads,
        lay_out,
        read,
        "com.microsoft/MultiHeadAttention",
        num_heads=lambda tensors, is_causal: tensors[0].shape[1],
        unidirectional=lambda tensors, is_causal: int(is_causal),
    )


def openvino(threads):
    import ml_dtypes
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    def make(tensors, dtype, is_causal):
        """Grouped heads are a dimension of their own, over which its operator broadcasts."""
        query, key, value = tensors
        groups = key.shape[1]
        if query.shape[1] != groups:
            query = query.reshape(len(query), groups, -1, *query.shape[2:])
            key, value = key[:, :, None], value[:, :, None]
        kind = {"float32": openvino.Type.f32, "bfloat16": openvino.Type.bf16}[dtype]
        inputs = [x.astype(getattr(ml_dtypes, dtype, dtype)) for x in (query, key, value)]
        parameters = [ops.parameter(x.shape, kind) for x in inputs]
        attention = ops.scaled_dot_product_attention(*parameters, causal=is_causal)
        hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": kind}
        model = openvino.Model([attention], parameters)
        request = openvino.compile_model(model, "CPU", hints).create_infer_request()
        for i, x in enumerate(inputs):
            tensor = openvino.Tensor(kind, x.shape)
            tensor.data.view(x.dtype)[...] = x
            request.set_input_tensor(i, tensor)

        def call():
            request.infer()
            return request.get_output_tensor(0).data

        def read(output):
            return output.view(inputs[0].dtype).astype(np.float32).reshape(tensors[0].shape)

        return call, read

    return f"OpenVINO {openvino.__version__.partition('-')[0]}", make


def jax(threads):
    """Which has [B, L, H, D], and as many threads as its process has CPUs."""
    import jax
    import numpy as np

    def make(tensors, dtype, is_causal):
        inputs = [jax.numpy.asarray(x.swapaxes(1, 2), dtype=dtype) for x in tensors]
        attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=is_causal))

        def read(output):
            return np.asarray(output.astype("float32")).swapaxes(1, 2)

        return lambda: attend(*inputs).block_until_ready(), read

    return f"JAX {jax.__version__}", make
