"""Weight-only block quantisation with ONNX Runtime's own kernels (`MatMulNBits`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from via_sd.contract.graphs import INPUT_IDS
from via_sd.export.passes.block_scales import refine_int4
from via_sd.export.passes.values import find_input
from via_sd.progress import Progress, no_progress

#: Entry of a value's metadata: the name of the initializer whose bytes it shares (same bytes, another shape).
SHARES_BYTES_OF = "via_sd.shares_bytes_of"
#: Activations in int8 for the product: the fast kernels, and what `accuracy_level=4` has meant throughout the field.
ACCURACY_LEVEL = 4
BLOCK_SIZE = 32


class QuantizePass(ir.passes.InPlacePass):
    """Quantise every constant matrix product, and the embedding, to `bits` (4 or 8), symmetric, in blocks along the
    inner dimension.

    A tied embedding is read from the head's own quantised table (`GatherBlockQuantized`), so that the vocabulary is
    stored once; any other embedding gets a quantised table of its own.

    Args:
        energy: mean square of each input channel, float32 [K], by weight name; with it the scales of 4-bit blocks are
            fitted to what the products compute (`refine_int4`).
        only: the products to quantise, and nothing else; every product and the embedding by default.

    Requires: weights of `MatMul` and `FusedMatMul(transB)` are initializers of rank 2.
    Ensures: no floating-point matrix product with a constant is left, of those to quantise, and no embedding in
    floating point; no weight is stored twice (but for a tied table whose rows end in padding).
    """

    def __init__(
        self,
        bits: int,
        block_size: int = BLOCK_SIZE,
        *,
        energy: Mapping[str, np.ndarray] = MappingProxyType({}),
        only: Collection[ir.Node] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"bits is {bits}, wanted 4 or 8")
        self.bits = bits
        self.block_size = block_size
        self.energy = energy
        self.only = only
        self.progress = progress

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        graph.opset_imports.setdefault("com.microsoft", 1)
        products = self._products(graph)
        for index, node in enumerate(products):
            self.progress("quantising", (index + 1) / len(products))
            self._quantize(graph, node)
        if self.only is None:
            for node in embeddings(graph):
                self._quantize_embedding(graph, node)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        left = [node.name for node in self._products(model.graph)]
        if self.only is None:
            left += [node.name for node in embeddings(model.graph)]
        if left:
            raise ir.passes.PostconditionError(f"not quantised: {left}")

    def _products(self, graph: ir.Graph) -> list[ir.Node]:
        return [node for node in constant_products(graph) if self.only is None or node in self.only]

    def _quantize(self, graph: ir.Graph, node: ir.Node) -> None:
        weight = node.inputs[1]
        assert weight is not None
        assert weight.name is not None
        assert weight.const_value is not None
        matrix = weight.const_value.numpy()
        if node.op_type == "FusedMatMul":
            matrix = matrix.T  # the embedding's layout, [vocab, hidden]
        hidden = node.inputs[0]
        assert hidden is not None
        energy = self.energy.get(weight.name)
        product, table, scale = block_product(hidden, matrix, weight.name, self.bits, self.block_size, energy=energy)
        product.name = node.name
        for value in (table, scale):
            graph.register_initializer(value)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [product], [node.outputs[0]], [product.outputs[0]])
        for reader in list(weight.consumers()):
            if reader.op_type == "Gather":
                self._look_up(graph, reader, self._rows(table, len(matrix)), scale)

    def _quantize_embedding(self, graph: ir.Graph, gather: ir.Node) -> None:
        """Let `gather` read a quantised table of its own."""
        weight = gather.inputs[0]
        assert weight is not None
        assert weight.const_value is not None
        matrix = weight.const_value.numpy().T
        packed, scales = quantize_blocks(np.ascontiguousarray(matrix), self.bits, self.block_size)
        if self.bits == 4:
            packed, scales = refine_int4(matrix, packed, scales, np.ones(len(matrix), np.float32))
        name = f"{weight.name}.q{self.bits}"
        scale = constant(f"{name}.scales", scales)
        graph.register_initializer(scale)
        rows = constant(f"{name}.rows", _without_padding(packed, len(matrix), self.bits))
        self._look_up(graph, gather, rows, scale)

    def _rows(self, table: ir.Value, width: int) -> ir.Value:
        """The blocks `table` of a head as rows of `width` entries, over the same bytes where no block is padded."""
        assert table.const_value is not None
        packed = table.const_value.numpy()
        rows = constant(f"{table.name}.rows", _without_padding(packed, width, self.bits))
        assert rows.const_value is not None
        if rows.const_value.size == packed.size:
            rows.metadata_props[SHARES_BYTES_OF] = table.name or ""
        return rows

    def _look_up(self, graph: ir.Graph, gather: ir.Node, rows: ir.Value, scale: ir.Value) -> None:
        """Replace `gather` by a lookup that dequantises the rows it reads."""
        graph.register_initializer(rows)
        lookup = ir.node(
            "GatherBlockQuantized",
            [rows, gather.inputs[1], scale],
            {"gather_axis": 0, "quantize_axis": 1, "block_size": self.block_size, "bits": self.bits},
            domain="com.microsoft",
            name=gather.name,
        )
        ir.convenience.replace_nodes_and_values(
            graph, gather, [gather], [lookup], [gather.outputs[0]], [lookup.outputs[0]]
        )


def _without_padding(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Blocks [N, blocks, bytes] as rows [N, bytes of `width` entries]."""
    return packed.reshape(len(packed), -1)[:, : -(-width * bits // 8)]


def block_product(
    hidden: ir.Value,
    matrix: np.ndarray,
    name: str,
    bits: int,
    block_size: int = BLOCK_SIZE,
    *,
    energy: np.ndarray | None = None,
) -> tuple[ir.Node, ir.Value, ir.Value]:
    """A node that multiplies `hidden` by float32 `matrix` [K, N] in blocks, and its initializers: blocks and scales.

    Args:
        name: of the weight.
        energy: mean square of each input channel, float32 [K], that 4-bit blocks are fitted to.
    """
    inner, outer = matrix.shape
    packed, scales = quantize_blocks(np.ascontiguousarray(matrix), bits, block_size)
    if bits == 4 and energy is not None:
        packed, scales = refine_int4(matrix, packed, scales, energy)
    table, scale = constant(f"{name}.q{bits}", packed), constant(f"{name}.q{bits}.scales", scales)
    product = ir.node(
        "MatMulNBits",
        [hidden, table, scale],
        {"K": inner, "N": outer, "bits": bits, "block_size": block_size, "accuracy_level": ACCURACY_LEVEL},
        domain="com.microsoft",
    )
    return product, table, scale


def quantize_blocks(matrix: np.ndarray, bits: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 `matrix` [K, N] symmetrically in blocks of `block_size` along K.

    Returns:
        (packed uint8 [N, K / block_size, block_size * bits / 8], scales float32 [N, K / block_size]), the operands B
        and scales of `MatMulNBits`.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    config = DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=True, bits=bits)
    packed, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(matrix.astype(np.float32, copy=False))
    return packed, scales.reshape(packed.shape[0], -1)


def constant_products(graph: ir.Graph) -> Iterator[ir.Node]:
    """The matrix products of `graph` whose weights are constants of rank 2."""
    for node in graph:
        if node.op_type in ("MatMul", "FusedMatMul"):
            weight = node.inputs[1]
            if weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2:
                yield node


def embeddings(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of `graph` that look tokens up in a constant table of floating-point numbers."""
    tokens = find_input(graph, INPUT_IDS.name)
    readers = () if tokens is None else tokens.consumers()
    return [
        node
        for node in readers
        if node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[0].const_value is not None
    ]


def constant(name: str, array: np.ndarray) -> ir.Value:
    """An initializer that is in no graph yet."""
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    value.shape = ir.Shape(array.shape)
    return value
